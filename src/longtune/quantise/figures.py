"""Reading sensitivities for a choice of widths: every width that was measured, by this model's names.

Which file rank policies read, and how they use the lowest width alone, is the work of `model.ranks`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from longtune.errors import Problem, UserError
from longtune.model.names import match_names

_FIX = "write it with: longtune sensitivity MODEL --data DATA"


def figures_for(names: Sequence[str], folder: Path | None, file: Path | None = None) -> dict[str, dict[int, float]]:
    """KL by unit and width.

    Args:
        names: of the units. folder: the model's, whose optiq/sensitivity.json is the default. file: another one.

    Raises:
        UserError: there is no file, it can't be read, or it names nothing of this model.
    """
    if file is None:
        file = None if folder is None or not folder.is_dir() else folder / "optiq" / "sensitivity.json"
        if file is None or not file.is_file():
            raise UserError(Problem("--sensitivity", "the model comes without figures", f"{_FIX}; or use --uniform"))
    found = _read(file)
    matched = match_names(found, set(names))
    # Embeddings and heads lie outside the layers, and are named alike.
    figures = {ours: found[theirs] for theirs, ours in matched.items()}
    if not figures:
        raise UserError(Problem(str(file), "names no module of this model", _FIX))
    return figures


def _read(file: Path) -> dict[str, dict[int, float]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(Problem(str(file), f"can't be read ({error})", _FIX)) from None
    entries = values.get("layers") if isinstance(values, dict) else values
    figures: dict[str, dict[int, float]] = {}
    problems: list[Problem] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [None]):
        try:
            measured = {int(float(bits)): float(kl) for bits, kl in entry["sensitivities"].items()}  # pyright: ignore[reportOptionalSubscript]
            figures[str(entry["layer_name"])] = measured  # pyright: ignore[reportOptionalSubscript]
            wrong = [kl for kl in measured.values() if not kl >= 0]
            if wrong:
                problems.append(Problem(f"{file}: entry {number}", f"{wrong[0]} is no divergence", _FIX))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"has no layer_name with sensitivities {{bits: kl}} ({type(error).__name__}: {error})"
            problems.append(Problem(f"{file}: entry {number}", reason, _FIX))
    if problems:
        raise UserError(problems[:10])
    return figures
