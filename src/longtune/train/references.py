"""Reference log-probs of preference rows: computed once and kept in the cache folder, or at every micro-batch.

What the reference is (the base model, or a frozen adapter on it) is `model.reference`'s work; what becomes of its
log-probs is the objective's. A cache file belongs to one base model, dtype, frozen adapter and data set; it holds the
rows that were needed so far, so runs of any length over the same data share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from longtune.data import Dataset
from longtune.engine import Engine
from longtune.model.embedded import cache_folder
from longtune.model.reference import adapter_digest, fingerprint, reference_active
from longtune.objective.pairs import answer_sums
from longtune.tree import Forest, Tree

Sums = tuple[float, ...]
"""Log-prob sums of the answers of one tree."""

BATCH_TOKENS = 8192
"""Most tokens that rows are laid together to, where no chunk length says less."""
_SAVE_SECONDS = 300.0
_TELL_SECONDS = 10.0
_LAYOUT = 1  # Counts up when what a cache file holds, or how it is computed, changes.


class Reference:
    """The frozen model's log-probs of given trees.

    Args:
        model: the model that is trained, with the frozen adapter loaded where there is one.
        adapter: the frozen adapter's folder, or None; names it in cache keys.
    """

    def __init__(self, engine: Engine, model: nn.Module, adapter: str | None = None):
        self._engine, self._model, self._adapter = engine, model, adapter

    def sums(self, trees: Sequence[Tree]) -> list[Sums]:
        """Of each tree, the log-prob sums of its answers; forward only, dropout off."""
        forest = Forest(trees, prompt_targets=False)
        with reference_active(self._model):
            return answer_sums(forest, self._engine.log_probs(forest).cpu())

    def attach(self, trees: Sequence[Tree]) -> list[Tree]:
        """The trees with their references, computed in one forward."""
        found = self.sums(trees)
        return [dataclasses.replace(tree, reference=sums) for tree, sums in zip(trees, found, strict=True)]

    def attach_all(self, trees: Sequence[Tree]) -> list[Tree]:
        """The same for any number of trees, in several forwards."""
        batches = self.batches([tree.size for tree in trees])
        return [tree for batch in batches for tree in self.attach([trees[position] for position in batch])]

    def batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Positions in `sizes` to compute together: as many rows as a chunk holds, at least one."""
        limit = min(self._engine.plan.chunk_tokens or max(sizes, default=0), BATCH_TOKENS)
        batch: list[int] = []
        tokens = 0
        for position, size in enumerate(sizes):
            if batch and tokens + size > limit:
                yield batch
                batch, tokens = [], 0
            batch.append(position)
            tokens += size
        if batch:
            yield batch

    def key(self, data: Dataset) -> dict[str, Any]:
        """What a cache file is for."""
        return {
            "layout": _LAYOUT,
            "model": fingerprint(self._model),
            "dtype": str(self._engine.stack.dtype),
            "adapter": adapter_digest(self._adapter) if self._adapter else None,
            "data": data.fingerprint,
        }


class ReferencedTrees(Sequence[Tree]):
    """Trees with their references, built when they are asked for."""

    def __init__(self, trees: Sequence[Tree], values: Sequence[Sums | None]):
        self._trees, self._values = trees, values

    def __len__(self) -> int:
        return len(self._trees)

    @overload
    def __getitem__(self, index: int) -> Tree: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tree]: ...
    def __getitem__(self, index: int | slice) -> Tree | Sequence[Tree]:
        if isinstance(index, slice):
            return ReferencedTrees(self._trees[index], self._values[index])
        return dataclasses.replace(self._trees[index], reference=self._values[index])

    @property
    def sizes(self) -> list[int]:
        """Tokens of each tree."""
        return _sizes(self._trees)


