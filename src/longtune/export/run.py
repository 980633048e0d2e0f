"""The order of an export: refuse early, read, write to a temporary folder, read that again, compare, then appear."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import longtune
from longtune.errors import Problem, UserError, fault_of_text
from longtune.export import gguf_lora, merged, mlx, mlx_check, mlx_merged, peft, verify
from longtune.export.combine import combined, even
from longtune.export.memory import compute_dtype
from longtune.export.verify import Difference
from longtune.model.adapter_files import Update, Updates, named_for, read_updates
from longtune.model.adapters import load_adapter
from longtune.model.experts import find_stacks, nested_paths, shortest_parameters
from longtune.model.loading import Loaded, load_model
from longtune.model.targets import decoder_layers, shortest_patterns
from longtune.outputs import check_output, writing

FORMATS = ("peft", "merged", "mlx", "mlx-merged", "gguf-lora")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_WHOLE = ("merged", "mlx-merged")
"""Formats that hold the model, too."""

MARK = "longtune_export.json"
"""What an older export is told by, and what it was made of. A model or an adapter that somebody else wrote lacks it."""


class ExportFailed(Exception):
    """The artefact doesn't compute what it should; it is kept under another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to export.

    Attributes:
        adapter: an adapter's folder, of PEFT's layout or mlx-lm's.
        model: the base model's name, as `load_model` takes it.
        to: one of `FORMATS`.
        out: the folder to make.
        dtype: of the weights: fp32, bf16 or fp16; None keeps an adapter's own, and the base's own for a merged model.
        requantise: keep an MLX base quantised: merged weights go back into each module's own format.
        others: further adapters with their weights, added to the first.
        even_ranks: pad all ranks with zeros to the largest (for readers that know one rank alone).
        force: replace an older export at `out`.
        prompt: what both sides read when they are compared.
        device: as `load_model` takes it.
    """

    adapter: Path
    model: str
    to: str
    out: Path
    dtype: str | None = None
    requantise: bool = False
    others: tuple[tuple[Path, float], ...] = ()
    even_ranks: bool = False
    force: bool = False
    prompt: str = verify.PROMPT
    device: str = "cpu"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was made.

    Attributes:
        folder: where it lies.
        files: names of its files with their bytes.
        difference: against base + adapter.
        checked_by: what read it again.
        notes: what the user should know.
    """

    folder: Path
    files: dict[str, int]
    difference: Difference
    checked_by: str
    notes: list[str] = field(default_factory=list)


