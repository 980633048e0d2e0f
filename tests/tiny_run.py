"""Shared by the tests of runs: a tiny model folder with a tokenizer, rows for it, and a run's config."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longtune import watch
from tests.support import tiny_model

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random llama of some thousand weights whose tokens are bytes."""
    vocabulary = {
        token: number for number, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    model = tiny_model("llama", torch.float32, seed=seed, vocab_size=len(vocabulary), num_hidden_layers=2)
    model.save_pretrained(folder)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, train: int = 12, valid: int = 5, seed: int = 0) -> Path:
    """A data folder of short conversations of uneven length."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("valid", valid)):
        lines = []
        for _ in range(count):
            words = ["".join(draw.choices("abcdef", k=draw.randint(2, 6))) for _ in range(draw.randint(1, 5))]
            turns = [("user", " ".join(words)), ("assistant", " ".join(reversed(words)))]
            lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_pairs(folder: Path, train: int = 10, valid: int = 4, seed: int = 0) -> Path:
    """A data folder of preference rows: the reversed words are preferred to others."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("valid", valid)):
        lines = []
        for _ in range(count):
            asked, other = ("".join(draw.choices("abcdef", k=draw.randint(2, 7))) for _ in range(2))
            turns = {"prompt": ("user", asked), "chosen": ("assistant", asked[::-1]), "rejected": ("assistant", other)}
            lines.append(json.dumps({key: [{"role": r, "content": text}] for key, (r, text) in turns.items()}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_config(file: Path, model: Path, data: Path, output: Path, **train: object) -> Path:
    """A run of a few steps with dropout, accumulation, packing and shuffling on."""
    settings = {
        "steps": 6,
        "learning_rate": 0.01,
        "batch_size": 2,
        "accumulate": 2,
        "eval_every": 3,
        "save_every": 2,
        **train,
    }
    values = {
        "model": str(model),
        "data": str(data),
        "output": str(output),
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "dtype": "float32",
        "device": "cpu",
        "memory": {"chunk_tokens": 16},
        "train": settings,
    }
    file.write_text(yaml.safe_dump(values))
    return file


def read_events(run: Path) -> list[dict]:
    return watch.read_events(run / "metrics.jsonl")


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {event["step"]: event["loss"] for event in read_events(run) if event["event"] == "train"}


def adapter_bytes(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def tensors(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "adapter" / "adapter_model.safetensors")
