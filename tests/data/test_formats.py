"""Every supervised format: detected by its columns, and the trained text is the answer and its end."""

import json

import pytest

from longtune.data import load_dataset
from longtune.errors import UserError
from tests.data.support import CHATML, assistant, make_tokenizer, tokens_of, trained_texts, user

END = "<|im_end|>"
TOOLS_TEMPLATE = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}<tool>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool>{% endfor %}",
)
CALL = {"id": "1", "type": "function", "function": {"name": "price", "arguments": '{"symbol": "BAC"}'}}

FORMATS = {
    "chat": (
        {"messages": [user("q"), assistant("a one"), user("r"), assistant("b two")]},
        ["a one" + END, "b two" + END],
    ),
    "chat parts": (
        {
            "messages": [
                user("q"),
                {"role": "assistant", "content": [{"type": "text", "text": "in "}, {"text": "parts"}]},
            ]
        },
        ["in parts" + END],
    ),
    "chat as text": ({"messages": json.dumps([user("q"), assistant("a")])}, ["a" + END]),
    "prompt-completion": ({"prompt": "said", "completion": " the answer"}, [" the answer" + END]),
    "prompt-completion ended": ({"prompt": "said", "completion": " the answer" + END}, [" the answer" + END]),
    "prompt-completion chat": ({"prompt": [user("q")], "completion": [assistant("a")]}, ["a" + END + "\n"]),
    "prompt-completion agent": (
        {"prompt": [user("q")], "completion": [assistant("a"), {"role": "tool", "content": "t"}, assistant("b")]},
        ["a" + END, "b" + END],
    ),
    "sharegpt": (
        {
            "system": "be brief",
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        },
        ["a" + END],
    ),
    "sharegpt roles": ({"conversations": [user("q"), assistant("a")]}, ["a" + END]),
    "alpaca": (
        {"instruction": "do", "input": "this", "output": "done", "history": [["earlier", "yes"]], "system": "s"},
        ["yes" + END, "done" + END],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_trained_text_is_the_answer_and_its_end(name, write, tokenizer):
    row, expected = FORMATS[name]
    data = load_dataset(write(row), tokenizer)
    assert trained_texts(tokenizer, data.trees[0]) == expected
    assert list(data.report.formats) == [name.split(" ")[0]]


def test_text_rows_train_every_token_but_the_first_and_end_with_eos(write, tokenizer):
    for text in ("the answer is", "the answer is" + END):
        tree = load_dataset(write({"text": text}), tokenizer).trees[0]
        assert tokenizer.decode(tokens_of(tree)) == "the answer is" + END
        assert len(tree.targets) == tree.size - 1


def test_special_tokens_are_added_once(write, tokenizer_with_bos):
    """No double BOS, whoever writes the first one."""
    bos = tokenizer_with_bos.bos_token_id
    rows = (
        {"text": "hello"},
        {"text": "<s>hello"},
        {"prompt": "<s>hello", "completion": " you"},
        {"prompt": "hello", "completion": " you"},
        {"messages": [user("q"), assistant("a")]},
    )
    for row in rows:
        tree = load_dataset(write(row), tokenizer_with_bos).trees[0]
        assert tokens_of(tree).count(bos) == 1 and tokens_of(tree)[0] == bos


def test_doubled_bos_of_a_template_is_taken_out(write):
    tokenizer = make_tokenizer("{{ bos_token }}{{ bos_token }}" + CHATML, bos=True)
    tree = load_dataset(write({"messages": [user("q"), assistant("a")]}), tokenizer).trees[0]
    assert tokens_of(tree).count(tokenizer.bos_token_id) == 1
    assert trained_texts(tokenizer, tree) == ["a" + END]


def test_tool_calls_are_trained_and_json_arguments_are_read(write):
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    row = {"messages": [user("q"), {"role": "assistant", "tool_calls": [CALL]}], "tools": [{"type": "function"}]}
    data = load_dataset(write(row), tokenizer)
    assert trained_texts(tokenizer, data.trees[0]) == ['<tool>price {"symbol": "BAC"}</tool>' + END]
    assert any("leaves the list of tools out" in note for note in data.report.notes)


def test_sharegpt_function_calls(write):
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps({"name": "price", "arguments": {"symbol": "A"}})},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "it is 12"},
    ]
    tree = load_dataset(write({"conversations": turns}), tokenizer).trees[0]
    assert trained_texts(tokenizer, tree) == ['<tool>price {"symbol": "A"}</tool>' + END, "it is 12" + END]