def export(request: Request, tell: Callable[[str], None] = lambda line: None) -> Exported:
    """Export an adapter.

    Raises:
        UserError: the request, the adapter, or the model must be changed; nothing was written.
        ExportFailed: what was written computes something else; it lies beside `out`, under a name with `.failed`.
    """
    _check(request)
    sources = [(read_updates(path), weight) for path, weight in _sources(request)]
    tell(f"loading {request.model}")
    dtype, why = compute_dtype(request.model)
    trust = request.trust_remote_code
    # Nothing but the job holds the base: merging empties it, and it is gone before the artefact is read.
    job = _Job(
        request, sources, load_model(request.model, dtype=dtype, device=request.device, trust_remote_code=trust), why
    )
    out = request.out
    place = f"export --out {out}"
    with writing(place):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tell(f"writing {request.to} to {out}")
        with writing(place):
            work.chmod(0o755)
            job.write(work)
            _mark(work, request)
        tell("reading it again")
        difference = job.verify(work)
        if not difference.passes:
            failed = out.with_name(f"{out.name}.failed")
            shutil.rmtree(failed, ignore_errors=True)
            with writing(place):
                work.rename(failed)
            raise ExportFailed(
                f"{failed} differs from base + adapter by {difference.largest:.3g} in a logit (allowed: "
                f"{difference.allowed:.3g}); it is kept under this name to be looked at{job.rounding()}"
            )
        with writing(place):
            _appear(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    files = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    return Exported(out, files, difference, job.checked_by, job.notes)


class _Job:
    """One export: the updates by the model's names, what to write, and how that is read again."""

    def __init__(self, request: Request, sources: list[tuple[Updates, float]], loaded: Loaded, why: str):
        self.request, self.loaded, self.model = request, loaded, loaded.model
        self.notes: list[str] = [*([why] if why else []), *_different_bases(sources, request.model, loaded.path)]
        self.checked_by = "longtune"
        parts = [(named_for(updates, self.model), weight) for updates, weight in sources]
        self.updates: dict[str, Update] = parts[0][0] if len(parts) == 1 else combined(parts)
        self.rslora = len(parts) == 1 and sources[0][0].rslora and not request.even_ranks
        if request.even_ranks:
            self.updates = even(self.updates)
        _refuse_stacks(request.to, self.updates, loaded)
        if request.to in _WHOLE:
            merged.check_mergeable(self.model, self.updates)
        if request.to == "mlx-merged":
            mlx_merged.check(loaded, self.updates, request.requantise)
        if request.to == "gguf-lora":
            gguf_lora.check(self.model)
        self.tokens = verify.prompt_tokens(loaded.tokenizer, request.prompt)
        self.computes = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.base = verify.logits(self.model, self.tokens)
        # Each adapter on its own, so that combining them is compared, too.
        self.truth = self._truth(parts)
        if request.requantise:
            with mlx_merged.requantised(self.model, self.updates):
                self.packed = verify.logits(self.model, self.tokens)
            lost = float((self.packed - self.truth).abs().max())
            self.notes.append(f"packing the merged weights again moves logits by up to {lost:.3g} from base + adapter")

    def _truth(self, parts: list[tuple[dict[str, Update], float]]) -> torch.Tensor:
        weighted = [
            {name: Update(u.down_RI, u.up_OR, u.scale * weight) for name, u in updates.items()}
            for updates, weight in parts
        ]
        with verify.added_all(self.model, weighted):
            return verify.logits(self.model, self.tokens)

    def write(self, folder: Path) -> None:
        request, loaded = self.request, self.loaded
        dtype = DTYPES[request.dtype] if request.dtype else None
        if request.to == "peft":
            stacks = [name for name, update in self.updates.items() if update.stacked]
            peft.write(
                folder,
                self.updates,
                targets=shortest_patterns(self.model, [name for name in self.updates if name not in stacks]),
                parameters=shortest_parameters(self.model, stacks) if stacks else (),
                paths=nested_paths(find_stacks(self.model), stacks),
                base=request.model,
                rslora=self.rslora,
                dtype=dtype,
            )
        elif request.to == "mlx":
            layers = decoder_layers(self.model)[1]
            mlx.write(folder, self.updates, layers=layers, base=request.model, dtype=dtype)
        elif request.to == "gguf-lora":
            gguf_lora.write(folder, self.model, self.updates, base=request.model, dtype=dtype)
        elif request.to == "mlx-merged":
            self.written = dtype or self._base_dtype()
            mlx_merged.write(folder, loaded, self.updates, dtype=self.written, requantise=request.requantise)
        else:
            self.written = dtype or self._base_dtype()
            merged.write(folder, self.model, self.updates, dtype=self.written, tokenizer=loaded.tokenizer)

    def _base_dtype(self) -> torch.dtype:
        stored = merged.stored_dtype(self.loaded.path) if self.loaded.path is not None else None
        return stored or torch.bfloat16

    def rounding(self) -> str:
        """What to try where a difference is too large; empty where nothing was rounded."""
        rounded = DTYPES[self.request.dtype] if self.request.dtype else getattr(self, "written", torch.float32)
        if rounded == torch.float32:
            return ""
        return f". If it is the rounding to {str(rounded).removeprefix('torch.')}, --dtype fp32 rounds nothing"

    def verify(self, folder: Path) -> Difference:
        request = self.request
        if request.to in _WHOLE:
            self._give_up_base()
            found = self._mlx_logits(folder) if request.to == "mlx-merged" else None
            if found is None:
                found = verify.logits(self._load_again(folder), self.tokens)
            tolerance = max(verify.ROUNDED[self.written], verify.LOSSLESS[self.computes])
            if request.requantise:
                # What packing loses is told above; whether the files hold the packed numbers is judged.
                return verify.compare(self.base, self.packed, found, tolerance)
            return verify.compare(self.base, self.truth, found, tolerance)
        tolerance = verify.LOSSLESS[self.computes]
        if request.dtype in ("bf16", "fp16"):
            tolerance = max(tolerance, verify.ROUNDED[DTYPES[request.dtype]])
        if request.to == "peft":
            self.checked_by = "peft"
            found = verify.logits(load_adapter(self.model, folder).eval(), self.tokens)
        elif request.to == "mlx":
            found = self._mlx_logits(self.loaded.path, folder)
            if found is None:
                found = verify.logits(self.model, self.tokens, named_for(read_updates(folder), self.model))
        else:
            found = verify.logits(self.model, self.tokens, gguf_lora.read(folder / gguf_lora.FILE, self.model))
        return verify.compare(self.base, self.truth, found, tolerance)

    def _mlx_logits(self, model: Path | None, adapter: Path | None = None) -> torch.Tensor | None:
        """What mlx-lm computes, where it can be asked; else why it wasn't is noted."""
        if model is None or not mlx_check.has_folder(model):
            self.notes.append(
                "the base is no folder that mlx-lm reads, so longtune's own reader of the layout was asked"
            )
            return None
        if self.computes != torch.float32:
            return None
        if adapter is not None and (reason := self._mlx_base_differs(model)):
            self.notes.append(reason)
            return None
        try:
            found, reason = mlx_check.logits(model, self.tokens, adapter)
        except ValueError as error:
            raise UserError(Problem(f"export --to {self.request.to}", str(error), "use --to mlx-merged")) from None
        if found is None:
            self.notes.append(reason)
        else:
            self.checked_by = "mlx-lm"
        return found

    def _mlx_base_differs(self, model: Path) -> str:
        """Why mlx-lm can't judge an adapter: it reads even the base model otherwise than transformers."""
        found, reason = mlx_check.logits(model, self.tokens)
        if found is None:
            return reason
        difference = verify.compare(self.base, self.base, found, verify.LOSSLESS[torch.float32])
        if difference.passes:
            return ""
        return (
            f"mlx-lm computes other logits with {model} even without an adapter (by up to {difference.largest:.3g}): "
            "it misreads the folder's config; use the adapter with the base model in MLX's own layout"
        )

    def _load_again(self, folder: Path) -> PreTrainedModel:
        name = str(self.computes).removeprefix("torch.")
        trust = self.request.trust_remote_code
        return load_model(str(folder), dtype=name, device="cpu", trust_remote_code=trust).model

    def _give_up_base(self) -> None:
        """Frees the base before the artefact is loaded: the two never lie in memory together."""
        del self.model, self.loaded
        gc.collect()


def _check(request: Request) -> None:
    problems: list[Problem] = []
    place = f"export --to {request.to}"
    if request.to not in FORMATS:
        problems.append(Problem("export --to", f"{request.to!r} is unknown", f"use {', '.join(FORMATS)}"))
    if request.dtype is not None and request.dtype not in DTYPES:
        problems.append(Problem("export --dtype", f"{request.dtype!r} is unknown", f"use {', '.join(DTYPES)}"))
    if request.requantise and request.to != "mlx-merged":
        fix = "use --to mlx-merged; other quantised formats are made by their own tools from --to merged"
        problems.append(Problem(f"{place} --requantise", "only a merged MLX checkpoint can be requantised", fix))
    if request.to == "gguf-lora" and request.dtype == "bf16":
        problems.append(Problem(f"{place} --dtype", "adapters are fp32 or fp16 there", "use fp16, or leave it out"))
    if request.even_ranks and request.to != "peft":
        problems.append(Problem(f"{place} --even-ranks", "has no meaning there", "leave it out"))
    for path, weight in request.others:
        if not abs(weight) < float("inf"):
            problems.append(Problem(f"export --with {path}", f"{weight} is no weight"))
    if fault := fault_of_text(request.prompt):
        problems.append(Problem("export --prompt", fault, "convert it to UTF-8"))
    problems.extend(_out_problems(request))
    if problems:
        raise UserError(problems)
    check_output(request.out, f"export --out {request.out}", folder=True)


def _refuse_stacks(to: str, updates: Mapping[str, Update], loaded: Loaded) -> None:
    """Raises UserError where a layout has no place for adapters of experts' tensors."""
    if to not in ("mlx", "gguf-lora") or not any(update.stacked for update in updates.values()):
        return
    name = next(name for name, update in updates.items() if update.stacked)
    whose = {"mlx": "mlx-lm adapts gate and up apart, by other names for each architecture"}
    reason = f"adapts experts, and {whose.get(to, 'llama.cpp lays out their tensors otherwise')}"
    raise UserError(Problem(f"export --to {to}: {name}", reason, "use --to peft, or --to merged"))


def _out_problems(request: Request) -> list[Problem]:
    """Why nothing may appear at `out`."""
    out = request.out
    place = f"export --out {out}"
    sources = [request.adapter, *(path for path, _ in request.others), Path(request.model)]
    if not out.name:
        return [Problem(place, "names no folder")]
    for source in sources:
        if source.exists() and source.resolve().is_relative_to(out.resolve()):
            return [Problem(place, f"would take the place of {source}, which is read", "choose another folder")]
    if not (out.exists() or out.is_symlink()):
        return []
    if out.is_symlink() or not out.is_dir():
        return [Problem(place, "is there, and is no folder", "choose another name")]
    names = {file.name for file in out.iterdir()}
    if not names:
        return []
    if not request.force:
        return [Problem(place, "is there already", "choose another folder, or replace it: --force")]
    if MARK not in names or any((out / name).is_dir() for name in names):
        reason = f"holds something else than an export of longtune's (which has a {MARK})"
        return [Problem(place, reason, "choose another folder")]
    return []


def _mark(folder: Path, request: Request) -> None:
    """Notes in the folder what it is an export of."""
    made = {
        "longtune": longtune.__version__,
        "to": request.to,
        "base": request.model,
        "adapters": [{"path": str(path), "weight": weight} for path, weight in _sources(request)],
    }
    (folder / MARK).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _sources(request: Request) -> list[tuple[Path, float]]:
    return [(request.adapter, 1.0), *request.others]


def _different_bases(sources: list[tuple[Updates, float]], model: str, path: Path | None) -> list[str]:
    """What to tell of adapters that name other base models than each other, or than the one that is used; folders may
    have moved since."""
    named = {str(updates.folder): updates.base_model for updates, _ in sources if updates.base_model}
    names = {Path(base).name for base in named.values()}
    if len(names) > 1:
        return ["the adapters name different base models: " + ", ".join(f"{f} {base}" for f, base in named.items())]
    if not names or names <= {Path(model).name, path.name if path is not None else ""}:
        return []
    folder, base = next(iter(named.items()))
    return [
        f"{folder} was made for {base}, and is exported for {model}: the shapes are the same, the weights may not be"
    ]


def _appear(work: Path, out: Path) -> None:
    """The finished folder under its name; an older one is gone only when the new one is there."""
    if out.exists():
        old = work.with_name(f"{work.name}-old")
        out.rename(old)
        work.rename(out)
        shutil.rmtree(old)
    else:
        work.rename(out)


def as_dict(exported: Exported) -> dict[str, Any]:
    """Plain values for `--json`."""
    difference = exported.difference
    return {
        "folder": str(exported.folder),
        "files": exported.files,
        "largest_difference": difference.largest,
        "allowed_difference": difference.allowed,
        "adapter_effect": difference.effect,
        "largest_logit": difference.scale,
        "checked_by": exported.checked_by,
        "notes": exported.notes,
    }