class Referenced:
    """A data set whose rows carry their references, as far as they are filled in; a `Batcher` takes it as it is.

    Attributes:
        trees: the rows.
        shares: as `Dataset.shares`.
        key: digest of what the references are of (model, adapter, data); None before the first `fill`.
    """

    def __init__(self, data: Dataset):
        self._data = data
        self._values: list[Sums | None] = [None] * len(data)
        self.trees = ReferencedTrees(data.trees, self._values)
        self.shares = data.shares
        self.key: str | None = None

    def fill(
        self,
        reference: Reference,
        rows: Sequence[int],
        tell: Callable[[dict[str, Any]], None] = lambda _: None,
        folder: Path | None = None,
        stopped: Callable[[], object] = lambda: None,
    ) -> None:
        """Finds the references of some rows in the cache, and computes and keeps those that aren't there.

        Args:
            rows: indices of the rows.
            tell: called with what happened: {rows, done, computed, seconds, path}, the last time with done == rows
                unless it was stopped;
                and with {problem, path} of a cache file that can't be used.
            folder: of the cache files.
            stopped: asked before every forward; when it says yes, what is there is kept and the rest left out.
        """
        start = told = saved = time.monotonic()
        key = reference.key(self._data)
        name = self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = (folder or cache_folder() / "references") / f"{name}.safetensors"
        if path.exists():
            try:
                self._values[:] = _read(path, key, len(self._values))
            except (ValueError, OSError, SafetensorError) as error:
                tell({"path": str(path), "problem": f"{_in_words(error)}; they are computed again"})
        missing = sorted({row for row in rows if self._values[row] is None})
        wanted = len(set(rows))
        trees = self._data.trees
        sizes = _sizes(trees)
        computed = 0
        for batch in reference.batches([sizes[row] for row in missing]):
            if stopped():
                break
            numbers = [missing[position] for position in batch]
            for number, sums in zip(numbers, reference.sums([trees[number] for number in numbers]), strict=True):
                self._values[number] = sums
            computed += len(numbers)
            now = time.monotonic()
            if now - saved > _SAVE_SECONDS:
                _keep(path, key, self._values, tell)
                saved = now
            if now - told > _TELL_SECONDS and computed < len(missing):
                tell(_progress(wanted, wanted - len(missing) + computed, computed, now - start, path))
                told = now
        if computed:
            _keep(path, key, self._values, tell)
        tell(_progress(wanted, wanted - len(missing) + computed, computed, time.monotonic() - start, path))


def _keep(
    path: Path, key: dict[str, Any], values: Sequence[Sums | None], tell: Callable[[dict[str, Any]], None]
) -> None:
    """Writes the file, or tells that it couldn't: this run has its values all the same."""
    try:
        _write(path, key, values)
    except (OSError, SafetensorError) as error:
        tell({"path": str(path), "problem": f"{_in_words(error)}; they are not kept for other runs"})


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split())


def _progress(rows: int, done: int, computed: int, seconds: float, path: Path) -> dict[str, Any]:
    return {"rows": rows, "done": done, "computed": computed, "seconds": round(seconds, 3), "path": str(path)}


def _sizes(trees: Sequence[Tree]) -> list[int]:
    known = getattr(trees, "sizes", None)
    return list(known) if known is not None else [tree.size for tree in trees]


def _write(path: Path, key: dict[str, Any], values: Sequence[Sums | None]) -> None:
    """Replaces the file as a whole. Two processes may do so at once: the last one wins, and both are right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "counts": torch.tensor([len(sums or ()) for sums in values], dtype=torch.int64),
        "sums": torch.tensor([value for sums in values for value in sums or ()], dtype=torch.float64),
    }
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    os.close(handle)
    try:
        metadata = {"key": json.dumps(key, sort_keys=True), "sha256": _digest(tensors)}
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _read(path: Path, key: dict[str, Any], rows: int) -> list[Sums | None]:
    """The values of a file; None for rows that were never computed. Raises ValueError where it can't be used."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("key") != json.dumps(key, sort_keys=True):
            raise ValueError("it was made for another model or other data")
        tensors = {name: file.get_tensor(name) for name in ("counts", "sums")}
    counts = tensors["counts"].tolist()
    if metadata.get("sha256") != _digest(tensors) or len(counts) != rows or sum(counts) != tensors["sums"].numel():
        raise ValueError("its contents are not what was written")
    sums = iter(tensors["sums"].tolist())
    return [tuple(next(sums) for _ in range(count)) if count else None for count in counts]


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
