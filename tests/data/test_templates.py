"""Real chat templates, those that the installed TRL carries: trained spans are the answers and their end, or the row
is refused with the reason."""

# ruff: noqa: RUF001 (DeepSeek writes its tokens with wide bars)

import re
from pathlib import Path

import pytest

from longtune.data import load_dataset
from longtune.errors import UserError
from tests.data.support import assistant, make_tokenizer, trained_texts, user

trl = pytest.importorskip("trl")

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma": "<eos>",
    "diffusion_gemma": "<eos>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llava": "</s>",
    "phi": "<|endoftext|>",
    "smolvlm": "<end_of_utterance>",
}
SPECIAL = re.compile(r"<\|[^<>|\s']{1,40}\|>|<｜[^<>\s']{1,40}｜>|<[a-z]+_of_[a-z]+>|<\|?turn\|?>|<eos>|\[/?INST\]")

# What may be trained beside an answer's text: tokens of the template, and the words of its headers.
BESIDE = re.compile(r"(?:<[^<>]*>|\s|assistant|final|to=user)*")
# The answer is a reply in a context that the model never sees: the generation prompt opens a thought, the rendering
# of the answer has none.
INCONSISTENT = {"deepseek_r1_distill", "deepseekv3"} | {
    f"nemotron_3_{size}" for size in ("5_lightning", "nano", "super", "ultra")
}
TALK = [user("first question"), assistant("hello you"), user("second question"), assistant("bye now")]
EXACT = {
    "qwen2_5": ["hello you<|im_end|>", "bye now<|im_end|>"],
    "llama3": ["hello you<|eot_id|>", "bye now<|eot_id|>"],
    "gemma3": ["hello you<end_of_turn>", "bye now<end_of_turn>"],
    "phi3": ["hello you<|end|>", "bye now<|end|>"],
    "cohere2": ["hello you<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "bye now<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
    "gptoss": ["<|channel|>final<|message|>bye now<|return|>", "<|channel|>final<|message|>hello you<|return|>"],
    "deepseekv3_training": [
        "<｜Assistant｜>hello you<｜end▁of▁sentence｜>",
        "<｜Assistant｜>bye now<｜end▁of▁sentence｜>",
    ],
    "glm4moe_training": ["\n<think></think>\nhello you<|user|>", "\n<think></think>\nbye now<|user|>"],
    "lfm2": ["hello you<|im_end|>", "bye now<|im_end|>"],
    "qwen3_instruct_2507": ["hello you<|im_end|>", "bye now<|im_end|>"],
    "smolvlm": [" hello you<end_of_utterance>", " bye now<end_of_utterance>"],
}


def load(name, write):
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    eos = next((token for family, token in EOS.items() if name.startswith(family)), "<|im_end|>")
    tokenizer = make_tokenizer(source, eos=eos, extra=tuple(sorted({*SPECIAL.findall(source), eos})))
    tokenizer.bos_token = "<s>"
    return tokenizer, load_dataset(write({"messages": TALK}), tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_trained_spans_are_the_answers_and_their_ends(name, write):
    if name in INCONSISTENT:
        with pytest.raises(UserError, match="not how the template renders it afterwards"):
            load(name, write)
        return
    tokenizer, data = load(name, write)
    tree = data.trees[0]
    # A branch begins a new run of columns, so answers are told apart by their ends.
    text = "".join(trained_texts(tokenizer, tree))
    assert "question" not in text
    for answer in ("hello you", "bye now"):
        assert text.count(answer) == 1
        after = text[text.index(answer) + len(answer) :]
        assert re.match(r"<[^<>]+>|</s>", after), f"{answer!r} has no end: {after[:20]!r}"
    for part in re.split("hello you|bye now", text):
        assert BESIDE.fullmatch(part), f"trained beside the answers: {part!r}"


@pytest.mark.parametrize("name", [name for name in EXACT if name in NAMES])
def test_exact_spans(name, write):
    tokenizer, data = load(name, write)
    texts = trained_texts(tokenizer, data.trees[0])
    if name == "llama3":
        # The tiny tokenizer merges the header's newlines with nothing; only the answer's own text is compared.
        texts = [text.lstrip("\n") for text in texts]
    assert texts == EXACT[name]


def test_at_least_ten_templates_were_there():
    assert len(NAMES) >= 10
