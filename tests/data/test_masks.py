"""Which tokens of a conversation are trained, under every kind of template."""

import pytest

from longtune.data import load_dataset
from longtune.errors import UserError
from longtune.tree import Forest
from tests.data.support import CHATML, CHATML_GENERATION, assistant, make_tokenizer, tokens_of, trained_texts, user

END = "<|im_end|>"
TALK = [user("one"), assistant("first answer"), user("two"), assistant("second answer")]

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load(messages, write, tokenizer, **settings):
    return load_dataset(write({"messages": messages}), tokenizer, **settings)


@pytest.mark.parametrize("template", [CHATML, CHATML_GENERATION], ids=["prefix", "generation"])
def test_train_on(template, write):
    tokenizer = make_tokenizer(template)
    talk = [{"role": "system", "content": "be kind"}, *TALK]
    both = ["first answer" + END, "second answer" + END]
    for train_on, expected in {"assistant": both, "last": both[1:], "completion": both[1:]}.items():
        assert trained_texts(tokenizer, load(talk, write, tokenizer, train_on=train_on).trees[0]) == expected
    tree = load(talk, write, tokenizer, train_on="all").trees[0]
    assert len(tree.targets) == tree.size - 1


@pytest.mark.parametrize("template", [CHATML, CHATML_GENERATION], ids=["prefix", "generation"])
def test_message_weights(template, write):
    tokenizer = make_tokenizer(template)
    talk = [user("one"), assistant("first answer", weight=0), user("two"), assistant("second answer", weight=0.5)]
    tree = load(talk, write, tokenizer).trees[0]
    assert trained_texts(tokenizer, tree) == ["second answer" + END]
    assert set(tree.targets.weight.tolist()) == {0.5}
    talk[1] = assistant("first answer", loss=False)
    assert trained_texts(tokenizer, load(talk, write, tokenizer).trees[0]) == ["second answer" + END]


def test_masks_are_never_empty(write, tokenizer):
    """A template without `{% generation %}` doesn't give an all-zero mask, and a row without answers is refused."""
    assert len(load(TALK, write, tokenizer).trees[0].targets)
    with pytest.raises(UserError, match="no token is trained"):
        load([user("q")], write, tokenizer)
    with pytest.raises(UserError, match="weight 0"):
        load([user("q"), assistant("a", weight=0)], write, tokenizer)
    with pytest.raises(UserError, match=r"marks nothing of message 2 with \{% generation %\}"):
        load([user("q"), assistant("a")], write, make_tokenizer(CHATML + "{% generation %}{% endgeneration %}"))


