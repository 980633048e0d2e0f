"""Supervised rows to drafts: which characters of which text are trained.

An assistant turn of a chat row is its text and its end-of-turn token, found by `{% generation %}` where the template
has it, else by rendering prefix by prefix. Every turn is trained in the context that the model will see when it
answers. Templates that rewrite the history (dropping earlier reasoning, say) give such turns a draft of their own,
beside the draft of the whole conversation; `trees` lets them share what is common.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longtune.data.encoding import Draft, Encoder, Mark
from longtune.data.problems import RowError
from longtune.data.rows import Message, Row, has_substance, is_empty
from longtune.data.template import Spans, Template

TRAIN_ON = ("assistant", "last", "all", "completion")
NOTHING = "no trained token"
_SEAM = "the template renders the end of the prompt differently once the answer follows"
_HISTORY = "the template rewrites history: some turns are trained in a branch of their own"
_NO_END = "the template's generation block leaves out the end-of-turn token: a tuned model may never stop"
_CHANGED = "the template changes or leaves out text of an answer"


@dataclass(frozen=True, slots=True)
class Masker:
    """Drafts of supervised rows.

    Args:
        template: the tokenizer's template.
        encoder: for the EOS that must exist.
        train_on: `assistant` every assistant turn, `last` the last one, `completion` the last one (or the
            completion of a prompt-completion row), `all` every token.
        answer_after: where the answer of a text row begins: behind the first place that this string has in it. None
            trains the whole text.
    """

    template: Template
    encoder: Encoder
    train_on: str = "assistant"
    answer_after: str | None = None

    def drafts(self, row: Row) -> list[Draft]:
        """One draft, or several for a conversation whose template rewrites history.

        Raises:
            RowError: nothing to train on, or an answer that can't be trained in its context.
        """
        if row.kind == "text" and self.answer_after is not None:
            return self._completion(self._divided(row, self.answer_after))
        if row.kind == "text":
            return [_everything(row.text, special=True, eos=self.encoder.has_eos())]
        if row.kind == "completion":
            return self._completion(row)
        return self._chat(row, first=0)

    @staticmethod
    def _divided(row: Row, marker: str) -> Row:
        """A text row as prompt and completion."""
        before, found, after = row.text.partition(marker)
        if not found:
            raise RowError("no answer marker", f"the text has no {marker!r}", "correct answer_after, or the row")
        return Row("completion", prompt=before + found, answers=[after], weight=row.weight)

    def _completion(self, row: Row) -> list[Draft]:
        answer = row.answers[0]
        if is_empty(answer):
            raise RowError("empty answer", "the completion is empty", "fill it or take the row out")
        if isinstance(row.prompt, str):
            assert isinstance(answer, str)
            text = row.prompt + answer
            if self.train_on == "all":
                return [_everything(text, special=True, eos=self.encoder.has_eos())]
            return [
                Draft(text, [Mark(len(row.prompt), prompt=row.prompt)], add_special=True, eos=self.encoder.has_eos())
            ]
        assert isinstance(answer, list)
        whole = Row(
            "chat",
            messages=row.prompt + answer,
            message_weights=row.message_weights,
            tools=row.tools,
            template_kwargs=row.template_kwargs,
        )
        weighted = any(weight is not None for weight in row.message_weights)
        ends = len(answer) == 1 or (self.train_on == "last" and answer[-1]["role"] == "assistant")
        if self.train_on in ("completion", "all") or (ends and not weighted):
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
        draft = Draft(text, [Mark(start, None, 1.0, answer, prompt)], eos=eos)
        if not text.startswith(prompt):
            draft.notes.append(_SEAM)
        return draft

    def _chat(self, row: Row, first: int) -> list[Draft]:
        text, spans = self.template.render(row.messages, row.tools, row.template_kwargs)
        if self.train_on == "all":
            return [_everything(text, special=False, eos=False)]
        main = Draft(text)
        drafts = [main]
        for index, weight in self._trained_turns(row, first):
            last = index == len(row.messages) - 1
            rendered = (text, spans) if last else self._prefix(row, index + 1)
            turn = self._turn(row, index, rendered)
            for mark in turn.marks:
                mark.weight = weight
            main.notes += turn.notes
            if last and turn.eos:
                main.text, main.eos = turn.text, True
            if last or (not turn.eos and text.startswith(turn.text)):
                main.marks += _marks_in(spans, turn) if self.template.has_generation else turn.marks
            else:
                main.notes.append(_HISTORY)
                drafts.append(Draft(rendered[0][: turn.marks[-1].end], turn.marks, eos=turn.eos))
        kept = [draft for draft in drafts if draft.marks]
        kept[0].notes = sorted(set(main.notes))
        return kept

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

    def _turn(self, row: Row, index: int, rendered: tuple[str, Spans]) -> _Turn:
        """A trained turn in the rendering that ends with it."""
        text, spans = rendered
        message = row.messages[index]
        before = row.messages[:index]
        try:
            prompt, earlier = self.template.render(before, row.tools, row.template_kwargs, prompt=True)
        except RowError:
            if not self.template.has_generation or any(m["role"] == "assistant" for m in before):
                raise
            prompt, earlier = "", []
        if self.template.has_generation:
            marks = [Mark(start, end) for start, end in spans[len(earlier) :] if end > start]
            if not marks:
                raise RowError(
                    "empty generation block",
                    f"the template marks nothing of message {index + 1} with {{% generation %}}",
                    "the template is at fault: it must mark what the assistant says",
                )
            end = self.template.turn_end(text, marks[0].start)
            turn = _Turn(text[: end or marks[-1].end], marks, len(earlier), eos=False)
            if end is None or (marks[-1].end or 0) < end:
                turn.notes.append(_NO_END)
        elif not text.startswith(prompt):
            raise RowError(
                "template not consistent",
                f"message {index + 1}: what the model will see before its answer is not how the template renders it "
                f"afterwards ({_difference(prompt, text)}), so its tokens can't be told from the prompt's",
                "use a template with {% generation %}, or template arguments under which both agree",
            )
        else:
            start = len(prompt)
            end = self.template.turn_end(text, start)
            eos = end is None and self.encoder.has_eos()
            end = start + len(text[start:].rstrip()) if end is None else end
            turn = _Turn(text[:end], [Mark(start, end, prompt=prompt)], 0, eos)
        if not text.startswith(prompt):
            turn.notes.append(_SEAM)
        said = text[turn.marks[0].start :]
        _check_calls(message, said)
        if message["content"].strip() not in said:
            turn.notes.append(_CHANGED)
        return turn


@dataclass(slots=True)
class _Turn:
    """A trained turn.

    Attributes:
        text: the rendering up to the turn's end.
        marks: its trained stretches.
        earlier: how many stretches the template marks before it.
        eos: it has no end-of-turn token, so EOS must follow.
        notes: for the report.
    """

    text: str
    marks: list[Mark]
    earlier: int
    eos: bool
    notes: list[str] = field(default_factory=list)


def _marks_in(spans: Spans, turn: _Turn) -> list[Mark]:
    """The turn's stretches as the rendering of the whole conversation marks them."""
    weight = turn.marks[0].weight
    own = [span for span in spans[turn.earlier :] if span[0] >= turn.marks[0].start and span[0] <= turn.marks[-1].start]
    return [Mark(start, end, weight) for start, end in own if end > start]


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
