"""Files of every kind are read; what is wrong is named by file and line, all at once."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from longtune.data import load_dataset, split_sources
from longtune.errors import UserError
from tests.data.support import assistant, user

ROWS = [{"text": f"row number {i}, naïve 日本"} for i in range(7)]


def write_all(folder: Path) -> dict[str, Path]:
    import pyarrow
    from pyarrow import parquet

    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    paths = {
        name: folder / name
        for name in ("a.jsonl", "a.json", "data.json", "lines.json", "a.parquet", "a.csv", "a.jsonl.gz", "bom.jsonl")
    }
    paths["a.jsonl"].write_text(lines + "\n\n", encoding="utf-8")
    paths["lines.json"].write_text(lines, encoding="utf-8")
    paths["bom.jsonl"].write_text("\ufeff" + lines, encoding="utf-8")
    paths["a.json"].write_text(json.dumps(ROWS), encoding="utf-8")
    paths["data.json"].write_text(json.dumps({"data": ROWS}), encoding="utf-8")
    paths["a.jsonl.gz"].write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), paths["a.parquet"])
    with paths["a.csv"].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(ROWS)
    return paths


def test_every_file_kind_gives_the_same_examples(tmp_path, tokenizer):
    prints = {name: load_dataset(str(path), tokenizer).fingerprint for name, path in write_all(tmp_path).items()}
    assert len(set(prints.values())) == 1, prints


def test_zst_is_read_or_its_package_named(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl.zst"
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError:
        path.write_bytes(b"x")
        with pytest.raises(UserError, match="zstandard"):
            load_dataset(str(path), tokenizer)
        return
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "hello there"}\n'))
    assert len(load_dataset(str(path), tokenizer)) == 1


def test_rows_know_their_place(write, tokenizer):
    path = write({"text": "first one"}, "", {"text": "third one"})
    assert [tree.row for tree in load_dataset(path, tokenizer).trees] == [f"{path}:1", f"{path}:3"]


def test_malformed_lines_are_named_three_times_then_counted(write, tokenizer):
    path = write(
        {"text": "fine"}, *['{"text": '] * 5, '["no object"]', "\ud83d".encode("utf-16-le", "surrogatepass").hex()
    )
    with pytest.raises(UserError) as caught:
        load_dataset(path, tokenizer)
    problems = caught.value.problems
    assert [problem.place for problem in problems] == [f"{path}:2", f"{path}:3", f"{path}:4", path]
    assert "7 in all" in problems[-1].reason
    assert caught.value.exit_code == 2


def test_all_kinds_of_problems_come_at_once(write, tokenizer):
    path = write(
        {"text": "fine"},
        "{oops",
        {"messages": [user("only a question")]},
        {"messages": [user("q"), assistant("")]},
        {"foo": 1},
        {"text": 5},
    )
    with pytest.raises(UserError) as caught:
        load_dataset(path, tokenizer)
    text = str(caught.value)
    for part in (
        ":2: not valid JSON",
        "no assistant turn",
        "message 2 (assistant) is empty",
        "columns foo",
        "`text` must",
    ):
        assert part in text
    assert "rows of several formats" in text


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_empty_file_is_an_error(tmp_path, tokenizer, content):
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(UserError, match="no rows"):
        load_dataset(str(path), tokenizer)


def test_missing_paths_are_named_and_never_asked_of_the_hub(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError) as caught:
        load_dataset(["data/nothing", "gone.jsonl", "data", "notes.txt", {"path": "x.jsonl", "weight": -1}], tokenizer)
    assert len(caught.value.problems) == 5


def test_broken_files_are_user_errors(tmp_path, tokenizer):
    for name, content in {
        "a.jsonl.gz": b"not gzip",
        "a.parquet": b"not parquet",
        "a.json": b"[1, 2",
        "b.json": b"5",
        "a.csv": b"text\n\xff\xfe\n",
        "c.jsonl": b"\xff\xfe\x00\n",
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=name):
            load_dataset(str(path), tokenizer)


def test_csv_lines_with_too_many_fields_are_named_and_long_fields_read(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"a, b",c\nx,y,z\n')
    with pytest.raises(UserError, match=r"a.csv:3: 3 fields"):
        load_dataset(str(path), tokenizer)
    limit = csv.field_size_limit()
    path.write_text("text\n" + "long " * 40_000 + "\n")
    assert load_dataset(str(path), tokenizer).report.tokens > 40_000
    assert csv.field_size_limit() == limit


def test_csv_columns_may_hold_json(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["messages", "weight"], [json.dumps([user("q"), assistant("a")]), "0.5"]])
    assert load_dataset(str(path), tokenizer).trees[0].weight == 0.5


def test_folder_gives_its_train_split_and_names_its_validation(tmp_path, write, tokenizer):
    train = write({"text": "train row"}, name="train.jsonl")
    valid = write({"text": "valid row"}, name="validation.jsonl")
    write({"text": "test row"}, name="test.jsonl")
    assert len(load_dataset(str(tmp_path), tokenizer)) == 1
    assert split_sources(str(tmp_path)) == (str(tmp_path), valid)
    assert split_sources(train) == (train, None)
    assert split_sources([{"path": str(tmp_path), "weight": 2}, train])[1] == [valid]
    write({"text": "twice"}, name="train.json")
    with pytest.raises(UserError, match="several files"):
        load_dataset(str(tmp_path), tokenizer)


def test_shards_are_read_in_order(tmp_path, write, tokenizer):
    for i in (1, 0):
        write({"text": f"shard {i}"}, name=f"train-0000{i}-of-00002.jsonl")
    rows = [tree.row for tree in load_dataset(str(tmp_path), tokenizer).trees]
    assert [Path(row).name for row in rows] == ["train-00000-of-00002.jsonl:1", "train-00001-of-00002.jsonl:1"]


def test_bad_rows_can_be_dropped_and_are_counted(write, tokenizer):
    path = write({"text": "fine"}, "{oops", {"text": ""})
    report = load_dataset(path, tokenizer, bad_rows="drop").report
    assert (report.rows, report.kept, dict(report.dropped)) == (3, 1, {"malformed line": 1, "empty text": 1})
    assert any("malformed" in line for line in report.lines())


def test_settings_are_checked_together(write, tokenizer):
    with pytest.raises(UserError) as caught:
        load_dataset(write({"text": "x"}), tokenizer, method="ppo", train_on="some", overlong="cut", max_tokens=1)
    assert len(caught.value.problems) == 4
    with pytest.raises(UserError, match="no meaning under dpo"):
        load_dataset(write({"text": "x"}), tokenizer, method="dpo", train_on="last")


def test_unknown_hub_names_are_user_errors(tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def load(name, split):
        raise ConnectionError(f"offline: {name} {split}")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(UserError, match="offline: someone/some-data test"):
        load_dataset("someone/some-data:test", tokenizer)


def test_hub_rows_are_read_with_their_place(tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: ROWS)
    data = load_dataset("someone/some-data", tokenizer)
    assert [tree.row for tree in data.trees][:2] == ["someone/some-data:row 1", "someone/some-data:row 2"]