def test_inconsistent_template_is_an_error_that_says_so(write):
    tokenizer = make_tokenizer(CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%"))
    with pytest.raises(UserError, match="not how the template renders it afterwards"):
        load(TALK, write, tokenizer)


def test_history_rewritten_by_the_template_trains_every_turn_in_its_own_context(write):
    tokenizer = make_tokenizer(THINKING)
    data = load(TALK, write, tokenizer)
    tree = data.trees[0]
    assert [node.parent for node in tree.nodes] == [-1, 0, 0]
    answers = trained_texts(tokenizer, tree)
    assert "<think></think>second answer" + END in "".join(answers)
    assert "first answer" + END in "".join(answers) and "".join(answers).count("first answer") == 1
    assert any("rewrites history" in note for note in data.report.notes)
    assert data.branched and not load(TALK[:2], write, tokenizer).branched
    apart = load(TALK, write, tokenizer, prompt_sharing="off").trees[0]
    assert [node.parent for node in apart.nodes] == [-1, -1]
    assert sorted(apart.targets.token.tolist()) == sorted(tree.targets.token.tolist())
    contexts = {context_of(tree, tokenizer, t) for t in range(len(tree.targets))}
    prompt = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert any(context == prompt for context in contexts)
    assert any(context.endswith("<|im_start|>assistant\n") and "first answer" in context for context in contexts)


def context_of(tree, tokenizer, target: int) -> str:
    """Decoded tokens that a target is predicted from."""
    forest = Forest([tree])
    column = int(tree.targets.hidden[target])
    node, start = 0, 0
    while start + tree.nodes[node].tokens.numel() <= column:
        start += tree.nodes[node].tokens.numel()
        node += 1
    ids = [t for low, high in forest.path(node) for t in range(low, high) if t <= column]
    return tokenizer.decode(forest.tokens[ids])


def test_only_the_end_of_turn_token_ends_an_answer(write):
    """Phi closes the text with EOS, Command A writes two tokens, gpt-oss another token at the end."""
    phi = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = make_tokenizer(phi)
    assert trained_texts(tokenizer, load(TALK, write, tokenizer).trees[0]) == [
        "first answer<|end|>",
        "second answer<|end|>",
    ]
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", "<|end|><|im_end|>"))
    assert trained_texts(tokenizer, load(TALK, write, tokenizer).trees[0]) == [
        "first answer<|end|><|im_end|>",
        "second answer<|end|><|im_end|>",
    ]
    final = CHATML.replace("<|im_end|>", "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}")
    tree = load(TALK, write, make_tokenizer(final)).trees[0]
    assert len(tree.nodes) == 3
    assert "".join(trained_texts(tokenizer, tree)).count("<|return|>") == 2


def test_turns_without_an_end_get_eos(write):
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(plain)
    tree = load(TALK, write, tokenizer).trees[0]
    assert sum(token == tokenizer.eos_token_id for token in tree.targets.token.tolist()) == 2
    single = load(TALK[:2], write, tokenizer).trees[0]
    assert tokens_of(single)[-1] == tokenizer.eos_token_id


def test_answer_begins_where_prompt_and_whole_stop_agreeing(write, tokenizer):
    """'Hel' + 'lo' encodes as one token: it belongs to the answer, and the merge is reported."""
    data = load_dataset(write({"prompt": "the an", "completion": "swer is"}), tokenizer)
    tree = data.trees[0]
    alone = tokenizer("the an")["input_ids"]
    whole = tokens_of(tree)
    common = next(i for i, (a, b) in enumerate(zip([*alone, -1], whole, strict=False)) if a != b)
    assert tree.targets.hidden[0].item() + 1 == common < len(alone)
    assert any("merge" in note for note in data.report.notes)


def test_template_that_ignores_the_generation_prompt_trains_its_header(write):
    tokenizer = make_tokenizer(CHATML.partition("{% if add_generation_prompt %}")[0])
    assert trained_texts(tokenizer, load(TALK, write, tokenizer).trees[0]) == [
        "<|im_start|>assistant\nfirst answer<|im_end|>",
        "<|im_start|>assistant\nsecond answer<|im_end|>",
    ]


def test_template_errors_are_the_rows_problem(write):
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        load(TALK, write, tokenizer)


def test_content_in_parts_for_templates_that_want_it(write):
    tokenizer = make_tokenizer(
        CHATML.replace("{{ m['content'] }}", "{% for p in m.content %}{{ p['text'] }}{% endfor %}")
    )
    assert trained_texts(tokenizer, load(TALK[:2], write, tokenizer).trees[0]) == ["first answer" + END]


def test_text_left_out_by_the_template_is_noted(write):
    tokenizer = make_tokenizer(CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}"))
    data = load([user("q"), assistant("<think>hm</think>a")], write, tokenizer)
    assert any("leaves out text" in note for note in data.report.notes)


def test_tokenizer_without_eos_is_refused_where_eos_is_needed(write):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    for row in ({"text": "some text"}, {"prompt": "p", "completion": "c"}):
        with pytest.raises(UserError, match="would never stop"):
            load_dataset(write(row), tokenizer)


def test_generation_block_without_the_end_is_noted(write):
    template = CHATML_GENERATION.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    data = load(TALK, write, make_tokenizer(template))
    assert any("may never stop" in note for note in data.report.notes)
    assert not load(TALK, write, make_tokenizer(CHATML_GENERATION)).report.notes
