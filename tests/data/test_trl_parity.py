"""Token ids and masks equal TRL's own preparation, for rows that both accept."""

import random
from pathlib import Path

import pytest

from longtune.data import load_dataset
from tests.data.support import CHATML, CHATML_GENERATION, assistant, make_tokenizer, user

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

# Not our warnings: TRL passes its own arguments through names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["the", "answer", "is", "word7", "and so on,", "said\n\n", "naïve", "日本", " lead", "trail ", "user 3.", "🙂"]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def text(rng: random.Random, least: int = 1) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, 9)))


def tiny_model(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )


def sft_rows(rows, tokenizer, tmp_path, **settings):
    config = trl.SFTConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_length=None, bf16=False, disable_tqdm=True, **settings
    )
    trainer = trl.SFTTrainer(
        tiny_model(tokenizer), config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    return trainer.train_dataset


def ours(tree):
    """(ids, labels with -100 where untrained) of a tree of one node."""
    (node,) = tree.nodes
    labels = [-100] * node.tokens.numel()
    for column, token in zip(tree.targets.hidden.tolist(), tree.targets.token.tolist(), strict=True):
        labels[column + 1] = token
    return node.tokens.tolist(), labels


def theirs(row):
    labels = list(row["labels"])
    labels[0] = -100  # nothing predicts the first token; their loss shifts it away
    return list(row["input_ids"]), labels


def compare(rows, tokenizer, write, tmp_path, train_on="assistant", **settings):
    trees = load_dataset(write(*rows), tokenizer, train_on=train_on).trees
    prepared = sft_rows(rows, tokenizer, tmp_path, **settings)
    assert len(trees) == len(prepared) == len(rows)
    for tree, row in zip(trees, prepared, strict=True):
        assert ours(tree) == theirs(row)


def talks(rng, count, turns=3):
    return [
        {"messages": [part for _ in range(rng.randint(1, turns)) for part in (user(text(rng)), assistant(text(rng)))]}
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "qwen2_5", "gemma3", "phi3", "glm4moe"])
def test_assistant_only_loss(name, write, tmp_path):
    if name == "chatml":
        template = CHATML_GENERATION
    else:
        file = TEMPLATES / f"{name}_training.jinja"
        if not file.exists():
            pytest.skip(f"{file.name} is not in the installed TRL")
        template = file.read_text()
    tokenizer = make_tokenizer(template, extra=("<|eot_id|>", "<end_of_turn>", "<|user|>", "<|endoftext|>"))
    tokenizer.bos_token = "<s>"
    compare(talks(random.Random(name), 12), tokenizer, write, tmp_path, assistant_only_loss=True)


@pytest.mark.parametrize("bos", [False, True])
def test_completion_only_loss_of_strings(bos, write, tmp_path):
    rng = random.Random(1)
    rows = [{"prompt": text(rng), "completion": text(rng)} for _ in range(20)]
    compare(rows, make_tokenizer(bos=bos), write, tmp_path, completion_only_loss=True)


def test_completion_only_loss_of_messages(write, tmp_path):
    rng = random.Random(2)
    rows = [{"prompt": [user(text(rng))], "completion": [assistant(text(rng))]} for _ in range(20)]
    compare(rows, make_tokenizer(), write, tmp_path, completion_only_loss=True)


def test_prompt_that_renders_differently_before_its_answer(write, tmp_path):
    rng = random.Random(3)
    rows = [{"prompt": [user(text(rng))], "completion": [assistant(text(rng))]} for _ in range(10)]
    tokenizer = make_tokenizer(CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%"))
    compare(rows, tokenizer, write, tmp_path, completion_only_loss=True)


def test_text_rows(write, tmp_path):
    rng = random.Random(4)
    compare([{"text": text(rng, 2)} for _ in range(20)], make_tokenizer(bos=True), write, tmp_path)


def dpo_rows(rows, tokenizer, tmp_path):
    config = trl.DPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_length=None, bf16=False, disable_tqdm=True
    )
    trainer = trl.DPOTrainer(
        tiny_model(tokenizer),
        tiny_model(tokenizer),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return trainer.train_dataset


def branches(tree):
    """(whole sequence, trained tokens) of both answers."""
    found = []
    for answer in (0, 1):
        mask = tree.targets.answer == answer
        leaves = [i for i in range(len(tree.nodes)) if all(node.parent != i for node in tree.nodes)]
        node = leaves[answer]
        path: list[int] = []
        while node >= 0:
            path = tree.nodes[node].tokens.tolist() + path
            node = tree.nodes[node].parent
        found.append((path, tree.targets.token[mask].tolist()))
    return found


@pytest.mark.parametrize("kind", ["strings", "messages", "implicit messages", "implicit strings"])
@pytest.mark.parametrize("sharing", ["tree", "off"])
def test_preference_rows(kind, sharing, write, tmp_path):
    rng = random.Random(kind)
    rows = []
    while len(rows) < 12:
        prompt, chosen, rejected = text(rng), "yes " + text(rng), "no " + text(rng)
        if kind == "strings":
            rows.append({"prompt": prompt + ": ", "chosen": chosen, "rejected": rejected})
        elif kind == "implicit strings":
            rows.append({"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"})
        else:
            row = {"prompt": [user(prompt)], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]}
            if "implicit" in kind:
                row = {side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")}
            rows.append(row)
    tokenizer = make_tokenizer()
    trees = load_dataset(write(*rows), tokenizer, method="dpo", prompt_sharing=sharing).trees
    for tree, row in zip(trees, dpo_rows(rows, tokenizer, tmp_path), strict=True):
        for (path, trained), side in zip(branches(tree), ("chosen_ids", "rejected_ids"), strict=True):
            assert path == row["prompt_ids"] + row[side]
            assert trained == row[side]
