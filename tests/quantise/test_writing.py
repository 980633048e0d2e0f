"""Quantised checkpoints: mlx-lm and longtune load them alike, and they are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from longtune.errors import UserError
from longtune.model.packed import Format, bits_of, packed_bytes
from longtune.model.packed.loader import load_packed
from longtune.model.packed.writer import ShardWriter, with_older_keys
from longtune.model.ranks import read_sensitivities, read_widths
from longtune.quantise import Widths, find_units, uniform_widths, write_checkpoint
from longtune.quantise import writing as room
from longtune.quantise.writing import plain_size
from tests.model.packed import support

LOW, HIGH = Format("affine", 4, 32), Format("affine", 8, 32)

MODELS = {
    "llama": ({}, {}),
    "gemma2": ({}, {"tie_word_embeddings": True, "sliding_window": 64}),
    "qwen3_moe": ({"num_experts": 4, "rope_theta": 10000.0}, {"moe_intermediate_size": 32}),
}


def write(folder: Path, name: str = "llama", **options) -> tuple[Path, Widths]:
    extra, changes = MODELS[name]
    model = support.write_plain(folder / "plain", name, extra, **changes)
    units, left = find_units(model, 32)
    assert not left
    # Every other module at the high width.
    formats = {unit.name: HIGH if number % 2 else LOW for number, unit in enumerate(units)}
    widths = Widths(formats, 0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "plain")
    kl = {unit.name: {4: 0.5, 8: 0.25} for unit in units}
    write_checkpoint(
        folder / "out", model, tokenizer, units, widths, source=folder / "plain", kl=kl, about={"bits": 4}, **options
    )
    return folder / "out", widths


@pytest.mark.parametrize("name", MODELS)
def test_mlx_lm_and_longtune_give_the_same_logits(name, tmp_path):
    out, widths = write(tmp_path, name)
    model = load_packed(out, torch.float32, torch.device("cpu"))
    assert support.difference(support.logits(model), support.mlx_logits(out)) < 1e-5
    if name == "llama":
        assert {path: bits_of(model.get_submodule(path)) for path in widths.formats} == {
            path: format.bits for path, format in widths.formats.items()
        }


def test_notes_are_what_rank_policies_read(tmp_path):
    out, widths = write(tmp_path)
    assert read_widths(out / "optiq" / "metadata.json") == {
        name: format.bits for name, format in widths.formats.items()
    }
    assert read_sensitivities(out / "optiq" / "sensitivity.json") == dict.fromkeys(widths.formats, 0.5)
    assert json.loads((out / "optiq" / "metadata.json").read_text())["bits"] == 4


def test_predicted_bits_per_weight_are_those_of_the_file(tmp_path):
    model = support.write_plain(tmp_path / "plain", "llama")
    units, _ = find_units(model, 32)
    widths = uniform_widths(units, LOW, plain_size(model, units), 32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    write_checkpoint(tmp_path / "out", model, tokenizer, units, widths, source=tmp_path / "plain")
    found = load_packed(tmp_path / "out", torch.float32, torch.device("cpu"))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    # Rotary frequencies are no part of the file.
    size = packed_bytes(found) - packed_bytes(found.model.rotary_emb)
    assert widths.bits_per_weight == pytest.approx(8 * size / numbers)
    assert not (tmp_path / "out" / "optiq" / "sensitivity.json").exists()


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "ShardWriter", lambda folder: ShardWriter(folder, limit=30_000))
    out, _ = write(tmp_path)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert support.logits(load_packed(out, torch.float32, torch.device("cpu"))).isfinite().all()


def test_a_place_that_is_taken_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        write(tmp_path)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_nothing_is_left_of_a_write_that_failed(tmp_path):
    def stop(unit):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"can't be written .*No space left"):
        write(tmp_path, on_unit=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]


def test_the_older_keys_of_a_rotary_embedding():
    config = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}}
    found = with_older_keys({**config, "text_config": config})
    assert found["rope_theta"] == 5e5 and found["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert found["text_config"]["rope_theta"] == 5e5
    plain = with_older_keys({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0, "rope_type": "default"}})
    assert plain["rope_theta"] == 1.0 and plain["rope_scaling"] is None
    partial = {"rope_parameters": {"rope_theta": 2.0, "partial_rotary_factor": 0.5}}
    assert with_older_keys(partial)["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("written", "other"), [("num_local_experts", "num_experts"), ("num_experts", "num_local_experts")]
)
def test_a_key_with_two_names_is_there_under_both(written, other):
    kind = {"num_local_experts": "qwen3_moe", "num_experts": "olmoe"}[written]
    assert with_older_keys({"model_type": kind, written: 4})[other] == 4
    assert with_older_keys({"model_type": kind, written: 4, other: 8})[other] == 8
    assert other not in with_older_keys({"model_type": "llama", written: 4})
