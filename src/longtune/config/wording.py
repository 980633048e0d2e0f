"""What is wrong with a config's values, in the words of the YAML file instead of a programmer's.

pydantic reports each branch of a key that may have several forms; here they become one sentence for each key.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Discriminator, ValidationError
from pydantic_core import ErrorDetails

from longtune.config.schema import RunConfig, describe_keys
from longtune.errors import Problem

_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "tuple": "a list",
    "dict": "keys with values",
    "model": "keys with values",
}
"""What is asked for, by the first word of an error's type."""

_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "above",
    "less_than_equal": "at most",
    "less_than": "below",
}

_LONGEST = 60
"""Most characters of a given value that are repeated."""


def in_words(error: ValidationError, values: dict[str, Any], place: Callable[[str], str]) -> list[Problem]:
    """One problem for each key that an error is about.

    Args:
        values: what was validated, as plain values.
        place: says where a dotted key was given.
    """
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_key(item, values), []).append(item)
    # Of a section and a key in it, the key says more.
    innermost = [key for key in found if not any(other.startswith(f"{key}.") for other in found)]
    return [Problem(place(key), *_told(key, found[key])) for key in innermost]


def _told(key: str, items: list[ErrorDetails]) -> tuple[str, str]:
    """Reason and fix."""
    kind, given = items[0]["type"], items[0]["input"]
    if kind == "extra_forbidden":
        nearest = _nearest(key)
        return "unknown key", f"did you mean {' or '.join(nearest)}?" if nearest else "remove it"
    if kind == "missing" and isinstance(items[0]["loc"][-1], str):
        return "is missing", _meaning(key)
    if kind == "value_error":
        return items[0]["msg"].removeprefix("Value error, "), ""
    wanted = list(dict.fromkeys(phrase for item in items for phrase in _wanted(item)))
    inner = [name for name in describe_keys() if name.startswith(f"{key}.")]
    if wanted == ["keys with values"] and inner:
        return f"is a section with keys of its own, not {shown(given)}", f"set one of them, such as {inner[0]}"
    forms = _forms(key, given)
    fix = f"write {' or '.join(forms)} ({_meaning(key)})" if forms else _meaning(key)
    # Of a key whose forms pydantic tells apart by the value, only one form's error is here.
    if not wanted or any(item["type"] == "string_pattern_mismatch" for item in items) or _is_parted(key, kind):
        return f"{shown(given)} is not one of the forms it may have", fix
    bare = all(item["type"] == "literal_error" or item["type"] in _BOUNDS for item in items)
    return f"must be {_listed(wanted)}, not {shown(given)}", "" if bare else fix


def _wanted(item: ErrorDetails) -> Iterator[str]:
    """What would be right, each a noun phrase."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "literal_error":
        yield from re.split(r", | or ", context["expected"])
    elif kind == "bool_type" or kind == "bool_parsing":
        yield from ("true", "false")
    elif kind == "finite_number":
        yield "a finite number"
    elif kind == "missing":
        yield f"a list of {int(item['loc'][-1]) + 1}"
    elif item["input"] == "" and kind.endswith("too_short"):
        yield "a text that is not empty"
    elif kind in ("too_short", "too_long"):
        bound, word = ("min_length", "at least") if kind == "too_short" else ("max_length", "at most")
        yield f"a list of {word} {context[bound]}"
    elif kind in _BOUNDS:
        (limit,) = (value for name, value in context.items() if name in ("ge", "gt", "le", "lt"))
        yield f"{_BOUNDS[kind]} {f'{limit:,}' if isinstance(limit, int) else f'{limit:g}'}"
    elif kind.partition("_")[0] in _KINDS and kind != "string_pattern_mismatch":
        yield _KINDS[kind.partition("_")[0]]


def _listed(phrases: list[str]) -> str:
    *others, last = phrases
    return f"{', '.join(others)} or {last}" if others else last


def _meaning(key: str) -> str:
    """What is documented of a key, or of the section that it is in."""
    about = describe_keys()
    while key and key not in about:
        key = key.rpartition(".")[0]
    return " ".join(about.get(key, "").split()).rstrip(".")


def _is_parted(key: str, kind: str) -> bool:
    """Whether a value of another type might have been of another of the key's forms."""
    section, _, name = key.rpartition(".")
    owner = RunConfig.model_fields[section].annotation if section in RunConfig.model_fields else RunConfig
    fields = owner.model_fields if isinstance(owner, type) and issubclass(owner, BaseModel) else {}
    parted = name in fields and any(isinstance(item, Discriminator) for item in fields[name].metadata)
    return parted and kind.endswith("_type")


def _forms(key: str, given: Any) -> list[str]:
    """Ways to write a bare number, of those that other keys have, which this key would take."""
    number = _whole(given)
    if number is None or _takes(key, "any text"):
        return []
    candidates: list[Any] = [number, f"last {number}", [number], f"{number}GB"]
    return [shown(value, quotes=False) for value in candidates if value != given and _takes(key, value)]


def _whole(given: Any) -> int | None:
    """The whole number that a value is, or is read as by a person (1e3, 100.0)."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        return None
    try:
        number = float(given)
    except (ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else None


def _takes(key: str, value: Any) -> bool:
    tried: Any = value
    for part in reversed(key.split(".")):
        tried = {part: tried}
    try:
        RunConfig.model_validate({"data": "none", **tried})
    except ValidationError:
        return False
    return True


def shown(value: Any, quotes: bool = True) -> str:
    """A value as YAML has it (null, true, [1, 2]), cut where it is long."""
    if isinstance(value, str):
        text = repr(value) if quotes else value
    else:
        text = json.dumps(value, default=_named, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _named(value: object) -> Any:
    return dict(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _key(item: ErrorDetails, values: object) -> str:
    """The dotted key of an error, without the names of union branches that pydantic puts into its location."""
    parts: list[str] = []
    inner: Any = values
    for index, part in enumerate(item["loc"]):
        if isinstance(inner, (list, tuple)) and isinstance(part, int) and part < len(inner):
            inner = inner[part]
        elif isinstance(inner, Mapping) and part in inner:
            inner = inner[part]
        elif not (item["type"] == "missing" and index == len(item["loc"]) - 1 and isinstance(inner, Mapping)):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _nearest(key: str) -> list[str]:
    """Known keys that a mistyped or misplaced one may have meant, the likeliest first."""
    key = re.sub(r"\.\d+\.", ".", key)
    known = list(describe_keys())
    section, _, last = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, siblings, n=3, cutoff=0.6)
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=2, cutoff=0.8)]
    return list(dict.fromkeys(near))[:3]
