"""Measurements that survive a kill, and are never mixed with others."""

from __future__ import annotations

import json

import pytest

from longtune.errors import UserError
from longtune.quantise.figures import figures_for
from longtune.quantise.journal import Journal

ABOUT = {"model": "m", "data": "d", "group size": 64}


def filled(file) -> bytes:
    journal = Journal(file, ABOUT)
    journal.add("a", 4, 0.5)
    journal.add("b", 4, 0.25)
    journal.close()
    return file.read_bytes()


def read(file) -> dict:
    journal = Journal(file, ABOUT)
    journal.close()
    return journal.figures


def test_figures_come_back(tmp_path):
    filled(tmp_path / "j")
    journal = Journal(tmp_path / "j", ABOUT)
    assert journal.figures == {("a", 4): 0.5, ("b", 4): 0.25}
    journal.add("c", 8, 1e-9)
    journal.close()
    assert read(tmp_path / "j")["c", 8] == 1e-9


def test_a_kill_at_any_byte_loses_one_figure_at_most(tmp_path):
    whole = filled(tmp_path / "whole")
    lines = whole.splitlines(keepends=True)
    # Every place around the ends of lines, and some others.
    ends = [sum(map(len, lines[: n + 1])) for n in range(3)]
    places = {0, 5, len(whole), *(end + d for end in ends for d in (-1, 0, 1, 9) if end + d <= len(whole))}
    for size in sorted(places):
        file = tmp_path / f"cut-{size}"
        file.write_bytes(whole[:size])
        journal = Journal(file, ABOUT)
        assert len(journal.figures) == max(0, sum(size >= end for end in ends) - 1)
        journal.add("c", 4, 1.0)
        journal.close()
        assert ("c", 4) in read(file)


def test_another_measurement_is_refused(tmp_path):
    filled(tmp_path / "j")
    with pytest.raises(UserError, match="with another data, seed") as found:
        Journal(tmp_path / "j", {**ABOUT, "data": "other", "seed": 1})
    assert "remove it" in found.value.problems[0].fix


@pytest.mark.parametrize("line", ["nonsense\n", "[]\n", '{"module": "a"}\n'])
def test_a_file_that_is_no_journal_is_refused(line, tmp_path):
    (tmp_path / "j").write_text(json.dumps({"about": ABOUT}) + "\n" + line)
    with pytest.raises(UserError, match="line 2 is no measurement"):
        Journal(tmp_path / "j", ABOUT)
    (tmp_path / "j").write_text(line)
    with pytest.raises(UserError, match="line 1 is no measurement"):
        Journal(tmp_path / "j", ABOUT)


def test_a_finished_journal_goes_away(tmp_path):
    journal = Journal(tmp_path / "j", ABOUT)
    journal.remove()
    assert not (tmp_path / "j").exists()


def entries(*values):
    return [{"layer_name": name, "sensitivities": figures} for name, figures in values]


def test_figures_are_matched_by_name(tmp_path):
    file = tmp_path / "s.json"
    file.write_text(
        json.dumps(
            entries(
                ("language_model.model.layers.0.mlp.up_proj", {"4": 0.5, "8": 0.1}),
                ("model.embed_tokens", {"4": 2}),
                ("vision.layers.9.mlp.up_proj", {"4": 9}),
            )
        )
    )
    names = ["model.embed_tokens", "model.layers.0.mlp.up_proj", "lm_head"]
    found = figures_for(names, None, file)
    assert found == {"model.layers.0.mlp.up_proj": {4: 0.5, 8: 0.1}, "model.embed_tokens": {4: 2.0}}
    (tmp_path / "optiq").mkdir()
    file.rename(tmp_path / "optiq" / "sensitivity.json")
    assert figures_for(names, tmp_path) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "can't be read"),
        ("{}", "entry 0: has no layer_name"),
        ('[{"layer_name": "x"}]', "entry 0: has no layer_name"),
        ('[{"layer_name": "x", "sensitivities": {"four": 1}}]', "entry 0: has no layer_name"),
        ('[{"layer_name": "x", "sensitivities": {"4": -1}}]', "-1.0 is no divergence"),
        ('[{"layer_name": "x", "sensitivities": {"4": NaN}}]', "nan is no divergence"),
        ("[]", "names no module of this model"),
    ],
)
def test_files_of_figures_that_can_not_be_used(text, reason, tmp_path):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UserError, match=reason):
        figures_for(["a"], None, tmp_path / "s.json")


def test_no_figures_at_all(tmp_path):
    with pytest.raises(UserError, match="comes without figures"):
        figures_for(["a"], tmp_path)
