"""Rank policies: which rank each adapted module gets, from its storage width or its measured sensitivity.

Pure functions of names and numbers, the files that sensitivities and widths are read from, and the same ranks as PEFT's
patterns and as rows of a table. Making adapters of these ranks is the work of `adapters`; measuring sensitivities and
storing weights in few bits is the work of others.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtune.errors import Problem, UserError

POLICIES = ("constant", "by_bits", "by_kl")

MINIMUM = 2
"""No policy goes below this rank (but a base rank of 1 under `constant` is taken as it is)."""

_PLAIN_BITS = 4
"""The width at which `by_bits` gives the base rank."""

_UNQUANTISED = 16
"""From this width on, weights count as not quantised."""

_SENSITIVITIES = ("optiq/sensitivity.json",)
_WIDTHS = ("optiq/metadata.json", "optiq_metadata.json")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank for every adapted module.

    Attributes:
        by_name: rank by full module name, in the order of the names.
        policy: by which they were chosen.
        base: the base rank.
        bits: storage width by name, where the weights are quantised.
        kl: sensitivity (mean KL divergence, nats) by name, where it is known.
        notes: what the user should know: which modules had no figure.
    """

    by_name: Mapping[str, int]
    policy: str
    base: int
    bits: Mapping[str, float]
    kl: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def even(self) -> bool:
        """Every module has the base rank."""
        return all(rank == self.base for rank in self.by_name.values())

    def rows(self) -> list[dict[str, Any]]:
        """A table for reports: one row for each kind of module (its name without the layer number) and width.

        Keys: module, bits (None: not quantised), modules (how many), kl_low and kl_high (None: not known), rank_low,
        rank_high, rank_sum. Rows come in the order in which their first module does.
        """
        groups: dict[tuple[str, float | None], list[str]] = {}
        for name in self.by_name:
            groups.setdefault((kind_of(name), self.bits.get(name)), []).append(name)
        rows = []
        for (kind, bits), names in groups.items():
            ranks = [self.by_name[name] for name in names]
            figures = [self.kl[name] for name in names if name in self.kl]
            rows.append(
                {
                    "module": kind,
                    "bits": bits,
                    "modules": len(names),
                    "kl_low": min(figures, default=None),
                    "kl_high": max(figures, default=None),
                    "rank_low": min(ranks),
                    "rank_high": max(ranks),
                    "rank_sum": sum(ranks),
                }
            )
        return rows

    def lines(self) -> list[str]:
        """The rows as text to print, under a heading; one line where every rank is the base rank."""
        if self.even:
            return [f"{len(self.by_name)} modules of rank {self.base}"]
        texts = [("module", "bits", "modules", "sensitivity", "rank")]
        for row in self.rows():
            low, high = row["kl_low"], row["kl_high"]
            kl = "-" if low is None else f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
            low, high = row["rank_low"], row["rank_high"]
            rank = str(low) if low == high else f"{low} to {high}"
            bits = "-" if row["bits"] is None else f"{row['bits']:g}"
            texts.append((row["module"], bits, str(row["modules"]), kl, rank))
        widths = [max(len(text[column]) for text in texts) for column in range(len(texts[0]))]
        return [
            "  ".join([text[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(text[1:], widths[1:], strict=True))])
            for text in texts
        ]

    def describe(self) -> dict[str, Any]:
        """Plain values for a run's records."""
        ranks = list(self.by_name.values())
        return {
            "policy": self.policy,
            "base": self.base,
            "modules": len(ranks),
            "lowest": min(ranks),
            "highest": max(ranks),
            "sum": sum(ranks),
            "rows": self.rows(),
            "notes": list(self.notes),
        }


def choose_ranks(
    policy: str,
    rank: int,
    names: Sequence[str],
    bits: Mapping[str, float] | None = None,
    kl: Mapping[str, float] | None = None,
) -> Ranks:
    """The rank of every module.

    - constant: r.
    - by_bits: ceil(r * bits / 4), bits being the storage width; a module that isn't quantised gets r.
    - by_kl: ceil(r * clip(kl / median, 0.5, 2)), the median over the figures of `names`; a module without a figure
      gets its rank by bits.

    Both of the latter give at least 2.

    Args:
        rank: the base rank r.
        names: full names of the modules that are adapted.
        bits: storage width of modules by full name; absent, or 16 and more: not quantised.
        kl: sensitivity of modules by full name; only figures of `names` are looked at.

    Raises:
        UserError: an unknown policy, a rank below 1, or figures that are no figures.
    """
    _check(policy, rank, bits or {}, kl or {})
    bits = {name: bits[name] for name in names if bits and bits.get(name, _UNQUANTISED) < _UNQUANTISED}
    kl = {name: kl[name] for name in names if kl and name in kl}
    if policy == "constant":
        return Ranks(dict.fromkeys(names, rank), policy, rank, bits, kl)

    def by_bits(name: str) -> int:
        return max(MINIMUM, math.ceil(rank * bits[name] / _PLAIN_BITS) if name in bits else rank)

    notes: list[str] = []
    middle = statistics.median(kl.values()) if kl else 0.0
    if policy == "by_kl":
        notes.extend(_fallback_notes(names, bits, kl, middle))
    if policy == "by_bits" and not bits:
        notes.append("rank_policy by_bits: no target is quantised, so each has the base rank")
    chosen: dict[str, int] = {}
    for name in names:
        if policy == "by_kl" and name in kl and middle > 0:
            factor = min(2.0, max(0.5, kl[name] / middle))
            chosen[name] = max(MINIMUM, math.ceil(rank * factor))
        else:
            chosen[name] = by_bits(name)
    return Ranks(chosen, policy, rank, bits, kl, tuple(notes))


