"""Checkpoints: a whole PEFT adapter and the trainer's state in one folder that appears complete or not at all.

    checkpoints/step-00100/
      adapter_model.safetensors, adapter_config.json   loads in PEFT as it is
      optimiser.safetensors     AdamW's averages by parameter name, and torch's generator states
      trainer.json              step, data cursor, other generators, progress
      manifest.json             SHA-256 of each file, by which a damaged checkpoint is told from a whole one

The schedule has no state of its own: it is a function of the step. Nothing here is pickled.
"""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from longtune.model.adapters import save_adapter
from longtune.train import files

FOLDER = "checkpoints"
_RNG = "rng."
_NEEDED = ("adapter_config.json", "adapter_model.safetensors", "optimiser.safetensors", "trainer.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    step: int
    state: dict[str, Any]


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:05d}"


def save(
    run: Path,
    step: int,
    model: PeftModel,
    optimiser: torch.optim.Optimizer,
    state: dict[str, Any],
) -> Path:
    """Writes the checkpoint of a step and returns its folder.

    Args:
        state: JSON values that the caller wants back.

    Raises:
        OSError: it can't be written; nothing of it stays, and older ones are as they were.
    """
    target = folder_of(run, step)
    target.parent.mkdir(exist_ok=True)
    with files.disk_errors(), files.whole_folder(target) as folder:
        adapter = folder / "adapter"
        save_adapter(model, adapter)
        for file in adapter.iterdir():
            file.rename(folder / file.name)
        adapter.rmdir()
        tensors = _optimiser_tensors(model, optimiser) | _generator_tensors()
        save_file(tensors, folder / "optimiser.safetensors")
        files.write_json(folder / "trainer.json", {"step": step, "state": state, "generators": _generators()})
        names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        files.write_json(folder / "manifest.json", {name: files.digest(folder / name) for name in names})
    return target


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line about each newer one that is damaged."""
    damaged: list[str] = []
    for folder in reversed(_folders(run)):
        problem = _damage(folder)
        if problem is None:
            trainer = files.read_json(folder / "trainer.json")
            return Checkpoint(folder, trainer["step"], trainer["state"]), damaged
        damaged.append(f"{folder}: {problem}")
    return None, damaged


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Puts optimiser and generators back; the model holds the checkpoint's adapter already."""
    tensors = load_file(checkpoint.folder / "optimiser.safetensors")
    generators = files.read_json(checkpoint.folder / "trainer.json")["generators"]
    names = _names(model)
    state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            prefix = f"{names[parameter]}#"
            state[parameter] = {
                key.removeprefix(prefix): value.to(torch.device("cpu") if key.endswith("#step") else parameter.device)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
    optimiser.state.clear()
    optimiser.state.update({parameter: value for parameter, value in state.items() if value})
    torch.set_rng_state(tensors[f"{_RNG}cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"{_RNG}cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"{_RNG}cuda.{index}"], index)
    version, words, gauss = generators["python"]
    random.setstate((version, tuple(words), gauss))
    kind, words, position, has_gauss, cached = generators["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, cached))


def set_damaged_aside(run: Path, step: int) -> None:
    """Renames checkpoints newer than `step`, which `newest` found damaged, so that none of them counts as one.

    They are kept under another name for whoever wants to look; a leftover of a killed writer is removed.
    """
    files.remove_leftovers(run / FOLDER, [".step-*.tmp", ".step-*.removed"])
    for folder in _folders(run):
        if _step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def prune(run: Path, keep: str, scores: dict[int, float]) -> None:
    """Removes what `keep` (all, "last N", best ...) doesn't ask for; the newest always stays.

    Args:
        scores: by step, the measure of `best`: the lowest is the best.
    """
    if keep == "all":
        return
    folders = _folders(run)
    count = 1 if keep.startswith("best") else int(keep.removeprefix("last "))
    measured = {folder: scores[_step_of(folder)] for folder in folders if math.isfinite(_score(folder, scores))}
    best = min(measured, key=lambda folder: measured[folder]) if measured else None
    for folder in folders[:-count]:
        if keep.startswith("best") and folder == best:
            continue
        # Renamed first, so that a kill in between can't leave half a checkpoint under a checkpoint's name.
        doomed = folder.with_name(f".{folder.name}.removed")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _folders(run: Path) -> list[Path]:
    """The folders that have a checkpoint's name, oldest first; others that somebody put there are nobody's business."""
    return sorted((f for f in (run / FOLDER).glob("step-*") if f.name[5:].isdecimal()), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _score(folder: Path, scores: dict[int, float]) -> float:
    return scores.get(_step_of(folder), math.nan)


def _damage(folder: Path) -> str | None:
    try:
        manifest = files.read_json(folder / "manifest.json")
        if lacking := [name for name in _NEEDED if name not in manifest]:
            return f"{lacking[0]} is missing"
        for name, expected in manifest.items():
            if files.digest(folder / name) != expected:
                return f"{name} is not what was written"
        trainer = files.read_json(folder / "trainer.json")
        if lacking := [key for key in ("step", "state", "generators") if key not in trainer]:
            return f"trainer.json has no {lacking[0]}"
        if trainer["step"] != _step_of(folder):
            return f"it is of step {trainer['step']}"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return str(error)
    return None


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _optimiser_tensors(model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = _names(model)
    return {
        f"{names[parameter]}#{key}": value.detach().cpu().contiguous()
        for parameter, values in optimiser.state.items()
        for key, value in values.items()
    }


def _generator_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"{_RNG}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"{_RNG}cuda.{i}": state.cpu() for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def _generators() -> dict[str, Any]:
    kind, words, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(words).tolist(), position, has_gauss, cached]}
