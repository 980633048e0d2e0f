"""What `longtune check` finds: everything a run would refuse, and what it would train without a word."""

from __future__ import annotations

import random

import pytest

from longtune.data import Batcher, load_dataset
from longtune.data.check import check_data, estimate, has_errors
from longtune.data.pipeline import Settings
from longtune.data.run_length import run_length
from longtune.errors import UserError
from tests.data.support import CHATML, assistant, make_tokenizer, user
from tests.data.test_properties import GOOD, mutate


def chat(question, answer):
    return {"messages": [user(question), assistant(answer)]}


def check(path, tokenizer, valid=None, show=0, **settings):
    sources = {"train": path} | ({"valid": valid} if valid else {})
    return check_data(sources, tokenizer, Settings(**settings), show=show, workers=1)


def kinds(split, level):
    return {finding.kind: finding.count for finding in split.findings if finding.level == level}


def test_good_rows_have_no_findings_and_the_figures_of_the_run(write, tokenizer):
    path = write(*(chat("q " * n, "a " * n) for n in range(1, 21)))
    (split,) = check(path, tokenizer)
    data = load_dataset(path, tokenizer)
    assert not split.findings
    assert split.report.as_dict() == data.report.as_dict()
    assert split.sizes.tolist() == data.trees.sizes
    assert split.lengths["whole"]["max"] == data.report.longest
    assert split.lengths["answer"]["mean"] * 20 == data.report.trained
    prompts = [example.sequences[0].spans[0].start for example in data.examples]
    assert split.lengths["prompt"]["p50"] == sorted(prompts)[10]
    assert "rejected" not in split.lengths


def test_every_kind_of_error_comes_with_its_first_three_places(write, tokenizer):
    rows = [chat("q", "a"), "{", *[chat("q", "")] * 5, {"messages": [user("q")]}, {"question": "q", "answer": "a"}]
    path = write(*rows)
    (split,) = check(path, tokenizer)
    assert kinds(split, "error") == {
        "malformed line": 1,
        "empty answer": 5,
        "no trained token": 1,
        "unknown format": 1,
    }
    places = {finding.kind: [problem.place for problem in finding.problems] for finding in split.findings}
    assert places["empty answer"] == [f"{path}:{line}" for line in (3, 4, 5)]
    assert places["malformed line"] == [f"{path}:2"]
    assert has_errors([split])


def test_bad_rows_that_a_run_drops_are_still_named(write, tokenizer):
    (split,) = check(write(chat("q", "a"), chat("q", "")), tokenizer, bad_rows="drop")
    assert kinds(split, "warning") == {"empty answer": 1}
    assert not has_errors([split])
    (split,) = check(write(chat("q", "")), tokenizer, bad_rows="drop")
    assert "no rows" in kinds(split, "error")


def test_equal_answers_of_pairs_are_errors(write, tokenizer):
    rows = [{"prompt": "p", "chosen": " a", "rejected": " a"}, {"prompt": "p", "chosen": " a", "rejected": " b c"}]
    (split,) = check(write(*rows), tokenizer, method="dpo")
    assert kinds(split, "error") == {"equal answers": 1}
    assert split.lengths["rejected"]["max"] > split.lengths["answer"]["max"]


def test_train_and_valid_are_checked_together_and_leaks_are_found(write, tokenizer, tmp_path):
    train = write(chat("a", "b"), chat("c", "d"), chat("a", "b"), chat("a", "b"))
    valid = write(chat("e", ""), chat("c", "d"), name="valid.jsonl")
    splits = check(train, tokenizer, valid)
    assert kinds(splits[0], "warning") == {"duplicate row": 2}
    (duplicate,) = splits[0].findings
    assert [p.place for p in duplicate.problems] == [f"{train}:3", f"{train}:4"]
    assert all(f"{train}:1" in p.reason for p in duplicate.problems)
    assert kinds(splits[1], "error") == {"empty answer": 1}
    assert kinds(splits[1], "warning") == {"row of train in valid": 1}
    missing = check(str(tmp_path / "none.jsonl"), tokenizer, valid)
    assert kinds(missing[0], "error") == {"unreadable": 1} and kinds(missing[1], "error") == {"empty answer": 1}


