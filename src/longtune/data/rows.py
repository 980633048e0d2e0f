"""The one shape that every supervised and preference format is brought into, and its checks.

A `Row` is what a record means, before any template or tokenizer: messages, or texts. `formats` makes rows from
records; `masks` and `pairs` turn them into tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from longtune.data.problems import RowError
from longtune.data.readers import parse_json_text

Message = dict[str, Any]
Text = str | list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_ADVICE = "write each message as {role, content}"


@dataclass(slots=True)
class Row:
    """One training example before templates and tokens.

    Attributes:
        kind: chat (a conversation, answers inside), completion (prompt and one answer), text, or preference (prompt,
            the chosen answer, then the rejected ones).
        messages: the conversation of a chat row.
        message_weights: loss weight of each message, None where the row says nothing.
        prompt, answers: strings, or lists of messages.
        text: the text of a text row.
        tools: JSON schemas of the tools on offer.
        template_kwargs: the row's own arguments of the chat template.
        weight: weight of the row in the loss.
    """

    kind: Literal["chat", "completion", "text", "preference"]
    messages: list[Message] = field(default_factory=list)
    message_weights: list[float | None] = field(default_factory=list)
    prompt: Text = ""
    answers: list[Text] = field(default_factory=list)
    text: str = ""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0


def read_messages(value: Any, column: str) -> tuple[list[Message], list[float | None]]:
    """Checked messages, with text parts joined, and the loss weight of each.

    Raises:
        RowError: no messages, an unknown role, content that isn't text, a malformed tool call or weight.
    """
    value = parse_json_text(value)
    if not isinstance(value, list) or not value:
        raise RowError("unreadable messages", f"`{column}` must be a list of messages and not be empty", _ADVICE)
    messages: list[Message] = []
    weights: list[float | None] = []
    for number, message in enumerate(value, 1):
        where = f"`{column}`, message {number}"
        if not isinstance(message, Mapping):
            raise RowError("unreadable messages", f"{where} is not an object", _ADVICE)
        messages.append(_message(message, where))
        weights.append(_message_weight(message, where))
    return messages, weights


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        fix = f"roles are {', '.join(ROLES)}"
        raise RowError("unknown role", f"{where} has the role {role!r}", fix)
    clean: Message = {"role": role, "content": _content(message.get("content"), where)}
    for key in _MESSAGE_KEYS:
        if message.get(key) is not None:
            clean[key] = message[key]
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], where)
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    if message.get("function_call"):
        clean["tool_calls"] = _tool_calls([{"function": message["function_call"]}], where)
    for key in ("reasoning_content", "thinking", "reasoning"):
        if not isinstance(clean.get(key, ""), str):
            raise RowError("unreadable messages", f"{where}: `{key}` must be a string", _ADVICE)
    if not clean["content"] and role not in ("assistant", "tool", "system"):
        raise RowError("empty message", f"{where} ({role}) has no content", "fill it or take the row out")
    return clean


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RowError("content is not text", f"{where} has a part of type {kind!r}", "only text is trained on")
            texts.append(text)
        return "".join(texts)
    raise RowError("content is not text", f"{where}: `content` is {type(content).__name__}", _ADVICE)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    fix = 'a tool call is {"type": "function", "function": {"name": ..., "arguments": {...}}}'
    calls = parse_json_text(calls)
    if not isinstance(calls, list):
        raise RowError("malformed tool call", f"{where}: `tool_calls` must be a list", fix)
    clean: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError("malformed tool call", f"{where}: a tool call has no function name", fix)
        arguments = parse_json_text(function.get("arguments", function.get("parameters")))
        if arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, dict | str):
            raise RowError("malformed tool call", f"{where}: the arguments must be an object", fix)
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        clean.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return clean


def _message_weight(message: Mapping[str, Any], where: str) -> float | None:
    for key in ("weight", "loss"):
        if message.get(key) is not None:
            return read_weight(message[key], f"{where}: `{key}`")
    return None


def read_weight(value: Any, where: str) -> float:
    """A loss weight: a number at or above 0; booleans (and CSV's text) are read too."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, bool | int | float) or not math.isfinite(value) or value < 0:
        raise RowError("malformed weight", f"{where} must be a number, 0 or more, got {value!r}")
    return float(value)


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas: a list of objects (or JSON text of one), None when there are none."""
    value = parse_json_text(value)
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("unreadable tools", "`tools` must be a list of JSON schemas")
    return value


def read_string(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowError("column is not text", f"`{column}` must be a string, got {type(value).__name__}")
    return value


def is_messages(value: Any) -> bool:
    """True for a list of objects with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(part, Mapping) for part in value)


def is_empty(answer: Text) -> bool:
    """True when an answer has nothing to train on but its end."""
    if isinstance(answer, str):
        return not answer.strip()
    return not any(has_substance(message) for message in answer if message["role"] == "assistant")


def has_substance(message: Message) -> bool:
    """True when a message has text, reasoning or a tool call."""
    texts = (
        message.get("content"),
        message.get("reasoning_content"),
        message.get("thinking"),
        message.get("reasoning"),
    )
    return bool(message.get("tool_calls")) or any(text and text.strip() for text in texts)
