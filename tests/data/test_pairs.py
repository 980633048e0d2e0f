"""Preference rows: every format gives the same tree; sharing, its limits, and bad pairs."""

import pytest

from longtune.data import load_dataset
from longtune.errors import UserError
from longtune.tree import PROMPT, Forest
from tests.data.support import CHATML, assistant, make_tokenizer, tokens_of, trained_texts, user

END = "<|im_end|>"
CHOSEN, REJECTED = [assistant("good answer")], [assistant("bad answer")]
PAIR = {"prompt": [user("q")], "chosen": CHOSEN, "rejected": REJECTED}

FORMATS = {
    "explicit": PAIR,
    "explicit with message objects": {"prompt": [user("q")], "chosen": CHOSEN[0], "rejected": REJECTED[0]},
    "prompt text beside messages": {"prompt": "q", "chosen": CHOSEN, "rejected": REJECTED},
    "prompt messages beside texts": {"prompt": [user("q")], "chosen": "good answer", "rejected": "bad answer"},
    "implicit": {"chosen": [user("q"), *CHOSEN], "rejected": [user("q"), *REJECTED]},
    "whole conversations": {"prompt": "q", "chosen": [user("q"), *CHOSEN], "rejected": [user("q"), *REJECTED]},
    "openai": {"input": {"messages": [user("q")]}, "preferred_output": CHOSEN, "non_preferred_output": REJECTED},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good answer"},
        "rejected": {"from": "gpt", "value": "bad answer"},
    },
    "rejected_response": {"messages": [user("q"), *CHOSEN], "rejected_response": "bad answer"},
    "rejected_messages": {"messages": [user("q"), *CHOSEN], "rejected_messages": [user("q"), *REJECTED]},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_tree(name, write, tokenizer):
    tree = load_dataset(write(FORMATS[name]), tokenizer, method="dpo").trees[0]
    assert [node.parent for node in tree.nodes] == [-1, 0, 0]
    texts = [tokenizer.decode(node.tokens) for node in tree.nodes]
    assert texts == [
        f"<|im_start|>user\nq{END}\n<|im_start|>assistant\n",
        f"good answer{END}\n",
        f"bad answer{END}\n",
    ]
    assert "".join(trained_texts(tokenizer, tree)) == texts[1]
    assert "".join(trained_texts(tokenizer, tree, answer=1)) == texts[2]
    assert tokenizer.decode([tree.nodes[0].tokens[0], *prompt_targets(tree)]) == texts[0]


def prompt_targets(tree):
    return [t for t, a in zip(tree.targets.token.tolist(), tree.targets.answer.tolist(), strict=True) if a == PROMPT]


def test_last_shared_token_has_a_target_for_each_answer(write, tokenizer):
    row = {**PAIR, "rejected": ["bad answer", "worse", "worst of all"]}
    data = load_dataset(write(row), tokenizer, method="orpo")
    tree = data.trees[0]
    last = tree.nodes[0].tokens.numel() - 1
    answers = [a for h, a in zip(tree.targets.hidden.tolist(), tree.targets.answer.tolist(), strict=True) if h == last]
    assert sorted(answers) == [0, 1, 2, 3]
    assert [node.parent for node in tree.nodes] == [-1, 0, 0, 0, 0]
    assert data.report.sharing == {"fully": 1}
    assert data.report.saved == 3 * (last + 1)


def test_sharing_off_keeps_whole_sequences_with_the_same_targets(write, tokenizer):
    on, off = (
        load_dataset(write(PAIR), tokenizer, method="dpo", prompt_sharing=how).trees[0] for how in ("tree", "off")
    )
    assert [node.parent for node in off.nodes] == [-1, -1]
    assert on.targets.token.tolist() == off.targets.token.tolist()
    assert on.targets.answer.tolist() == off.targets.answer.tolist()
    assert contexts(on) == contexts(off)


def contexts(tree):
    """For each target: the tokens it is predicted from."""
    forest = Forest([tree])
    ends = [0]
    for node in tree.nodes:
        ends.append(ends[-1] + node.tokens.numel())
    found = []
    for column in tree.targets.hidden.tolist():
        node = next(i for i in range(len(tree.nodes)) if column < ends[i + 1])
        found.append(
            [int(forest.tokens[t]) for low, high in forest.path(node) for t in range(low, high) if t <= column]
        )
    return found


