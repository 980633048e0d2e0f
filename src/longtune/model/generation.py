"""Generating text: batches of prompts for evaluation, one streamed answer for chat.

transformers generates; here are the prompts, the padding, and every token that ends an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

Messages = Sequence[Mapping[str, Any]]


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    messages_or_prompts: Sequence[Messages | str | Sequence[int]],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    temperature: float = 0.0,
    seed: int | None = None,
    stream: Callable[[str], None] | None = None,
    cut_off: Callable[[int], object] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Answers to several prompts, in their order, without special tokens.

    Args:
        model: a causal LM, with or without adapters.
        messages_or_prompts: each a conversation (rendered with the chat template, up to where the answer begins), or
            a text or token ids that are continued as they are.
        batch_size: prompts of one forward; they are batched by length, so that little is padded.
        temperature: 0 takes the likeliest token each time.
        seed: seed of sampling; None draws from the global generator.
        stream: called with pieces of the answer as they come; for a single prompt.
        cut_off: called with the index of each prompt whose answer reached `max_new_tokens` before its end.
        template_kwargs: passed to the chat template.
    """
    if stream is not None and len(messages_or_prompts) != 1:
        raise ValueError("stream takes one prompt at a time")
    prompts = [encode_prompt(tokenizer, prompt, template_kwargs) for prompt in messages_or_prompts]
    stops = stop_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=cast(int, pad),
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else 1.0,
        top_p=1.0,
        top_k=0 if temperature > 0 else 50,
    )
    answers = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    device = model.get_input_embeddings().weight.device
    training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=None if device.type == "cuda" else [], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                tokens_BT, mask_BT = _pad_left([prompts[index] for index in batch], cast(int, pad))
                out_BT = model.generate(
                    input_ids=tokens_BT.to(device),
                    attention_mask=mask_BT.to(device),
                    generation_config=settings,
                    streamer=_Pieces(tokenizer, stream) if stream is not None else None,
                )
                for index, row in zip(batch, out_BT[:, tokens_BT.shape[1] :].tolist(), strict=True):
                    answer = _until(row, stops)
                    answers[index] = cast(str, tokenizer.decode(answer, skip_special_tokens=True))
                    if cut_off is not None and len(answer) == max_new_tokens:
                        cut_off(index)
    finally:
        model.train(training)
    return answers


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages | str | Sequence[int],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt: a conversation up to where the answer begins, a plain text, or token ids as they are."""
    if prompt and isinstance(prompt[0], int):
        return list(cast(Sequence[int], prompt))
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]  # pyright: ignore[reportReturnType]
    text = tokenizer.apply_chat_template(
        [dict(message) for message in cast(Messages, prompt)],
        tokenize=False,
        add_generation_prompt=True,
        **(template_kwargs or {}),
    )
    # The template writes every special token itself.
    return tokenizer(cast(str, text), add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def stop_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends an answer: of the generation config, of the tokenizer, and the template's end of turn."""
    stops: list[int] = []
    configured = model.generation_config.eos_token_id
    stops += configured if isinstance(configured, list) else [configured]
    stops.append(cast(int, tokenizer.eos_token_id))
    stops.append(cast(int, _end_of_turn(tokenizer)))
    return list(dict.fromkeys(token for token in stops if token is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes right after an assistant's text, if it writes one."""
    if not tokenizer.chat_template:
        return None
    answer = "yes"
    turns = [{"role": "user", "content": "no"}, {"role": "assistant", "content": answer}]
    text = cast(str, tokenizer.apply_chat_template(turns, tokenize=False))
    after = text[text.rindex(answer) + len(answer) :].lstrip() if answer in text else ""
    ids = cast(list[int], tokenizer(after, add_special_tokens=False)["input_ids"]) if after else []
    special = {*tokenizer.all_special_ids, *cast(Any, tokenizer).get_added_vocab().values()}
    return ids[0] if ids and ids[0] in special else None


def _pad_left(prompts: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and attention mask, int64 [B, T]: padding on the left, so that all prompts end in one column."""
    longest = max(len(prompt) for prompt in prompts)
    tokens_BT = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    mask_BT = torch.zeros_like(tokens_BT)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask_BT[row, longest - len(prompt) :] = 1
    return tokens_BT, mask_BT


def _until(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """The tokens before the first stop."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in stops), len(tokens))]


class _Pieces(TextStreamer):
    """Hands text to a function as soon as its characters are whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]):
        super().__init__(cast(Any, tokenizer), skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._write(text)