def test_doubled_special_tokens_and_special_tokens_in_content(write, tokenizer):
    (split,) = check(write(chat("q", "a<|im_end|>"), chat("q", "one <|im_end|> two"), chat("q", "a")), tokenizer)
    assert kinds(split, "warning") == {"doubled special token": 1, "special token in content": 2}
    bos = make_tokenizer("{{ bos_token }}{{ bos_token }}" + CHATML, bos=True)
    (split,) = check(write(chat("q", "a")), bos)
    assert not split.findings, "the doubled BOS of a template is taken out"
    (split,) = check(write({"text": "<s><s>rendered"}), bos)
    assert "special token in text" in kinds(split, "warning")


def test_turns_without_an_end_are_found(write):
    open_ended = CHATML.replace("{{ m['content'] }}<|im_end|>\n", "{{ m['content'] }}\n").replace(
        "{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}"
    )
    (split,) = check(write(chat("q", "answer one")), make_tokenizer(open_ended))
    assert kinds(split, "warning") == {"no end after the answer": 1}
    (finding,) = split.findings
    assert "answer one" in finding.problems[0].reason


def test_the_limit_says_what_it_cuts(write, tokenizer):
    path = write(*(chat("q " * 20, "a " * n) for n in (1, 20, 40)))
    whole = [example.longest for example in load_dataset(path, tokenizer).examples]
    limit = whole[0] + 2
    expected = {"rows": 2, "tokens": sum(whole[1:]) - 2 * limit}
    for overlong, level in (("error", {"longer than max_tokens": 2}), ("truncate_right", {}), ("drop", {})):
        (split,) = check(path, tokenizer, max_tokens=limit, overlong=overlong)
        assert {name: split.limit[name] for name in expected} == expected
        assert kinds(split, "error") == level
    assert split.report.dropped == {"longer than max_tokens": 2}


def test_tokens_that_the_template_adds(write, tokenizer):
    (split,) = check(write(chat("q", "a")), tokenizer)
    contents = len(tokenizer("q").input_ids) + len(tokenizer("a").input_ids)
    assert split.template == {
        "rows": 1,
        "added": split.lengths["whole"]["max"] - contents,
        "share": pytest.approx(1 - contents / split.lengths["whole"]["max"]),
    }


def test_shown_rows_say_which_tokens_are_trained(write, tokenizer):
    (split,) = check(write(chat("hello", "there"), chat("x", "y")), tokenizer, show=1)
    (row,) = split.shown
    (runs,) = row.sequences
    assert "".join(run.text for run in runs if run.trained) == "there<|im_end|>"
    assert "".join(run.text for run in runs) == tokenizer.apply_chat_template(
        chat("hello", "there")["messages"], tokenize=False
    )
    (split,) = check(write({"prompt": "p", "chosen": " a", "rejected": " b"}), tokenizer, show=3, method="dpo")
    texts = ["".join(run.text for run in runs if run.trained) for runs in split.shown[0].sequences]
    assert texts == [" a<|im_end|>", " b<|im_end|>"]


def test_the_estimate_is_the_runs_own_count(write, tokenizer):
    (split,) = check(write(*(chat("q", "a " * n) for n in range(1, 8))), tokenizer)
    batches = Batcher(split, batch_size=2, longest_first=4)
    found = estimate(batches, run_length(batches, steps=None, epochs=2.0, accumulate=2))
    assert (found["steps"], found["micro_batches"], found["epochs"]) == (4, 8, 2)
    assert found["tokens"] == 2 * split.report.tokens and found["rows"] == 14
    assert found["largest_batch"] == sum(sorted(split.sizes.tolist())[-2:])
    assert estimate(batches, run_length(batches, steps=3, epochs=None, accumulate=2))["steps"] == 3


