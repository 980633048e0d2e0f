"""Records to rows: which format a record has, and what its columns mean.

Detection looks at every record, not the first alone: `detect` names a record's format by its columns, and
`Reader` brings it into a `Row`. Formats that we don't train on are named with what to do about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longtune.data import preference
from longtune.data.problems import RowError
from longtune.data.readers import Record, parse_json_text
from longtune.data.rows import Row, is_messages, read_messages, read_string, read_tools, read_weight
from longtune.data.sharegpt import sharegpt_messages
from longtune.errors import Problem, UserError

UNKNOWN = "unknown format"
SUPERVISED = ("sft",)


def parse_columns(columns: str | Mapping[str, str] | None) -> dict[str, str]:
    """`theirs=ours` pairs ("question=prompt,answer=completion") as a mapping from their name to ours.

    Raises:
        UserError: a pair without "=", or two columns that would get one name.
    """
    if not columns:
        return {}
    if isinstance(columns, str):
        pairs = [part.partition("=") for part in columns.split(",") if part.strip()]
        if any(not equals or not theirs.strip() or not ours.strip() for theirs, equals, ours in pairs):
            raise UserError(Problem("--map", f"can't read {columns!r}", "write theirs=ours,theirs=ours"))
        columns = {theirs.strip(): ours.strip() for theirs, _, ours in pairs}
    if len(set(columns.values())) < len(columns):
        raise UserError(Problem("--map", "two columns get the same name"))
    return dict(columns)


def rename(record: Record, columns: Mapping[str, str]) -> Record:
    """The record under our names; a mapped column replaces one that has the name already."""
    if not columns:
        return record
    renamed = {name: value for name, value in record.items() if name not in columns}
    for theirs, ours in columns.items():
        if theirs in record:
            renamed[ours] = record[theirs]
    return renamed


def detect(record: Record, method: str) -> str:
    """The name of the record's format under a method ("chat", "sharegpt", ...).

    Raises:
        RowError: no format that this method can train on; the reason says what it looks like instead.
    """
    here = {name for name, value in record.items() if value is not None}
    supervised = method in SUPERVISED
    pairs = preference.detect(here, missing_side_is_error=not supervised)
    single = _detect_supervised(here)
    found = single if supervised else pairs
    if found is not None and not (supervised and pairs is not None):
        return found
    columns = ", ".join(sorted(record)[:12]) or "none"
    if supervised and pairs is not None:
        raise RowError(
            "preference rows under sft",
            f"these are preference pairs ({columns})",
            "set method: dpo or orpo, or rename the chosen answers with --map to train on them alone",
        )
    if not supervised and single is not None:
        raise RowError(
            f"supervised rows under {method}",
            f"{method} needs a chosen and a rejected answer, the columns are {columns}",
            "set method: sft, or add the columns chosen and rejected",
        )
    raise RowError(UNKNOWN, f"no known format has the columns {columns}", _advice(here))


def _detect_supervised(here: set[str]) -> str | None:
    if "messages" in here:
        return "chat"
    if "conversations" in here:
        return "sharegpt"
    if {"prompt", "completion"} <= here:
        return "prompt-completion"
    if {"instruction", "output"} <= here:
        return "alpaca"
    if "text" in here:
        return "text"
    return None


def _advice(here: set[str]) -> str:
    if "instances" in here:
        return (
            "self-instruct rows hold several examples each: write one row for each instance, with instruction, "
            "input and output"
        )
    for theirs_prompt in ("question", "query", "problem", "input", "instruction", "prompt"):
        for theirs_answer in ("answer", "response", "solution", "output", "completion", "target"):
            if {theirs_prompt, theirs_answer} <= here:
                return f"say which column is which: --map {theirs_prompt}=prompt,{theirs_answer}=completion"
    return "use messages, prompt + completion, or text; or rename columns with --map theirs=ours"


def read_row(record: Record, name: str) -> Row:
    """The row that a record of the named format means.

    Raises:
        RowError: a column has the wrong shape.
    """
    row = _MAKERS[name](record)
    if record.get("weight") is not None:
        row.weight = read_weight(record["weight"], "`weight`")
        if row.weight == 0:
            raise RowError("weight is zero", "the row's weight is 0", "take the row out")
    row.template_kwargs = read_template_kwargs(record)
    if row.tools is None:
        row.tools = read_tools(record.get("tools"))
    return row


def read_template_kwargs(record: Record) -> dict[str, Any]:
    value = parse_json_text(record.get("chat_template_kwargs")) or {}
    if not isinstance(value, dict):
        raise RowError("malformed chat_template_kwargs", "`chat_template_kwargs` must be an object")
    return value


def _chat(record: Record) -> Row:
    messages, weights = read_messages(record["messages"], "messages")
    return Row("chat", messages=messages, message_weights=weights)


def _completion(record: Record) -> Row:
    prompt, completion = (parse_json_text(record[column]) for column in ("prompt", "completion"))
    if is_messages(prompt) != is_messages(completion):
        raise RowError(
            "prompt and completion differ in kind", "one is text, the other is messages", "make both the same kind"
        )
    if not is_messages(prompt):
        # The raw columns: text that happens to look like JSON stays what it is.
        texts = [read_string(record[column], column) for column in ("prompt", "completion")]
        return Row("completion", prompt=texts[0], answers=[texts[1]])
    head, head_weights = read_messages(prompt, "prompt")
    tail, tail_weights = read_messages(completion, "completion")
    return Row("completion", prompt=head, answers=[tail], message_weights=head_weights + tail_weights)


def _text(record: Record) -> Row:
    text = read_string(record["text"], "text")
    if not text.strip():
        raise RowError("empty text", "`text` is empty", "take the row out")
    return Row("text", text=text)


def _sharegpt(record: Record) -> Row:
    messages, weights = read_messages(sharegpt_messages(record), "conversations")
    return Row("chat", messages=messages, message_weights=weights)


def _alpaca(record: Record) -> Row:
    user = read_string(record["instruction"], "instruction")
    if record.get("input"):
        user = f"{user}\n\n{read_string(record['input'], 'input')}"
    messages: list[Any] = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    history = parse_json_text(record.get("history")) or []
    if not isinstance(history, list):
        raise RowError("malformed history", "`history` must be a list of [instruction, answer] pairs")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("malformed history", "`history` must be a list of [instruction, answer] pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": user})
    messages.append({"role": "assistant", "content": read_string(record["output"], "output")})
    clean, weights = read_messages(messages, "alpaca columns")
    return Row("chat", messages=clean, message_weights=weights)


_MAKERS: dict[str, Callable[[Record], Row]] = {
    "chat": _chat,
    "sharegpt": _sharegpt,
    "prompt-completion": _completion,
    "alpaca": _alpaca,
    "text": _text,
    **preference.MAKERS,
}
