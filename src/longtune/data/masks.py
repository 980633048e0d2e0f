"""Supervised rows to drafts: which characters of which text are trained.

An assistant turn of a chat row is its text and its end-of-turn token, found by `{% generation %}` where the template
has it, else by rendering prefix by prefix. Every turn is trained in the context that the model will see when it
answers. Templates that rewrite the history (dropping earlier reasoning, say) give such turns a draft of their own,
beside the draft of the whole conversation; `trees` lets them share what is common.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtune.data.encoding import Draft, Encoder, Mark
from longtune.data.problems import RowError
from longtune.data.rows import Message, Row, has_substance, is_empty
from longtune.data.template import Template

TRAIN_ON = ("assistant", "last", "all", "completion")
NOTHING = "no trained token"


@dataclass(frozen=True, slots=True)
class Masker:
    """Drafts of supervised rows.

    Args:
        template: the tokenizer's template.
        encoder: for the EOS that must exist.
        train_on: `assistant` every assistant turn, `last` the last one, `completion` the last one (or the
            completion of a prompt-completion row), `all` every token.
    """

    template: Template
    encoder: Encoder
    train_on: str = "assistant"

    def drafts(self, row: Row) -> list[Draft]:
        """One draft, or several for a conversation whose template rewrites history.

        Raises:
            RowError: nothing to train on, or an answer that can't be trained in its context.
        """
        if row.kind == "text":
            return [_everything(row.text, special=True, eos=self.encoder.has_eos())]
        if row.kind == "completion":
            return self._completion(row)
        return self._chat(row, first=0)

    def _completion(self, row: Row) -> list[Draft]:
        answer = row.answers[0]
        if is_empty(answer):
            raise RowError("empty answer", "the completion is empty", "fill it or take the row out")
        if isinstance(row.prompt, str):
            assert isinstance(answer, str)
            text = row.prompt + answer
            if self.train_on == "all":
                return [_everything(text, special=True, eos=self.encoder.has_eos())]
            return [Draft(text, [Mark(len(row.prompt), prompt=row.prompt)], add_special=True, eos=True)]
        assert isinstance(answer, list)
        whole = Row(
            "chat",
            messages=row.prompt + answer,
            message_weights=row.message_weights,
            tools=row.tools,
            template_kwargs=row.template_kwargs,
        )
        weighted = any(weight is not None for weight in row.message_weights)
        if self.train_on in ("completion", "all") or (
            not weighted and (len(answer) == 1 or self.train_on == "last" and answer[-1]["role"] == "assistant")
        ):
            split = len(row.prompt) if self.train_on != "last" else len(whole.messages) - 1
            return [self.answer_draft(whole, split, everything=self.train_on == "all")]
        return self._chat(whole, first=len(row.prompt))

    def answer_draft(self, row: Row, split: int, everything: bool = False, answer: int = 0) -> Draft:
        """A draft whose answer, the messages from `split` on, runs to the end of the rendering (TRL's rule)."""
        text, _ = self.template.render(row.messages, row.tools, row.template_kwargs)
        if everything:
            return _everything(text, special=False, eos=False)
        prompt, _ = self.template.render(row.messages[:split], row.tools, row.template_kwargs, prompt=True)
        start = len(prompt) if text.startswith(prompt) else 0
        for message in row.messages[split:]:
            _check_calls(message, text[start:])
        # The answer must have an end that the model can learn.
        eos = self.template.turn_end(text, start) is None and self.encoder.has_eos()
        return Draft(text, [Mark(start, None, 1.0, answer, prompt)], eos=eos, seam=not text.startswith(prompt))

    def _chat(self, row: Row, first: int) -> list[Draft]:
        text, spans = self.template.render(row.messages, row.tools, row.template_kwargs)
        if self.train_on == "all":
            return [_everything(text, special=False, eos=False)]
        turns = self._trained_turns(row, first)
        main = Draft(text)
        drafts = [main]
        for turn, weight in turns:
            last = turn == len(row.messages) - 1
            whole = (text, spans) if last else self._prefix(row, turn + 1)
            marks, end, eos = self._turn_marks(row, turn, whole)
            for mark in marks:
                mark.weight = weight
            if last and eos:
                main.text = whole[0][:end]
                main.eos = True
                main.marks += marks
            elif not eos and text.startswith(whole[0][:end]):
                main.marks += marks
            else:
                drafts.append(Draft(whole[0][:end], marks, eos=eos))
        return [draft for draft in drafts if draft.marks]

    def _trained_turns(self, row: Row, first: int) -> list[tuple[int, float]]:
        """Index and weight of every trained turn."""
        turns = [i for i, message in enumerate(row.messages) if i >= first and message["role"] == "assistant"]
        if not turns:
            raise RowError(NOTHING, "the conversation has no assistant turn, so no token is trained", "add an answer")
        if self.train_on in ("last", "completion"):
            turns = turns[-1:]
        weights = row.message_weights or [None] * len(row.messages)
        trained = [(i, 1.0 if weights[i] is None else float(weights[i] or 0.0)) for i in turns]
        trained = [(i, weight) for i, weight in trained if weight > 0]
        if not trained:
            raise RowError(NOTHING, "every assistant turn has weight 0, so no token is trained", "take the row out")
        for i, _ in trained:
            if not has_substance(row.messages[i]):
                raise RowError("empty answer", f"message {i + 1} (assistant) is empty", "fill it or give it weight 0")
        return trained

    def _prefix(self, row: Row, count: int) -> tuple[str, list[tuple[int, int]]]:
        return self.template.render(row.messages[:count], row.tools, row.template_kwargs)

    def _turn_marks(
        self, row: Row, turn: int, whole: tuple[str, list[tuple[int, int]]]
    ) -> tuple[list[Mark], int, bool]:
        """Marks of one turn in the rendering that ends with it, where it ends there, and whether EOS must follow."""
        text, spans = whole
        before = row.messages[:turn]
        if self.template.has_generation:
            earlier = len(self._prefix(row, turn)[1]) if any(m["role"] == "assistant" for m in before) else 0
            own = [span for span in spans[earlier:] if span[1] > span[0]]
            if not own:
                raise RowError(
                    "empty generation block",
                    f"the template marks nothing of message {turn + 1} with {{% generation %}}",
                    "the template is at fault: it must mark what the assistant says",
                )
            _check_calls(row.messages[turn], text[own[0][0] : own[-1][1]])
            return [Mark(start, end) for start, end in own], own[-1][1], False
        prompt, _ = self.template.render(before, row.tools, row.template_kwargs, prompt=True)
        if not text.startswith(prompt):
            raise RowError(
                "template not consistent",
                f"message {turn + 1}: what the model will see before its answer is not how the template renders it "
                f"afterwards ({_difference(prompt, text)}), so its tokens can't be told from the prompt's",
                "use a template with {% generation %}, or template arguments under which both agree",
            )
        _check_calls(row.messages[turn], text[len(prompt) :])
        end = self.template.turn_end(text, len(prompt))
        if end is None:
            end = len(prompt) + len(text[len(prompt) :].rstrip())
            return [Mark(len(prompt), end, prompt=prompt)], end, self.encoder.has_eos()
        return [Mark(len(prompt), end, prompt=prompt)], end, False


def _check_calls(message: Message, rendered: str) -> None:
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in rendered:
            raise RowError(
                "tool calls not rendered",
                f"the chat template leaves the call of {call['function']['name']} out",
                "use a model whose template knows tools, or write the calls into `content`",
            )


def _everything(text: str, special: bool, eos: bool) -> Draft:
    return Draft(text, [Mark(0)], add_special=special, eos=eos)


def _difference(prompt: str, text: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    return f"{prompt[at : at + 30]!r} against {text[at : at + 30]!r}"
