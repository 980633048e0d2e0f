"""ShareGPT turns (`from`/`value`) as messages, and columns that hold messages in one of several shapes.

Supervised and preference formats share these; which columns a format has is `formats`' and `preference`'s work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtune.data.problems import RowError
from longtune.data.readers import Record, parse_json_text
from longtune.data.rows import Message, Text, read_messages, read_string

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}


def sharegpt_message(turn: Any, column: str) -> Message:
    """One ShareGPT turn (`from`/`value`, or `role`/`content`) as a message."""
    if not isinstance(turn, Mapping):
        raise RowError("unreadable messages", f"`{column}` must hold objects of from and value")
    if "from" not in turn and "role" in turn:
        return read_messages([turn], column)[0][0]
    role = _ROLES.get(str(turn.get("from")))
    if role is None:
        fix = f"known are {', '.join(sorted(_ROLES))}"
        raise RowError("unknown role", f"`{column}` has a turn from {turn.get('from')!r}", fix)
    message: Message = {"role": role, "content": turn.get("value")}
    if turn.get("from") in ("function_call", "tool_call"):
        calls = parse_json_text(turn.get("value"))
        message = {"role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    for key in ("weight", "loss"):
        if turn.get(key) is not None:
            message[key] = turn[key]
    return message


def sharegpt_messages(record: Record) -> list[Message]:
    """The messages of `conversations`, with the row's `system` first."""
    turns = parse_json_text(record["conversations"])
    if not isinstance(turns, list) or not turns:
        raise RowError("unreadable messages", "`conversations` must be a list of turns and not be empty")
    messages = [sharegpt_message(turn, "conversations") for turn in turns]
    if record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
    return messages


def as_messages(value: Any, column: str, role: str) -> Text:
    """Messages from a list, one ShareGPT turn or message object; a string stays a string."""
    value = parse_json_text(value)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        turns = [sharegpt_message(turn, column) for turn in value]
        return read_messages(turns, column)[0]
    return read_string(value, column)