def test_tool_calls_that_the_template_drops_are_refused(write, tokenizer):
    row = {"messages": [user("q"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    with pytest.raises(UserError, match="leaves tool calls out"):
        load_dataset(write(row), tokenizer)


def test_templates_that_want_arguments_as_text_get_text(write):
    tokenizer = make_tokenizer(
        TOOLS_TEMPLATE.replace("c.function.arguments | tojson", "'json: ' + c.function.arguments")
    )
    row = {"messages": [user("q"), {"role": "assistant", "tool_calls": [CALL]}]}
    tree = load_dataset(write(row), tokenizer).trees[0]
    assert trained_texts(tokenizer, tree) == ['<tool>price json: {"symbol": "BAC"}</tool>' + END]


def test_columns_are_renamed(write, tokenizer):
    path = write({"question": "said", "answer": " yes"})
    with pytest.raises(UserError, match="--map question=prompt,answer=completion"):
        load_dataset(path, tokenizer)
    for columns in ("question=prompt,answer=completion", {"question": "prompt", "answer": "completion"}):
        tree = load_dataset(path, tokenizer, columns=columns).trees[0]
        assert trained_texts(tokenizer, tree) == [" yes" + END]
    for columns in ("question", "question=prompt,answer=prompt", "question=prompt,answer=completion,nothing=text"):
        with pytest.raises(UserError):
            load_dataset(path, tokenizer, columns=columns)


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"instruction": "i", "instances": [{"input": "", "output": "o"}]}, "one row for each instance"),
        ({"query": "i", "response": "o"}, "--map query=prompt,response=completion"),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "method: dpo"),
        ({"anything": 1}, "--map theirs=ours"),
    ],
)
def test_unsupported_rows_come_with_advice(row, advice, write, tokenizer):
    with pytest.raises(UserError, match=advice):
        load_dataset(write(row), tokenizer)


def test_mixed_formats_are_named_with_their_rows(write, tokenizer):
    path = write({"text": "t"}, {"text": "u"}, {"prompt": "p", "completion": "c"})
    with pytest.raises(UserError, match=r"2 of text, at .*:1, .*:2; 1 of prompt-completion, at .*:3"):
        load_dataset(path, tokenizer)


def test_conversations_need_a_chat_template(write):
    with pytest.raises(UserError, match="no chat template"):
        load_dataset(write({"messages": [user("q"), assistant("a")]}), make_tokenizer(None))


def test_row_weights_and_template_arguments(write):
    tokenizer = make_tokenizer("{{ '<s>' if flag }}" + CHATML)
    row = {"messages": [user("q"), assistant("a")], "weight": 2}
    path = write(row, {**row, "chat_template_kwargs": {"flag": True}})
    trees = load_dataset(path, tokenizer).trees
    assert [tree.weight for tree in trees] == [2.0, 2.0]
    assert trees[1].size == trees[0].size + 1
    assert load_dataset(path, tokenizer, template_kwargs={"flag": True}).trees[0].size == trees[1].size


def test_fingerprint_follows_tokens_weights_and_settings(write, tokenizer):
    rows = [{"messages": [user("q"), assistant("a"), user("r"), assistant("b")]}]
    prints = [
        load_dataset(write(*rows), tokenizer).fingerprint,
        load_dataset(write(*rows), tokenizer, train_on="last").fingerprint,
        load_dataset(write({**rows[0], "weight": 3}), tokenizer).fingerprint,
        load_dataset(write({"messages": [user("q"), assistant("c")]}), tokenizer).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert load_dataset(write(*rows), tokenizer).fingerprint == prints[0]


def test_text_rows_can_train_their_answer_alone(write, tokenizer):
    path = write({"text": "Q: what is\nA: SELECT a"}, {"text": "Q: and\nA: SELECT b\nA: c"})
    data = load_dataset(path, tokenizer, answer_after="\nA: ")
    for tree, answer in zip(data.trees, ("SELECT a", "SELECT b\nA: c"), strict=True):
        assert tokenizer.decode(tree.targets.token[:-1]).strip() == answer
        assert int(tree.targets.token[-1]) == tokenizer.eos_token_id


def test_an_answer_marker_must_be_there_and_make_sense(write, tokenizer):
    missing = write({"text": "Q: a\nA: b"}, {"text": "no answer"})
    with pytest.raises(UserError, match=r"train.jsonl:2: .*has no"):
        load_dataset(missing, tokenizer, answer_after="\nA: ")
    with pytest.raises(UserError, match="split"):
        load_dataset(missing, tokenizer, answer_after="\nA: ", overlong="split")
    other = write({"prompt": "a", "completion": "b"}, name="other.jsonl")
    with pytest.raises(UserError, match="answer_after: is for text rows"):
        load_dataset(other, tokenizer, answer_after="\nA: ")
