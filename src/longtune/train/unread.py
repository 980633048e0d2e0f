"""Keys of a config that nothing of this run would read, as its data and tokenizer tell.

What the config alone tells is refused when it is read (`config/refusals.py`). A run that was started already isn't
asked: it goes on as it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from longtune.config import RunConfig, TrainConfig
from longtune.data import Dataset
from longtune.data.template import GIVEN, Template
from longtune.errors import Problem

_DEFAULTS = TrainConfig()


def unread_settings(config: RunConfig, valid: Any, tokenizer: Any) -> list[Problem]:
    """One problem for each.

    Args:
        valid: the validation source; None where there is none.
        tokenizer: of the model.
    """
    return [*_of_validation(config, valid), *_of_template(config, tokenizer)]


def unread_sharing(config: RunConfig, data: Iterable[Dataset]) -> list[Problem]:
    """The problem of `prompt_sharing` where no row of the data is more than one sequence."""
    if config.prompt_sharing == "tree" or any(dataset.branched for dataset in data):
        return []
    return [Problem("prompt_sharing", "no row here has answers that could share a prompt", "leave it out")]


def idle_validation(config: RunConfig, valid: Any) -> Iterator[str]:
    """What to say of a rhythm of validations that has nothing to validate.

    It is no error: one config serves data with a validation file and data without.
    """
    every = config.train.eval_every
    if valid is None and every not in (_DEFAULTS.eval_every, 0) and not config.samples.prompts:
        yield f"train.eval_every is {every}, and nothing is validated: there is no validation data (see valid)"


def _of_validation(config: RunConfig, valid: Any) -> Iterator[Problem]:
    if valid is None and config.train.eval_rows != _DEFAULTS.eval_rows:
        fix = "leave it out, or name validation data with valid"
        yield Problem("train.eval_rows", "there is no validation data", fix)


def _of_template(config: RunConfig, tokenizer: Any) -> Iterator[Problem]:
    if not config.chat_template_kwargs:
        return
    template = Template(tokenizer)
    known = template.variables
    for name in config.chat_template_kwargs:
        place = f"chat_template_kwargs.{name}"
        if template.missing:
            yield Problem(place, "the model's tokenizer has no chat template", "leave it out")
        elif name in GIVEN:
            yield Problem(place, "comes from the row, not from the config", "leave it out")
        elif name not in known:
            others = ", ".join(sorted(template.options))
            reads = f"its names are {others}" if others else "it reads nothing but the row"
            yield Problem(place, f"the model's chat template doesn't read it; {reads}", "leave it out, or correct it")
