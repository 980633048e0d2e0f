"""Module names of one layout in those of another: `language_model.model.layers.0.x`, `model.layers.0.x`, ...

Files of other tools (sensitivities, mlx-lm's adapters) name the same modules with other prefixes. What a name stands
for is decided by what follows the list of layers, and never guessed where two modules would fit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_LAYERS = re.compile(r"(?:^|\.)((?:layers|blocks|h)\.\d+\..+)$")


def match_names(theirs: Iterable[str], ours: Collection[str]) -> dict[str, str]:
    """Our name for each of their names that means exactly one of ours.

    A name that is one of ours is itself. Else it is what has the same end from the list of layers on, if that is one
    module here, and no second name of theirs means it.
    """
    theirs = list(theirs)
    own = set(ours)
    ends: dict[str, list[str]] = {}
    for name in ours:
        if (end := _end(name)) is not None:
            ends.setdefault(end, []).append(name)
    matched = {name: name for name in theirs if name in own}
    claims: dict[str, list[str]] = {}
    for name in theirs:
        end = _end(name)
        if name not in own and end is not None and len(ends.get(end, ())) == 1:
            claims.setdefault(ends[end][0], []).append(name)
    taken = set(matched.values())
    for mine, claimants in claims.items():
        # Of a picture model's towers only the text's layers are meant.
        text = [name for name in claimants if "language_model" in name] if len(claimants) > 1 else claimants
        if mine not in taken and len(text) == 1:
            matched[text[0]] = mine
    return matched


def _end(name: str) -> str | None:
    found = _LAYERS.search(name)
    return found[1] if found else None
