"""The demo run, on a tiny random model: its files, its report, and what it refuses."""

import json

import pytest

import longtune.demo
from longtune.demo import before_after
from longtune.demo.tickets import FIELDS, tickets
from longtune.errors import UserError
from longtune.model.adapters import load_adapter
from longtune.model.loading import load_model
from tiny_run import write_model


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The demo on a model of some thousand weights, with few rows and short answers."""
    name = str(write_model(tmp_path / "model"))
    for constant, value in (("EMBEDDED", name), ("TICKETS", 10), ("ORDINARY", 4), ("HELD_OUT", 5)):
        monkeypatch.setattr(before_after, constant, value)
    monkeypatch.setattr(before_after, "_LONGEST_TICKET", 6)
    monkeypatch.setattr(before_after, "_LONGEST_ANSWER", 6)
    return name


def test_the_demo_is_a_run_like_any_other(small, tmp_path):
    events, lines = [], []
    output = tmp_path / "run"
    result = longtune.demo.run(output=output, steps=2, seed=3, on_event=events.append, write=lines.append)
    assert [event["event"] for event in events if event["event"] in ("meta", "train", "done")] == [
        "meta",
        "train",
        "train",
        "done",
    ]
    rows = [json.loads(line) for line in (output / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 14 and sum(row["messages"][0]["role"] == "system" for row in rows) == 10
    held_out = [json.loads(line) for line in (output / "data" / "test.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["content"] for row in held_out] == [t.answer for t in tickets(5, seed=3, held_out=True)]
    assert result["held_out"] == 5 and len(result["examples"]) == 3
    for score in (result["before"], result["after"]):
        assert score.keys() == {"exact", "valid_json", "ordinary_right", "ordinary_tickets"}
        assert all(0 <= share <= 1 for share in score.values())
    assert json.loads(json.dumps(result)) == result
    assert load_adapter(load_model(small, dtype="float32").model, result["adapter"])
    report = "\n".join(lines)
    assert result["adapter"] in report and f"longtune chat {output} --system" in report


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_done(small, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    lines = []
    with pytest.raises(UserError, match="already holds a run"):
        longtune.demo.run(output=tmp_path / "run", write=lines.append)
    assert not lines


def test_an_unknown_method_is_refused(tmp_path):
    with pytest.raises(UserError, match="use sft, dpo or orpo"):
        longtune.demo.run(method="kto", output=tmp_path / "run")


def test_scores_count_what_they_say():
    held_out = tickets(4, seed=0, held_out=True)
    wrong = json.dumps(dict.fromkeys(FIELDS))
    asked = before_after.Asked(
        [held_out[0].answer, wrong, "no", held_out[3].answer],
        ["Paris"] + ['{"name"'] * 2 + [""] * (len(before_after.CHECK) - 3),
    )
    score = before_after._score(asked, held_out)
    assert (score["exact"], score["valid_json"]) == (0.5, 0.75)
    assert score["ordinary_right"] == 1 / len(before_after.CHECK)
    assert score["ordinary_tickets"] == 2 / len(before_after.CHECK)
