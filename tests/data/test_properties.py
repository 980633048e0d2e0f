"""Any conversation round-trips or is refused; mutated rows and files never crash the reading."""

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtune.data import load_dataset
from longtune.errors import UserError
from tests.data.support import CHATML, CHATML_GENERATION, assistant, make_tokenizer, tokens_of, trained_texts, user

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
ROLE = st.sampled_from(["system", "user", "assistant", "tool"])
TALK = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, ROLE, TEXT), min_size=1, max_size=6)
TOKENIZERS = {"prefix": make_tokenizer(CHATML), "generation": make_tokenizer(CHATML_GENERATION)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talk=TALK)
def test_any_conversation_round_trips_and_only_assistant_turns_are_trained(kind, talk, tmp_path):
    tokenizer = TOKENIZERS[kind]
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": talk}), encoding="utf-8")
    answers = [message["content"] for message in talk if message["role"] == "assistant"]
    begins_with_answer = talk[0]["role"] == "assistant"
    if not answers or (begins_with_answer and kind == "prefix"):
        with pytest.raises(UserError):
            load_dataset(str(path), tokenizer)
        return
    tree = load_dataset(str(path), tokenizer).trees[0]
    assert tokenizer.decode(tokens_of(tree)) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert trained_texts(tokenizer, tree) == [answer + "<|im_end|>" for answer in answers]


GOOD: list[dict[str, Any]] = [
    {"messages": [user("q"), assistant("a"), user("r"), assistant("b", weight=0.5)], "tools": [{"type": "function"}]},
    {"messages": [user("q"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
    {"prompt": "p", "completion": " c", "weight": 2},
    {"prompt": [user("q")], "completion": [assistant("a")], "chat_template_kwargs": {"x": 1}},
    {"text": "some text here"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    {"instruction": "i", "input": "j", "output": "o", "history": [["a", "b"]]},
    {"prompt": "p", "chosen": " c", "rejected": [" d", " e"]},
    {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
    {
        "input": {"messages": [user("q")]},
        "preferred_output": [assistant("a")],
        "non_preferred_output": [assistant("b")],
    },
    {"messages": [user("q"), assistant("a")], "rejected_response": "b"},
    {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"},
]
JUNK: list[Any] = [
    None,
    "",
    " ",
    0,
    -1.5,
    True,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"role": "user"},
    "[1]",
    "{",
    "\u0000",
    10**30,
]


def mutate(value: Any, rng: random.Random) -> Any:
    """The value with one part replaced, dropped, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.25:
            return {(k + "x" if k == key else k): v for k, v in value.items()}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.15:
            return value[:at] + value[at + 1 :]
        if kind < 0.3:
            return [*value[:at], value[at], *value[at:]]
        return [*value[:at], mutate(value[at], rng), *value[at + 1 :]]
    return rng.choice(JUNK)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_mutated_rows_give_a_clear_error_or_a_right_row(method, tmp_path, tokenizer):
    rng = random.Random(method)
    for number in range(600):
        row = mutate(rng.choice(GOOD), rng)
        if rng.random() < 0.3:
            row = mutate(row, rng)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        check(path, tokenizer, method)


def test_mutated_files_give_a_clear_error_or_right_rows(tmp_path, tokenizer):
    rng = random.Random(0)
    whole = "\n".join(json.dumps(row) for row in GOOD[:2] * 3).encode()
    for number in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        path = tmp_path / f"{number}{rng.choice(['.jsonl', '.json', '.csv', '.parquet', '.jsonl.gz'])}"
        path.write_bytes(bytes(content[: rng.randint(0, len(content))]))
        check(path, tokenizer, "sft")


def check(path, tokenizer, method):
    """Reads a file: all rows kept, or a `UserError` whose problems have a place and a reason."""
    try:
        data = load_dataset(str(path), tokenizer, method=method)
    except UserError as error:
        assert error.problems
        assert all(problem.place and problem.reason for problem in error.problems)
    else:
        assert data.report.rows == data.report.kept == len(data)
        assert all(len(tree.targets) for tree in data.trees)
