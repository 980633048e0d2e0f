"""Shared by the benchmarks: model shapes, preference rows, fresh processes, and how seconds and peaks are measured.

Heavy imports stay inside the functions: a process that measures its own memory imports only what it runs.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from longtune.tree import Tree

SHAPES = {
    "llama-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "tiny": dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
RANK = 16
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def use_liger() -> None:
    """Liger's norm, rotary and GLU in every llama that is built from now on in this process; the losses stay."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)


def build(shape: str, device: str, **changes: Any) -> torch.nn.Module:
    """A frozen llama of a shape, with `changes`, and random bf16 weights."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **{**SHAPES[shape], **changes}, max_position_embeddings=1 << 20, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.requires_grad_(False)


def with_checkpointing(model: torch.nn.Module, rank: int = RANK) -> torch.nn.Module:
    """The model with PEFT's LoRA on every linear of the layers and transformers' gradient checkpointing."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped.train()
    return wrapped


def chunked_loss(hidden_TH: torch.Tensor, tokens_T: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy, in checkpointed chunks of 4,096 tokens."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def loss_of(hidden: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, head_VH).float()
        return torch.nn.functional.cross_entropy(logits, label, reduction="sum")

    hidden_TH, labels = hidden_TH[:-1], tokens_T[1:]
    loss = torch.zeros((), device=tokens_T.device)
    for start in range(0, hidden_TH.shape[0], 4096):
        part = slice(start, start + 4096)
        loss = loss + checkpoint(loss_of, hidden_TH[part], labels[part], use_reentrant=False)
    return loss / hidden_TH.shape[0]


def preference_tree(prompt: int, answer: int, vocab: int, *, shared: bool, prompt_targets: bool = True) -> Tree:
    """A random prompt with two answers of the same length: on one tree, or as two whole sequences.

    Both have the same tokens and targets: every answer token, and the prompt's own on the chosen side.
    """
    import torch

    from longtune.tree import PROMPT, Node, Targets, Tree

    generator = torch.Generator().manual_seed(0)
    first, chosen, rejected = (torch.randint(10, vocab, (n,), generator=generator) for n in (prompt, answer, answer))
    if shared:
        nodes = (Node(first), Node(chosen, 0), Node(rejected, 0))
        starts = (prompt, prompt + answer)
        lasts = (prompt - 1, prompt - 1)
    else:
        nodes = (Node(torch.cat([first, chosen])), Node(torch.cat([first, rejected])))
        starts = (prompt, 2 * prompt + answer)
        lasts = (prompt - 1, 2 * prompt + answer - 1)
    hidden, token, number = [torch.arange(prompt - 1)], [first[1:]], [torch.full((prompt - 1,), PROMPT)]
    if not prompt_targets:
        hidden, token, number = [], [], []
    for index, (start, last, ids) in enumerate(zip(starts, lasts, (chosen, rejected), strict=True)):
        hidden.append(torch.cat([torch.tensor([last]), torch.arange(start, start + answer - 1)]))
        token.append(ids)
        number.append(torch.full((answer,), index))
    targets = Targets.of(torch.cat(hidden), torch.cat(token), None, torch.cat(number))
    # As if cached: near what random weights give, so that no loss saturates.
    guess = -answer * torch.log(torch.tensor(float(vocab))).item()
    return Tree(nodes, targets, reference=(guess, guess))


def measure(step: Callable[[], float], cuda: bool, repeats: int) -> dict[str, float]:
    """Seconds and device peak of a step; the first of several runs is told apart, as it also warms up."""
    import torch

    seconds, loss = [], 0.0
    for _ in range(repeats):
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    return {"seconds": min(seconds), "first_seconds": seconds[0], "peak_gib": peak, "loss": loss}


def machine() -> dict[str, object]:
    """What a result was measured on and with."""
    import peft
    import torch
    import transformers

    return {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def status(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def report(way: str, make: Callable[[], tuple[Callable[[], float], object]], repeats: int) -> None:
    """In a fresh process: seconds, and the peak resident set of the steps less the one with everything loaded."""
    warnings.simplefilter("ignore")
    step, _kept = make()
    gc.collect()
    loaded = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    loss = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"way": way, "loss": loss, "seconds": seconds, "mib": status("VmHWM") - loaded}))


def race(script: str, ways: tuple[str, ...], rounds: int, arguments: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What `script --way WAY` reports, each time in a process of its own, the ways taken in turn."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            command = [sys.executable, script, "--way", way, *arguments]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[way].append(json.loads(output.splitlines()[-1]))
            print(found[way][-1], flush=True)
    return found


def compared(found: dict[str, list[dict[str, Any]]], ours: str, theirs: str) -> dict[str, Any]:
    """Largest memory and least seconds of each way, and their ratios."""
    mib = {way: max(run["mib"] for run in runs) for way, runs in found.items()}
    seconds = {way: min(s for run in runs for s in run["seconds"]) for way, runs in found.items()}
    return {
        "mib_above_model": mib,
        "seconds": seconds,
        "memory_ratio": mib[ours] / mib[theirs],
        "time_ratio": seconds[ours] / seconds[theirs],
    }
