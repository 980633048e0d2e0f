"""Preference rows to drafts: the prompt with each answer, one draft for each.

The first draft is the chosen answer's, and carries the prompt's own next-token targets too (for objectives that want
every token of the chosen sequence). Where the shared node ends is decided in `trees`, on tokens.
"""

from __future__ import annotations

from longtune.data.encoding import Draft, Mark
from longtune.data.masks import Masker
from longtune.data.rows import Row


def pair_drafts(row: Row, masker: Masker) -> list[Draft]:
    """Drafts of the chosen answer (0) and the rejected ones (1 and up). Answers run to the end of the rendering.

    Raises:
        RowError: the template refuses the conversation, or there is no EOS to end string answers with.
    """
    drafts: list[Draft] = []
    for index, answer in enumerate(row.answers):
        if isinstance(row.prompt, str):
            assert isinstance(answer, str)
            mark = Mark(len(row.prompt), None, 1.0, index, row.prompt)
            drafts.append(Draft(row.prompt + answer, [mark], add_special=True, eos=masker.encoder.has_eos()))
        else:
            assert isinstance(answer, list)
            whole = Row("chat", messages=row.prompt + answer, tools=row.tools, template_kwargs=row.template_kwargs)
            drafts.append(masker.answer_draft(whole, len(row.prompt), answer=index))
    return drafts
