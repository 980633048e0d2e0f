"""Rows over the limit: nothing is cut unless asked for, and everything cut or dropped is counted."""

import pytest

from longtune.data import load_dataset
from longtune.data.dataset import OVERLONG
from longtune.errors import UserError
from tests.data.support import assistant, tokens_of, trained_texts, user

LONG = {"text": "word1 the answer is 7 and so on " * 30}


def test_there_is_no_default_limit(write, tokenizer):
    row = {"text": "long " * 50_000}
    assert load_dataset(write(row), tokenizer).report.longest > 50_000


def test_error_is_the_default_and_names_the_lengths(write, tokenizer):
    path = write(LONG, {"text": "short"}, LONG)
    with pytest.raises(UserError, match=r":1: .* tokens, the limit is 20") as caught:
        load_dataset(path, tokenizer, max_tokens=20)
    assert [problem.place for problem in caught.value.problems] == [f"{path}:1", f"{path}:3"]


def test_drop_counts(write, tokenizer):
    report = load_dataset(write(LONG, {"text": "short"}), tokenizer, max_tokens=20, overlong="drop").report
    assert (report.rows, report.kept, report.dropped) == (2, 1, {"longer than max_tokens": 1})


def test_truncation_keeps_the_asked_end(write, tokenizer):
    whole = tokens_of(load_dataset(write(LONG), tokenizer).trees[0])
    for how, expected in (("truncate_left", whole[-20:]), ("truncate_right", whole[:20])):
        data = load_dataset(write(LONG), tokenizer, max_tokens=20, overlong=how)
        assert tokens_of(data.trees[0]) == expected
        assert len(data.trees[0].targets) == 19
        assert data.report.truncated == 1


def test_split_trains_every_token_once(write, tokenizer):
    whole = load_dataset(write(LONG), tokenizer).trees[0]
    for limit in (2, 7, 20, whole.size - 1):
        data = load_dataset(write(LONG), tokenizer, max_tokens=limit, overlong="split")
        targets = [t for tree in data.trees for t in tree.targets.token.tolist()]
        assert targets == whole.targets.token.tolist()
        assert max(tree.size for tree in data.trees) <= limit
        assert data.trees[1].row.endswith(":1[2]")


def test_split_is_for_text_rows(write, tokenizer):
    path = write({"messages": [user("q " * 30), assistant("a " * 30)]})
    with pytest.raises(UserError, match="only text rows"):
        load_dataset(path, tokenizer, max_tokens=20, overlong="split")


@pytest.mark.parametrize(
    ("method", "row", "short"),
    [
        ("sft", LONG, {"text": "short"}),
        ("sft", {"messages": [user("q"), assistant("a " * 60)]}, {"messages": [user("q"), assistant("a")]}),
        ("sft", {"prompt": "q", "completion": "a " * 60}, {"prompt": "q", "completion": "a"}),
        (
            "dpo",
            {"prompt": [user("q")], "chosen": [assistant("a " * 60)], "rejected": [assistant("b " * 60)]},
            {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        ),
    ],
    ids=["text", "chat", "prompt-completion", "pairs"],
)
def test_what_the_fix_offers_for_a_long_row_is_taken(method, row, short, write, tokenizer):
    path = write(row, short)
    with pytest.raises(UserError, match="the limit is 40") as caught:
        load_dataset(path, tokenizer, method=method, max_tokens=40)
    (problem,) = caught.value.problems
    offered = [word.rstrip(",") for word in problem.fix.split("overlong: ")[1].replace(" or ", ", ").split()]
    assert ("split" in offered) is ("text" in row) and {"drop", "truncate_right"} <= {*offered} <= {*OVERLONG}
    for overlong in offered:
        assert len(load_dataset(path, tokenizer, method=method, max_tokens=40, overlong=overlong)) >= 1


def test_prompt_longer_than_the_limit_is_dropped_not_trained_on_one_prompt_token(write, tokenizer):
    rows = (
        ({"prompt": "word1 " * 60, "completion": "the answer"}, {"prompt": "word1", "completion": " the answer"}),
        ({"messages": [user("q " * 60), assistant("a")]}, {"messages": [user("q"), assistant("a")]}),
    )
    for long, short in rows:
        path = write(long, short)
        data = load_dataset(path, tokenizer, max_tokens=30, overlong="truncate_right")
        assert data.report.dropped == {"no trained token left after the cut": 1}
        assert len(data) == 1


def test_truncate_left_keeps_the_answer(write, tokenizer):
    path = write({"messages": [user("q " * 60), assistant("the answer")]})
    tree = load_dataset(path, tokenizer, max_tokens=12, overlong="truncate_left").trees[0]
    assert tree.size == 12
    assert trained_texts(tokenizer, tree) == ["the answer<|im_end|>"]


def test_nothing_left_is_an_error(write, tokenizer):
    with pytest.raises(UserError, match=r"no row of it is left .*1 longer than max_tokens"):
        load_dataset(write(LONG), tokenizer, max_tokens=5, overlong="drop")
