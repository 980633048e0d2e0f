"""The tokenizer's own chat template: renders messages to text and says where an assistant turn ends.

Templates are other people's programs: what they can't render comes out as a `RowError` with their own words. How
they want tool calls and content is found by small probes, once for a template. Tokens are `encoding`'s work.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from longtune.data.problems import RowError
from longtune.data.rows import Message
from longtune.errors import Problem, UserError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_PROBE = "Xylophone"
_CALL = {"name": "probe_function", "arguments": {"probe_key": "probe value"}}

GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})
"""What every rendering gives a template."""

Spans = list[tuple[int, int]]


class Template:
    """A tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer.
        kwargs: arguments of the template for the whole run (`enable_thinking`, ...); a row's own go over them.
    """

    def __init__(self, tokenizer: Any, kwargs: dict[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self.missing = not getattr(tokenizer, "chat_template", None)

    def source(self, tools: Any = None) -> str:
        """The template's text."""
        if self.missing:
            raise RowError(
                "no chat template",
                "the model's tokenizer has no chat template, and the row is a conversation",
                "use an instruct model, or rows of prompt + completion strings or text",
            )
        return self._tokenizer.get_chat_template(None, tools)

    @cached_property
    def has_generation(self) -> bool:
        """True when the template marks assistant turns with `{% generation %}`."""
        return not self.missing and bool(_GENERATION.search(self.source()))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads from outside, or may read: one that it also sets is among them."""
        return self._names[0]

    @cached_property
    def options(self) -> frozenset[str]:
        """Those of `variables` that are there to be given: never set by the template, or asked whether they are."""
        return self._names[1] - GIVEN - set(self._tokenizer.special_tokens_map)

    @cached_property
    def _names(self) -> tuple[frozenset[str], frozenset[str]]:
        from jinja2 import Environment, TemplateSyntaxError, nodes

        reader = Environment(extensions=["jinja2.ext.loopcontrols"])
        read: set[str] = set()
        options: set[str] = set()
        for tools in () if self.missing else (None, [{}]):
            try:
                parsed = reader.parse(_GENERATION_TAGS.sub("", self.source(tools)))
            except TemplateSyntaxError as error:
                raise UserError(Problem("chat template", f"can't be read: {error.message}")) from error
            names = list(parsed.find_all(nodes.Name))
            counted = {name.name for loop in parsed.find_all(nodes.For) for name in _targets(loop.target)}
            called = {call.node.name for call in parsed.find_all(nodes.Call) if isinstance(call.node, nodes.Name)}
            asked = {
                test.node.name
                for test in parsed.find_all(nodes.Test)
                if isinstance(test.node, nodes.Name) and test.name in ("defined", "undefined")
            }
            loaded = {name.name for name in names if name.ctx == "load"} - counted - {"loop"}
            read |= loaded
            options |= (loaded - {name.name for name in names if name.ctx != "load"} - called) | (asked & loaded)
        return frozenset(read), frozenset(options)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        prompt: bool = False,
    ) -> tuple[str, Spans]:
        """Text of a conversation, and the character ranges inside `{% generation %}` (none without it).

        Args:
            prompt: add the generation prompt, as at inference.

        Raises:
            RowError: the template refuses or fails.
        """
        return self._render(self._shaped(messages), tools, kwargs, prompt)

    def _render(
        self, messages: list[Message], tools: Any = None, kwargs: dict[str, Any] | None = None, prompt: bool = False
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.source(tools)
        if not messages:
            raise RowError("no prompt before an answer", "the conversation begins with an assistant turn")
        marks = bool(_GENERATION.search(source))
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self._tokenizer.special_tokens_map, **self._kwargs, **(kwargs or {})},
            )
        except Exception as error:  # a template may fail in any way it likes; its words are the reason
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RowError(
                "template refuses the conversation",
                f"the chat template refuses this conversation: {reason}",
                "check the order of the roles, and whether the model knows this kind of message",
            ) from error
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def _shaped(self, messages: list[Message]) -> list[Message]:
        """The messages in the form that this template reads."""
        shaped: list[Message] = []
        for message in messages:
            message = dict(message)
            if "tool_calls" in message:
                message.update(_call_form(message, *self._tool_form))
            if self._content_in_parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            shaped.append(message)
        return shaped

    @cached_property
    def _content_in_parts(self) -> bool:
        """True for templates that read content as a list of parts only."""
        text = self._try([{"role": "user", "content": _PROBE}])
        if text is not None and _PROBE in text:
            return False
        text = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        return text is not None and _PROBE in text

    @cached_property
    def _tool_form(self) -> tuple[bool, str | None]:
        """(arguments as text, what stands for empty content): the first form that renders a call whole."""
        user = {"role": "user", "content": _PROBE}
        for as_text in (False, True):
            for empty in ("", None):
                message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _CALL}]}
                message.update(_call_form(message, as_text, empty))
                text = self._try([user, message])
                whole = text and all(part in text for part in ("probe_function", "probe_key", "probe value"))
                # Python's own quotes, or quotes inside quotes, mean that the arguments had the wrong form.
                if text and whole and "'probe_key'" not in text and '\\"probe_key' not in text:
                    return as_text, empty
        raise RowError(
            "tool calls not rendered",
            "the model's chat template leaves tool calls out, so there would be nothing to learn",
            "use a model whose template knows tools, or write the calls into `content`",
        )

    def _try(self, messages: list[Message]) -> str | None:
        try:
            return self._render(messages)[0]
        except RowError:
            return None

    def knows_tools(self, messages: list[Message], tools: list[dict[str, Any]], kwargs: dict[str, Any] | None) -> bool:
        """False when the rendering is the same without the tools."""
        return self.render(messages, tools, kwargs)[0] != self.render(messages, None, kwargs)[0]

    @cached_property
    def end_of_turn(self) -> str | None:
        """The special token that ends an assistant turn of text, or None when the template writes none.

        Of the special tokens that follow an answer at the end of a conversation it is the last that also follows it
        in the middle of one: what comes only at the end (Phi's EOS) closes the text, not the turn.
        """
        parts = [{"type": "text", "text": _PROBE}] if self._content_in_parts else _PROBE
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
        last = self._specials_after(self._try(turns), 2)
        middle = self._specials_after(self._try([*turns, turns[0]]), 2)
        ends = next(
            (i for i, (a, b) in enumerate(zip(last, middle, strict=False)) if a != b), min(len(last), len(middle))
        )
        return last[max(ends - 1, 0)] if last else None

    def _specials_after(self, text: str | None, count: int) -> list[str]:
        """Special tokens behind the `count`-th probe word, up to the next one."""
        parts = (text or "").split(_PROBE)
        if len(parts) <= count or self._specials is None:
            return []
        return self._specials.findall(parts[count])

    def turn_end(self, text: str, start: int) -> int | None:
        """Where the turn that begins at `start` and runs to the text's end has ended: after its end-of-turn token.

        None when it has no such token. What a template writes after it (a newline, the end of the whole text) is
        not the turn's.
        """
        if self._tail is None:
            return None
        tail = self._tail.search(text, start)
        if tail is None or self._specials is None:
            return None
        if self.end_of_turn is not None:
            found = text.find(self.end_of_turn, tail.start())
            if found >= 0:
                return found + len(self.end_of_turn)
        ends = [match.end() for match in self._specials.finditer(text, tail.start())]
        return ends[-1] if ends else None

    @cached_property
    def _special_pattern(self) -> str:
        tokens = set(self._tokenizer.all_special_tokens)
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        tokens |= {token.content for token in added.values() if token.special}
        return "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token)

    @cached_property
    def _specials(self) -> re.Pattern[str] | None:
        return re.compile(self._special_pattern) if self._special_pattern else None

    @cached_property
    def _tail(self) -> re.Pattern[str] | None:
        """Special tokens and blanks up to the end of the text."""
        pattern = self._special_pattern
        return re.compile(rf"(?:{pattern})(?:\s|{pattern})*\Z") if pattern else None


def _targets(target: Any) -> list[Any]:
    """The names that a loop counts by."""
    return target.items if hasattr(target, "items") else [target]


def _call_form(message: Message, as_text: bool, empty: str | None) -> Message:
    import json

    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function["arguments"]
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {"tool_calls": calls, "content": message["content"] or empty}
