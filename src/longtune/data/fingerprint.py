"""What a data set is made of, as short hashes: the key under which its tokens are kept, and the tokens' own digest."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longtune.data.pipeline import Settings
from longtune.data.sources import Source
from longtune.data.trees import Example

_READ_WHOLE = 256 * 2**20
"""Files up to so many bytes are known by their content, larger ones by size and time of change."""


def tokens_key(sources: Sequence[Source], tokenizer: Any, settings: Settings, layout: int) -> str | None:
    """Name for the tokens of these sources (hex); None for hub data, whose revision is not known here."""
    if any(source.hub is not None for source in sources):
        return None
    values = {
        "layout": layout,
        "code": _code_digest(),
        "settings": dataclasses.asdict(settings),
        "tokenizer": _tokenizer_digest(tokenizer),
        "sources": [
            (source.name, source.weight, [(str(path), *_file_digest(path)) for path in source.files])
            for source in sources
        ],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _code_digest() -> str:
    """What turns rows into tokens: this folder's source, and the libraries that render and encode."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    for package in ("transformers", "tokenizers"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> tuple[Any, ...]:
    state = path.stat()
    if state.st_size > _READ_WHOLE:
        return state.st_size, state.st_mtime_ns
    with path.open("rb") as file:
        return (hashlib.file_digest(file, "sha256").hexdigest(),)


def _tokenizer_digest(tokenizer: Any) -> str:
    """Vocabulary, merges and normalisers of a tokenizer, its special tokens and its templates."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if getattr(tokenizer, "is_fast", False) and backend is not None:
        model = backend.to_str()
    else:
        file = Path(getattr(tokenizer, "vocab_file", None) or "")
        held = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        model = json.dumps([type(tokenizer).__name__, held, tokenizer.get_vocab()], sort_keys=True)
    about = [tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256((model + json.dumps(about, sort_keys=True, default=str)).encode()).hexdigest()


class Digest:
    """sha256 over token ids, spans, weights and tree layouts, taken as the examples come by."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, examples: Iterable[Example]) -> None:
        for example in examples:
            layout = [(p.parent, p.sequence, p.start, p.end) for p in example.pieces]
            self._hash.update(repr((example.weight, layout)).encode())
            for sequence in example.sequences:
                self._hash.update(repr([(s.start, s.end, s.weight, s.answer) for s in sequence.spans]).encode())
                self._hash.update(sequence.ids.tobytes())

    def close(self, settings: dict[str, Any]) -> str:
        """The digest (hex) of all examples and of the settings that they were made under."""
        self._hash.update(json.dumps(settings, sort_keys=True).encode())
        return self._hash.hexdigest()