def test_string_pairs_end_with_eos_and_seams_stay_out_of_the_prompt(write, tokenizer):
    row = {"prompt": "the an", "chosen": "swer is", "rejected": "d so on"}
    data = load_dataset(write(row), tokenizer, method="dpo")
    tree = data.trees[0]
    for answer, text in ((0, "the answer is"), (1, "the and so on")):
        whole = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        path = [*tree.nodes[0].tokens.tolist(), *tree.nodes[1 + answer].tokens.tolist()]
        assert path == whole
    assert any("merge" in note for note in data.report.notes)


def test_what_is_left_of_the_prompt_lies_untrained_in_the_branch(write):
    """One answer merges with the prompt's end, the other doesn't: its branch begins with prompt tokens."""
    tokenizer = make_tokenizer()
    row = {"prompt": "the an", "chosen": "swer is", "rejected": "!"}
    data = load_dataset(write(row), tokenizer, method="dpo")
    tree = data.trees[0]
    prompt = tokenizer("the an")["input_ids"]
    shared = tree.nodes[0].tokens.numel()
    assert shared < len(prompt)
    assert "".join(trained_texts(tokenizer, tree, answer=1)) == "!" + END
    assert tree.nodes[2].tokens.tolist()[: len(prompt) - shared] == prompt[shared:]
    assert data.report.sharing == {"partly": 1}


def test_nothing_shared_gives_two_roots(write):
    template = CHATML.replace("{% for m", "{{ messages[-1]['content'][:1] }}{% for m")
    tokenizer = make_tokenizer(template)
    data = load_dataset(write(PAIR), tokenizer, method="dpo")
    tree = data.trees[0]
    assert [node.parent for node in tree.nodes] == [-1, -1]
    assert data.report.sharing == {"not": 1} and data.report.saved == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "rejected": CHOSEN}, "are equal"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
        ({"prompt": "q", "chosen": "a", "rejected": f"a{END}"}, "equal in tokens"),
        ({"chosen": [user("q"), *CHOSEN], "rejected": [user("q"), *CHOSEN]}, "are equal"),
        ({**PAIR, "rejected": [assistant("")]}, "rejected answer is empty"),
        ({"prompt": "q", "chosen": " ", "rejected": "a"}, "chosen answer is empty"),
        ({**PAIR, "rejected": None}, "no `rejected`"),
        ({"prompt": "q", "rejected": "a"}, "no `chosen`"),
        ({"input": {"messages": [user("q")]}, "preferred_output": CHOSEN}, "no `non_preferred_output`"),
        ({"chosen": [user("q"), *CHOSEN], "rejected": [user("p"), *REJECTED]}, "from their first message"),
        ({"prompt": "other", "chosen": [user("q"), *CHOSEN], "rejected": [user("q"), *REJECTED]}, "not in them"),
        ({**PAIR, "prompt": ""}, "prompt is empty"),
        ({**PAIR, "chosen": [user("good")]}, "chosen answer has no message of role assistant, only of user"),
        ({**PAIR, "rejected": [user("bad")]}, "rejected answer has no message of role assistant, only of user"),
        ({**PAIR, "chosen": [user("x")], "rejected": [user("y")]}, "chosen answer has no message of role assistant"),
        (
            {"chosen": [user("q"), *CHOSEN], "rejected": [user("q")]},
            "rejected conversation ends .* role user: its answer",
        ),
        ({"chosen": [user("q")], "rejected": [user("q"), *REJECTED]}, "chosen conversation ends .* answer is missing"),
        ({"chosen": [user("x")], "rejected": [user("y")]}, "chosen conversation ends .* answer is missing"),
        ({"chosen": [user("q")], "rejected": [user("q")]}, "chosen conversation ends .* answer is missing"),
        (
            {"chosen": [user("q"), *CHOSEN, user("r"), *CHOSEN], "rejected": [user("q"), *CHOSEN, user("r")]},
            "rejected conversation ends .* answer is missing",
        ),
        ({"chosen": [user("q"), *CHOSEN], "rejected": REJECTED}, "the other an answer alone"),
        ({**PAIR, "chosen": [user("q"), *CHOSEN]}, "the other an answer alone"),
        ({**FORMATS["rejected_messages"], "rejected_messages": [user("q")]}, "rejected conversation ends"),
        ({**FORMATS["openai"], "preferred_output": [user("good")]}, "chosen answer has no message of role assistant"),
        ({"prompt": "q", "completion": "a"}, "needs a chosen and a rejected"),
        ({"chosen": 1, "rejected": 2, "prompt": 3}, "must be a string"),
    ],
)
def test_bad_pairs_are_named(row, reason, write, tokenizer):
    path = write(row)
    with pytest.raises(UserError, match=reason) as caught:
        load_dataset(path, tokenizer, method="dpo")
    assert caught.value.problems[0].place == f"{path}:1"
    good = write(row, PAIR, name="two.jsonl")
    report = load_dataset(good, tokenizer, method="dpo", bad_rows="drop").report
    assert report.kept == 1 and sum(report.dropped.values()) == 1


