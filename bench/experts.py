"""A step with LoRA on stacked experts beside PEFT's own wrapper: peak memory and seconds on a CPU.

One layer of a mixture, random weights, LoRA r=16 on its experts alone, plain forward and backward in both: what differs
is how W + s B A is computed.

    python bench/experts.py --out bench/results/DATE-cpu-experts.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from common import RANK, compared, machine, race, report

TOKENS = 1024
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def make(way: str, experts: str) -> tuple[Callable[[], float], object]:
    """A step of one way."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from longtune.model.adapters import add_lora

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=experts)
    if way == "longtune":
        wrapped: Any = add_lora(model, rank=RANK, alpha=2 * RANK, targets=["experts"])
    else:
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=STACKS)
        wrapped = get_peft_model(model.requires_grad_(False), lora)
    tokens = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        wrapped.zero_grad()
        return float(loss)

    return step, wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["longtune", "peft"])
    parser.add_argument("--experts", choices=["eager", "grouped_mm"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.way:
        report(args.way, lambda: make(args.way, args.experts), repeats=3)
        return
    result: dict[str, Any] = {"machine": machine(), "tokens": TOKENS, "stacks_mib": 96}
    for experts in ("eager", "grouped_mm"):
        found = race(__file__, ("peft", "longtune"), args.rounds, ["--experts", experts])
        result[experts] = {"runs": found, **compared(found, "longtune", "peft")}
    print(json.dumps({key: result[key] for key in ("eager", "grouped_mm")}, indent=1))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
