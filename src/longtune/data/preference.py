"""Preference formats to rows: one prompt, the chosen answer, and one or more rejected ones.

Equal answers, empty answers and missing sides are found here, before any template; tokens are `pairs`' work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from longtune.data.problems import RowError
from longtune.data.readers import Record, parse_json_text
from longtune.data.rows import Message, Row, Text, is_empty, read_messages, read_string, read_tools
from longtune.data.sharegpt import as_messages, sharegpt_messages

_NO_ANSWER = "no answer"
_SIDES = ({"chosen", "rejected"}, {"preferred_output", "non_preferred_output"})


def detect(here: set[str], missing_side_is_error: bool = True) -> str | None:
    """The preference format of a record whose columns `here` are filled, or None.

    Raises:
        RowError: only one of the two answers is there, and that is an error.
    """
    for sides in _SIDES:
        missing = sides - here
        if missing_side_is_error and len(missing) == 1 and not (missing == {"rejected"} and _has_other_rejected(here)):
            raise RowError("missing side", f"the pair has no `{missing.pop()}`", "fill it or take the row out")
    if {"preferred_output", "non_preferred_output"} <= here:
        return "openai-preference" if "input" in here or "prompt" in here else None
    if "messages" in here and _has_other_rejected(here):
        return "rejected-response"
    if {"chosen", "rejected"} <= here:
        if "conversations" in here:
            return "sharegpt-preference"
        return "preference" if "prompt" in here else "implicit-preference"
    return None


def _has_other_rejected(here: set[str]) -> bool:
    return bool(here & {"rejected_response", "rejected_messages"})


def _preference(record: Record) -> Row:
    chosen = as_messages(record["chosen"], "chosen", "assistant")
    rejected = _several(record["rejected"], "rejected")
    prompt = as_messages(record["prompt"], "prompt", "user")
    if isinstance(chosen, list) and chosen[0]["role"] in ("system", "user"):
        return _whole_conversations(prompt, [chosen, *rejected])
    return _row(prompt, [chosen, *rejected])


def _whole_conversations(prompt: Text, answers: Sequence[Text]) -> Row:
    """Answers that repeat the prompt: the prompt column only has to agree with them."""
    for index, answer in enumerate(answers):
        _need_assistant(_side(index), answer)
    row = _implicit_messages(
        [_need_messages(answer) for answer in answers], "give the answers alone, or begin both with the prompt"
    )
    told = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not any(told.strip() == message["content"].strip() for message in row.prompt if isinstance(message, dict)):
        raise RowError(
            "prompt not in the answers",
            "chosen and rejected are whole conversations, and `prompt` is not in them",
            "give the answers alone, or take the column prompt out",
        )
    return row


def _implicit(record: Record) -> Row:
    chosen = as_messages(record["chosen"], "chosen", "assistant")
    rejected = _several(record["rejected"], "rejected")
    if isinstance(chosen, list):
        return _implicit_messages([chosen, *(_need_messages(answer) for answer in rejected)])
    texts = [chosen, *(read_string(answer, "rejected") for answer in rejected)]
    cut = _common(texts)
    # A space before the first difference belongs to the answers, which then begin as tokens do.
    if 0 < cut < max(map(len, texts)) and chosen[cut - 1] == " ":
        cut -= 1
    return _row(chosen[:cut], [text[cut:] for text in texts])


def _implicit_messages(
    conversations: list[list[Message]], fix: str = "add a column prompt, or begin both with the same messages"
) -> Row:
    """The row of conversations whose common beginning is the prompt; `fix` is for those that have none."""
    cut = _common(conversations)
    for index, conversation in enumerate(conversations):
        role = conversation[-1]["role"]
        answered = len(conversation) > cut and any(message["role"] == "assistant" for message in conversation)
        if role != "assistant" and not answered:
            why = f"the {_side(index)} conversation ends with a message of role {role}: its answer is missing"
            raise RowError(_NO_ANSWER, why, "add the answer or take the row out")
    alone = {conversation[0]["role"] == "assistant" for conversation in conversations}
    if len(alone) > 1:
        why = "one of chosen and rejected is a whole conversation, the other an answer alone"
        raise RowError("answers differ in kind", why, "make both the same kind")
    if cut == min(map(len, conversations)):
        _refuse_equal(conversations)
        cut -= 1
    if cut == 0:
        raise RowError("no common prompt", "chosen and rejected differ from their first message on", fix)
    return _row(conversations[0][:cut], [conversation[cut:] for conversation in conversations])


def _sharegpt(record: Record) -> Row:
    prompt = read_messages(sharegpt_messages(record), "conversations")[0]
    return _row(
        prompt, [as_messages(record["chosen"], "chosen", "assistant"), *_several(record["rejected"], "rejected")]
    )


def _openai(record: Record) -> Row:
    given = parse_json_text(record.get("input", record.get("prompt")))
    tools = None
    if isinstance(given, dict):
        tools = read_tools(given.get("tools"))
        given = given.get("messages")
    prompt = as_messages(given, "input.messages", "user")
    chosen = as_messages(record["preferred_output"], "preferred_output", "assistant")
    row = _row(prompt, [chosen, *_several(record["non_preferred_output"], "non_preferred_output")])
    row.tools = tools
    return row


def _rejected_response(record: Record) -> Row:
    messages = read_messages(record["messages"], "messages")[0]
    if record.get("rejected_messages") is not None:
        value = parse_json_text(record["rejected_messages"])
        others = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        return _implicit_messages([messages, *(read_messages(other, "rejected_messages")[0] for other in others)])
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise RowError(
            "no answer at the end", "`messages` must end with the chosen answer of the assistant", "add the answer"
        )
    return _row(messages[:-1], [[messages[-1]], *_several(record["rejected_response"], "rejected_response")])


def _several(value: Any, column: str) -> list[Text]:
    """The rejected answers: one, or a list of them (a list of messages is one)."""
    value = parse_json_text(value)
    if isinstance(value, list) and value and all(isinstance(part, str | list) for part in value):
        return [as_messages(part, column, "assistant") for part in value]
    return [as_messages(value, column, "assistant")]


def _row(prompt: Text, answers: Sequence[Text]) -> Row:
    """A checked row; strings beside messages become messages.

    Raises:
        RowError: an empty prompt or answer, or a rejected answer that equals the chosen one.
    """
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise RowError("empty prompt", "the prompt is empty", "a pair needs a prompt that both answers share")
    parts = [prompt, *answers]
    if any(isinstance(part, list) for part in parts):
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answers = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    for index, answer in enumerate(answers):
        _need_assistant(_side(index), answer)
        if is_empty(answer):
            raise RowError("empty answer", f"the {_side(index)} answer is empty", "fill it or take the row out")
    _refuse_equal(answers)
    return Row("preference", prompt=prompt, answers=list(answers))


def _refuse_equal(answers: Sequence[Text]) -> None:
    if any(answer == answers[0] for answer in answers[1:]):
        raise RowError("equal answers", "chosen and rejected are equal", "nothing is preferred: take the row out")


def _side(index: int) -> str:
    return "chosen" if index == 0 else "rejected"


def _need_assistant(side: str, answer: Text) -> None:
    if isinstance(answer, list) and not any(message["role"] == "assistant" for message in answer):
        roles = ", ".join(sorted({message["role"] for message in answer}))
        why = f"the {side} answer has no message of role assistant, only of {roles}"
        raise RowError(_NO_ANSWER, why, "give the answer the role assistant, or take the row out")


def _need_messages(answer: Text) -> list[Message]:
    if isinstance(answer, str):
        raise RowError("answers differ in kind", "one answer is text, the other is messages", "make both the same kind")
    return answer


def _common(parts: Sequence[Sequence[Any]]) -> int:
    """Length of the longest common prefix."""
    length = min(map(len, parts))
    return next((i for i in range(length) if any(part[i] != parts[0][i] for part in parts[1:])), length)


MAKERS: dict[str, Callable[[Record], Row]] = {
    "preference": _preference,
    "implicit-preference": _implicit,
    "sharegpt-preference": _sharegpt,
    "openai-preference": _openai,
    "rejected-response": _rejected_response,
}
