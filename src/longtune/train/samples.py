"""Sample answers: a few prompts that a run answers as it goes, greedily and with the model's own generation.

Prompts are held-out rows, read off their token trees, or the user's own. Nothing here touches training: generation
draws nothing from a generator, dropout is off, and the peak of device memory is set aside. What an answer says is for
a reader; the loss of the same rows is `evaluate`'s work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longtune.config import RunConfig
from longtune.errors import Problem, UserError
from longtune.model.generation import generate
from longtune.train.evaluate import Stopped, chosen_rows
from longtune.train.prepare import Prepared
from longtune.tree import Tree

_BATCH = 4
_TEXT_PROMPT = 32
"""Most tokens of the prompt of a row that is trained whole: its beginning."""
_SHOWN = 2000
"""Most characters of a prompt in an event: its end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt.

    Attributes:
        prompt: token ids; or a text, or the messages of a conversation.
        text: the prompt for a reader.
        row: the row that it is of; None for the user's own.
        reference: that row's own answer, cut to the length of an answer.
    """

    prompt: Any
    text: str
    row: str | None = None
    reference: str | None = None


class Samples:
    """The prompts of a run and their answers.

    Args:
        prepared: the run's parts; validation rows are taken from there.

    Raises:
        UserError: there are no such rows, or the file of prompts can't be read.
    """

    def __init__(self, config: RunConfig, prepared: Prepared):
        self._settings, self._prepared = config.samples, prepared
        self._template = config.chat_template_kwargs
        prompts = config.samples.prompts
        self.asked = self._rows(prompts) if isinstance(prompts, int) else self._own(prompts)

    def __call__(self, stopped: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Answers them all: the fields of a `samples` event.

        Args:
            stopped: asked before every few answers.

        Raises:
            Stopped: `stopped` said yes.
        """
        start = time.perf_counter()
        device = self._prepared.device
        answers: list[str] = []
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for first in range(0, len(self.asked), _BATCH):
                if stopped():
                    raise Stopped
                answers += generate(
                    self._prepared.model,
                    self._prepared.loaded.tokenizer,
                    [asked.prompt for asked in self.asked[first : first + _BATCH]],
                    max_new_tokens=self._settings.max_new_tokens,
                    batch_size=_BATCH,
                    template_kwargs=self._template,
                )
        if device.type == "cuda":
            # Blocks of other shapes than a step's, which a tight plan has no room for.
            torch.cuda.empty_cache()
        items = [_item(asked, answer) for asked, answer in zip(self.asked, answers, strict=True)]
        return {"items": items, "seconds": round(time.perf_counter() - start, 3)}

    def _rows(self, count: int) -> list[Asked]:
        valid = self._prepared.valid
        if valid is None:
            fix = "name some with valid, or list prompts of your own"
            raise UserError(Problem("samples.prompts", "there is no validation data to take them from", fix))
        found: list[Asked] = []
        trees = valid.trees
        for index in _spread(len(trees), count):
            asked = self._of_row(trees[index])
            if asked is not None:
                found.append(asked)
            if len(found) == count:
                return found
        if not found:
            longest = self._settings.max_prompt_tokens
            reason = f"every validation row has a prompt of more than {longest} tokens"
            raise UserError(Problem("samples.prompts", reason, "raise samples.max_prompt_tokens, or list prompts"))
        return found

    def _of_row(self, tree: Tree) -> Asked | None:
        split = split_row(tree)
        if split is None or len(split[0]) > self._settings.max_prompt_tokens:
            return None
        tokenizer: Any = self._prepared.loaded.tokenizer
        prompt, answer = split
        reference = tokenizer.decode(answer[: self._settings.max_new_tokens], skip_special_tokens=True)
        return Asked(prompt, tokenizer.decode(prompt), tree.row, reference)

    def _own(self, prompts: str | Sequence[str]) -> list[Asked]:
        texts = read_prompts(prompts) if isinstance(prompts, str) else list(prompts)
        templated = self._templated()
        return [Asked([{"role": "user", "content": text}] if templated else text, text) for text in texts]

    def _templated(self) -> bool:
        """Whether the training rows went through the chat template, as the user's prompts then do."""
        tokenizer: Any = self._prepared.loaded.tokenizer
        if not tokenizer.chat_template or set(self._prepared.train.report.formats) == {"text"}:
            return False
        probe = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True, **self._template
        )
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        special -= {tokenizer.bos_token_id, tokenizer.eos_token_id}
        marks = special & {*tokenizer(probe, add_special_tokens=False)["input_ids"]}
        row = self._prepared.train.trees[0]
        return not marks or bool(marks & {token for node in row.nodes for token in node.tokens.tolist()})


def split_row(tree: Tree) -> tuple[list[int], list[int]] | None:
    """Token ids of a row's prompt and of its first answer (of a pair, the chosen one); None without an answer.

    A row that is trained from its beginning, such as plain text, has no prompt: half of it is taken, at most 32 tokens.
    """
    chosen = (tree.targets.answer == 0).nonzero().flatten()
    if not len(chosen):
        return None
    columns = tree.targets.hidden[chosen].tolist()
    tokens = tree.targets.token[chosen].tolist()
    prompt = _up_to(tree, columns[0])
    end = next((at for at in range(1, len(columns)) if columns[at] != columns[at - 1] + 1), len(columns))
    answer = tokens[:end]
    if len(prompt) == 1:
        whole = prompt + answer
        cut = max(1, min(_TEXT_PROMPT, len(whole) // 2))
        return whole[:cut], whole[cut:]
    return prompt, answer


def read_prompts(name: str) -> list[str]:
    """The lines of a text file that are not blank; raises UserError where there are none."""
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text in UTF-8"
        fix = "name a text file with one prompt a line, or list the prompts"
        raise UserError(Problem(f"samples.prompts: {name}", str(reason), fix)) from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(Problem(f"samples.prompts: {name}", "holds no prompt", "write one a line"))
    return prompts


def _up_to(tree: Tree, column: int) -> list[int]:
    """The tokens on the path of a column, itself included."""
    starts = [0]
    for node in tree.nodes:
        starts.append(starts[-1] + node.tokens.numel())
    index = next(i for i, end in enumerate(starts[1:]) if column < end)
    tokens = tree.nodes[index].tokens[: column - starts[index] + 1].tolist()
    while (index := tree.nodes[index].parent) >= 0:
        tokens = tree.nodes[index].tokens.tolist() + tokens
    return tokens


def _spread(rows: int, count: int) -> Iterator[int]:
    """First the rows that a validation of `count` would see, then the others."""
    first = chosen_rows(rows, count)
    yield from first
    yield from sorted(set(range(rows)) - set(first))


def _item(asked: Asked, answer: str) -> dict[str, Any]:
    text = asked.text if len(asked.text) <= _SHOWN else f"... {asked.text[-_SHOWN:]}"
    extra = {"row": asked.row, "reference": asked.reference}
    return {"prompt": text, "answer": answer, **{name: value for name, value in extra.items() if value is not None}}