def test_weights_are_a_runs(write, tokenizer):
    paths = [write(*(chat(f"{name} {n}", "a") for n in range(7)), name=f"{name}.jsonl") for name in "ab"]
    sources = [{"path": path, "weight": weight} for path, weight in zip(paths, (1, 0.3), strict=True)]
    (split,) = check_data({"train": sources}, tokenizer, Settings(), workers=1)
    data = load_dataset(sources, tokenizer)
    assert split.shares == data.shares
    assert Batcher(split, seed=3).plan(5) == Batcher(data, seed=3).plan(5)


def test_a_source_of_which_no_row_is_left_is_named(write, tokenizer):
    good, bad = write(chat("q", "a")), write(chat("q " * 99, ""), chat("q " * 99, "a"), name="bad.jsonl")
    settings = Settings(bad_rows="drop", overlong="drop", max_tokens=40)
    (split,) = check_data({"train": [good, bad]}, tokenizer, settings, workers=1)
    (finding,) = [finding for finding in split.findings if finding.level == "error"]
    (problem,) = finding.problems
    assert finding.kind == "no rows" and problem.place == bad
    assert "1 empty answer" in problem.reason and "1 longer than max_tokens" in problem.reason


@pytest.mark.parametrize(
    ("limit", "overlong", "count"),
    [(None, "error", 2), (30, "error", 0), (30, "drop", 0), (30, "truncate_right", 0), (60, "truncate_left", 2)],
)
def test_rows_beyond_the_models_positions_are_a_warning(limit, overlong, count, write, tokenizer):
    path = write(chat("q", "a"), chat("q", "a " * 90), chat("q", "a"), chat("q", "a " * 99))
    settings = Settings(max_tokens=limit, overlong=overlong)
    (split,) = check_data({"train": path}, tokenizer, settings, workers=1, positions=40)
    assert kinds(split, "warning").get("beyond the model's positions", 0) == count
    if count:
        (finding,) = [finding for finding in split.findings if finding.kind == "beyond the model's positions"]
        assert [problem.place for problem in finding.problems] == [f"{path}:2", f"{path}:4"]
        assert "40" in finding.problems[0].reason and "train.max_tokens to 40" in finding.problems[0].fix


def test_forked_processes_find_the_same(write, tokenizer, monkeypatch):
    monkeypatch.setattr("longtune.data.passes.ALONE", 1)
    rows = [chat(f"q {i % 700}", "a " * (i % 9)) for i in range(1000)]
    path = write(*rows)
    found = [check_data({"train": path}, tokenizer, Settings(), show=2, workers=workers) for workers in (1, 2)]
    one, two = (split.as_dict() for (split,) in found)
    # Each process looks at the template's share of its own first rows.
    assert one.pop("template").keys() == two.pop("template").keys()
    assert one == two


def test_settings_that_make_no_sense_are_refused(write, tokenizer):
    with pytest.raises(UserError, match="train_on"):
        check(write(chat("q", "a")), tokenizer, train_on="nobody")


def test_answer_after_is_for_text_rows(write, tokenizer):
    (split,) = check(write(chat("q", "a")), tokenizer, answer_after="A:")
    assert "answer_after" in kinds(split, "error")


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_mutated_rows_are_errors_or_right_and_never_crash(method, tmp_path, tokenizer):
    import json

    rng = random.Random(f"check {method}")
    for number in range(10):
        rows = [mutate(rng.choice(GOOD), rng) for _ in range(50)]
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
        (split,) = check(str(path), tokenizer, method=method, show=2)
        errors = sum(count for kind, count in kinds(split, "error").items() if kind != "mixed formats")
        assert split.report.rows == 50 == split.report.kept + errors


def test_mutated_files_are_errors_or_right_and_never_crash(tmp_path, tokenizer):
    import json

    rng = random.Random("check files")
    whole = "\n".join(json.dumps(row) for row in GOOD[:2] * 3).encode()
    for number in range(100):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        path = tmp_path / f"{number}{rng.choice(['.jsonl', '.json', '.csv', '.parquet', '.jsonl.gz'])}"
        path.write_bytes(bytes(content[: rng.randint(0, len(content))]))
        (split,) = check(str(path), tokenizer)
        assert split.report.rows == split.report.kept or kinds(split, "error")
