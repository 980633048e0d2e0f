"""A tiny byte-level tokenizer with a ChatML-like template, trained on generated text; and readings of a tree."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>")


def make_tokenizer(
    template: str | None = CHATML, *, bos: bool = False, eos: str = "<|im_end|>", extra: tuple[str, ...] = ()
) -> Any:
    """A byte-level BPE tokenizer of 400 ids and a few special tokens; `bos` makes it add <s> by itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = [f"word{i} the answer is {i * 7} and so on, said user {i}.\n\n" for i in range(60)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(words, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*SPECIALS, *extra)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token=eos, pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def trained_texts(tokenizer: Any, tree: Any, answer: int = 0) -> list[str]:
    """Decoded runs of neighbouring targets of one answer."""
    targets = tree.targets
    runs: list[list[int]] = []
    before = None
    for column, token, of in zip(targets.hidden.tolist(), targets.token.tolist(), targets.answer.tolist(), strict=True):
        if of != answer:
            before = None
            continue
        if before is None or column != before + 1:
            runs.append([])
        runs[-1].append(token)
        before = column
    return [tokenizer.decode(run) for run in runs]


def tokens_of(tree: Any) -> list[int]:
    return [token for node in tree.nodes for token in node.tokens.tolist()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}
