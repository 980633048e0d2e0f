"""Reading what the command line names: options as overrides, and the model behind a TARGET."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longtune.config import RunConfig, load_config, quoted
from longtune.errors import Problem, UserError, fault_of_text


def as_overrides(named: Mapping[str, str | None]) -> list[str]:
    """`key=value` overrides of the options that were given."""
    return [f"{key}={quoted(value)}" for key, value in named.items() if value is not None]


def column_overrides(columns: str | None) -> list[str]:
    """The override that `--map` stands for; raises UserError where it can't be read."""
    if columns is None:
        return []
    from longtune.data.formats import parse_columns

    return [f"columns={json.dumps(parse_columns(columns))}"]


def readable(texts: Mapping[str, str | None]) -> None:
    """Refuses texts of the command line (by their places) that came in bytes that are no UTF-8."""
    faults = {place: fault_of_text(text or "") for place, text in texts.items()}
    problems = [Problem(place, reason, "convert it to UTF-8") for place, reason in faults.items() if reason]
    if problems:
        raise UserError(problems)


@dataclass(frozen=True, slots=True)
class Target:
    """A model to look at.

    Attributes:
        config: the run's config, or one of defaults.
        adapter: the adapter's folder; None for a model alone.
        is_run: the target is a run folder.
    """

    config: RunConfig
    adapter: Path | None
    is_run: bool


def find_target(name: str, *, model: str | None = None, overrides: list[str] | None = None) -> Target:
    """What TARGET is: a run folder, an adapter's folder, or else a model.

    Args:
        model: the base model, where the adapter's own note of it doesn't hold here.
        overrides: `key=value` on top of the run's config.

    Raises:
        UserError: a run folder without any adapter, or a config problem.
    """
    folder = Path(name)
    extra = [*as_overrides({"model": model}), *(overrides or [])]
    if (folder / "config.yaml").is_file():
        return Target(load_config(folder, extra), _run_adapter(folder), True)
    if (folder / "adapter_config.json").is_file():
        base = [] if model else as_overrides({"model": _base_of(folder)})
        return Target(load_config(None, ["data=none", *base, *extra]), folder, False)
    _check_path(folder, name)
    base = as_overrides({"model": name})
    return Target(load_config(None, ["data=none", *base, *extra]), None, False)


def _check_path(path: Path, name: str) -> None:
    """Refuses what can only be a path and isn't there, before anything else is missed."""
    path = path.expanduser()
    if path.exists() or not (name.startswith((".", "/", "~")) or (path.parent.name and path.parent.is_dir())):
        return
    here = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, here, n=2)
    fix = f"did you mean {' or '.join(str(path.parent / entry) for entry in near)}?" if near else "check the path"
    raise UserError(Problem(name, "there is no such run, adapter or model", fix))


def _run_adapter(run: Path) -> Path:
    if (run / "adapter" / "adapter_config.json").is_file():
        return run / "adapter"
    from longtune.train.checkpoint import newest

    found, _ = newest(run)
    if found is None:
        raise UserError(Problem(str(run), "this run has no adapter yet", "finish it: longtune train --resume"))
    return found.folder


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not base:
        raise UserError(Problem(str(adapter), "doesn't say which model it was made for", "name it: --model MODEL"))
    return base
