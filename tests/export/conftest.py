"""A tiny model folder and adapters for it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtune.model.adapters import add_lora, save_adapter
from longtune.model.loading import load_model
from tests.tiny_run import write_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """even; uneven ranks without and with rsLoRA; some modules alone."""
    folder = tmp_path_factory.mktemp("adapters")
    settings = {
        "even": {},
        "uneven": {"rank_policy": "by_kl"},
        "rslora": {"rank_policy": "by_kl", "rslora": True},
        "some": {"targets": ["q_proj", "down_proj"], "layers": "last 1"},
    }
    for seed, (name, chosen) in enumerate(settings.items()):
        model = load_model(str(base), dtype="float32", device="cpu").model
        kl = {path: float(number % 7 + 1) for number, (path, _) in enumerate(model.named_modules())}
        if "rank_policy" in chosen:
            chosen = {**chosen, "kl": kl}
        made = add_lora(model, rank=4, alpha=6, seed=seed, **chosen)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in made.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        save_adapter(made, folder / name)
    return {name: folder / name for name in settings}