def test_a_fix_never_asks_for_what_is_there(write, tokenizer):
    row = {**PAIR, "chosen": [user("a"), *CHOSEN], "rejected": [user("b"), *REJECTED]}
    with pytest.raises(UserError, match="from their first message") as caught:
        load_dataset(write(row), tokenizer, method="dpo")
    assert "add a column prompt" not in caught.value.problems[0].fix


LONG = {"prompt": [user("q " * 40)], "chosen": [assistant("good")], "rejected": [assistant("bad " * 20)]}


def test_prompt_over_the_limit_is_an_error_and_never_trained_on_one_token(write, tokenizer):
    path = write(LONG, PAIR)
    with pytest.raises(UserError, match="prompt leaves no room"):
        load_dataset(path, tokenizer, method="dpo", max_tokens=40)
    data = load_dataset(path, tokenizer, method="dpo", max_tokens=40, overlong="truncate_right")
    assert data.report.dropped == {"prompt longer than max_tokens": 1} and len(data) == 1


def test_truncation_treats_the_pair_as_one_tree(write, tokenizer):
    path = write(LONG)
    whole = load_dataset(path, tokenizer, method="dpo").trees[0]
    limit = max(whole.nodes[0].tokens.numel() + node.tokens.numel() for node in whole.nodes[1:]) - 10
    with pytest.raises(UserError, match="the limit is") as caught:
        load_dataset(path, tokenizer, method="dpo", max_tokens=limit)
    assert "split" not in caught.value.problems[0].fix, "pairs can't be"
    left = load_dataset(path, tokenizer, method="dpo", max_tokens=limit, overlong="truncate_left").trees[0]
    assert left.nodes[0].tokens.tolist() == whole.nodes[0].tokens.tolist()[10:]
    assert [tokens.tokens.tolist() for tokens in left.nodes[1:]] == [n.tokens.tolist() for n in whole.nodes[1:]]
    right = load_dataset(path, tokenizer, method="dpo", max_tokens=limit, overlong="truncate_right").trees[0]
    assert right.nodes[1].tokens.tolist() == whole.nodes[1].tokens.tolist()
    assert right.nodes[2].tokens.tolist() == whole.nodes[2].tokens.tolist()[:-10]
    dropped = load_dataset(write(LONG, PAIR), tokenizer, method="dpo", max_tokens=limit, overlong="drop").report
    assert dropped.dropped == {"longer than max_tokens": 1}
    alike = write({**LONG, "chosen": [assistant("bad " * 20 + "end")], "rejected": [assistant("bad " * 20 + "fin")]})
    with pytest.raises(UserError, match="1 answers equal after the cut"):
        load_dataset(alike, tokenizer, method="dpo", max_tokens=limit - 40, overlong="truncate_right")
    path = write(LONG)
    with pytest.raises(UserError, match="only text rows can be split"):
        load_dataset(path, tokenizer, method="dpo", max_tokens=limit, overlong="split")


def test_strings_without_prompt_share_their_common_start(write, tokenizer):
    row = {"chosen": "said user 1 the answer", "rejected": "said user 1 so on"}
    tree = load_dataset(write(row), tokenizer, method="dpo").trees[0]
    assert tokens_of(tree)[: tree.nodes[0].tokens.numel()] == tokenizer("said user 1")["input_ids"]
    assert "".join(trained_texts(tokenizer, tree)) == " the answer" + END