def _check(policy: str, rank: int, bits: Mapping[str, float], kl: Mapping[str, float]) -> None:
    problems: list[Problem] = []
    if policy not in POLICIES:
        problems.append(Problem("lora.rank_policy", f"{policy!r} is unknown", f"use {', '.join(POLICIES)}"))
    if rank < 1:
        problems.append(Problem("lora.rank", f"{rank} is below 1"))
    for name, width in bits.items():
        if not (width > 0 and math.isfinite(width)):
            problems.append(Problem(f"storage bits of {name}", f"{width} is no width"))
    for name, figure in kl.items():
        if not (figure >= 0 and math.isfinite(figure)):
            problems.append(Problem(f"sensitivity of {name}", f"{figure} is no KL divergence", "measure it again"))
    if problems:
        raise UserError(problems)


def _fallback_notes(
    names: Sequence[str], bits: Mapping[str, float], kl: Mapping[str, float], middle: float
) -> Iterator[str]:
    lacking = [name for name in names if name not in kl]
    instead = "their storage width" if bits else "the base rank, as no target is quantised"
    if not kl:
        yield f"rank_policy by_kl: there are no sensitivities, so ranks follow {instead} (see: longtune sensitivity)"
    elif middle == 0:
        yield f"rank_policy by_kl: the median sensitivity is 0, so ranks follow {instead}"
    elif lacking:
        shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        count = f"{len(lacking)} of {len(names)} targets have no sensitivity"
        yield f"rank_policy by_kl: {count} and take {instead}: {shown}"


def kind_of(name: str) -> str:
    """A module's name inside its layer: "self_attn.q_proj" of "model.layers.3.self_attn.q_proj"."""
    parts = name.split(".")
    # The first number counts the layers; a later one may be an expert's.
    first = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[first + 1 :]) or name


def patterns(
    ranks: Mapping[str, int], base: int, alpha: float, *, rslora: bool, others: Collection[str] = ()
) -> tuple[dict[str, int], dict[str, float]]:
    """The same ranks as PEFT's `rank_pattern` and `alpha_pattern`.

    PEFT reads a key as a regular expression for the end of a module's name, from a dot on. Keys here are whole names,
    escaped; a name that is also the end of another module's is anchored, so that no key ever means two modules.

    Without rsLoRA alpha_i = s * r_i with s = alpha / base, so that every module keeps the scale s. With rsLoRA the
    scale is alpha / sqrt(r_i) by definition, and alpha stays.

    Args:
        ranks: by full module name.
        others: the names of the model's other modules.

    Returns:
        (rank_pattern, alpha_pattern); modules of the base rank need no entry.
    """
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    everything = {*ranks, *others}
    longer = {name[at + 1 :] for name in everything for at, letter in enumerate(name) if letter == "."}
    for name, rank in ranks.items():
        if rank == base:
            continue
        key = ("^" if name in longer else "") + re.escape(name)
        rank_pattern[key] = rank
        if not rslora:
            alpha_pattern[key] = alpha * rank / base
    return rank_pattern, alpha_pattern


def read_sensitivities(file: Path) -> dict[str, float]:
    """KL divergence at the lowest width that was measured, by the file's module names.

    The file is a list of {layer_name, sensitivities: {bits: kl}}, or holds such a list under "layers".

    Raises:
        UserError: the file can't be read, or is something else.
    """
    values = _read_json(file)
    entries = values.get("layers") if isinstance(values, dict) else values
    fix = "write it with: longtune sensitivity MODEL --data DATA"
    if not isinstance(entries, list):
        raise UserError(Problem(str(file), "is no list of sensitivities", fix))
    figures: dict[str, float] = {}
    problems: list[Problem] = []
    for number, entry in enumerate(entries):
        try:
            measured = {float(width): float(kl) for width, kl in entry["sensitivities"].items()}
            figures[str(entry["layer_name"])] = measured[min(measured)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"has no layer_name with sensitivities {{bits: kl}} ({type(error).__name__}: {error})"
            problems.append(Problem(f"{file}: entry {number}", reason, fix))
    if problems:
        raise UserError(problems[:10])
    return figures


def read_widths(file: Path) -> dict[str, float]:
    """Storage bits by the file's module names, from `optimization.per_layer` or `per_layer` of a metadata file.

    Raises:
        UserError: the file can't be read, or its widths aren't numbers.
    """
    values = _read_json(file)
    values = values if isinstance(values, dict) else {}
    inner = values.get("optimization")
    layers = inner.get("per_layer") if isinstance(inner, dict) else None
    layers = layers if layers is not None else values.get("per_layer", {})
    try:
        return {str(name): float(entry["bits"]) for name, entry in layers.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(Problem(str(file), f"holds no bits for each layer ({type(error).__name__}: {error})")) from None


def find_sensitivities(folder: Path) -> Path | None:
    """The file of sensitivities that lies in a model's folder, or None."""
    return next((folder / name for name in _SENSITIVITIES if (folder / name).is_file()), None)


def find_widths(folder: Path) -> Path | None:
    """The file of storage widths that lies in a model's folder, or None."""
    return next((folder / name for name in _WIDTHS if (folder / name).is_file()), None)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(Problem(str(file), "no such file")) from None
    except (OSError, ValueError) as error:
        raise UserError(Problem(str(file), f"can't be read ({error})")) from None
