"""Tokens kept on disk: the same data set, mapped; found again for the same data alone; whole or not there."""

from __future__ import annotations

import json
import multiprocessing
import os

import numpy as np
import pytest

from longtune.data import Batcher, load_dataset, store
from longtune.data.fingerprint import tokens_key
from longtune.data.passes import BATCH
from longtune.data.places import Places
from longtune.errors import UserError
from tests.data.support import assistant, make_tokenizer, user

TALKS = [{"messages": [user(f"question {i}"), assistant(f"answer {i} " * (i % 5 + 1))]} for i in range(40)]
PAIRS = [{"prompt": [user(f"q {i}")], "chosen": [assistant("yes")], "rejected": [assistant("no")]} for i in range(9)]


def described(data):
    def tree(tree):
        nodes = [(node.tokens.tolist(), node.parent) for node in tree.nodes]
        targets = tree.targets
        return tree.row, tree.weight, nodes, *(c.tolist() for c in (targets.hidden, targets.token, targets.answer))

    return [tree(t) for t in data.trees], data.trees.sizes, data.branched, data.fingerprint, data.shares


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (TALKS, {}),
        (PAIRS, {"method": "dpo"}),
        (PAIRS, {"method": "dpo", "prompt_sharing": "off"}),
        ([{"text": "word " * 90, "weight": 0.3}, {"text": "end"}], {"max_tokens": 30, "overlong": "split"}),
    ],
)
def test_what_is_mapped_is_what_is_held_in_memory(rows, settings, write, tokenizer, tmp_path):
    sources = [{"path": write(*rows), "weight": 2.5}]
    held = load_dataset(sources, tokenizer, **settings)
    built = load_dataset(sources, tokenizer, cache=tmp_path / "cache", **settings)
    found = load_dataset(sources, tokenizer, cache=tmp_path / "cache", **settings)
    assert described(held) == described(built) == described(found)
    assert held.report.as_dict() == built.report.as_dict() == found.report.as_dict()
    assert held.report.lines() == found.report.lines()
    assert not isinstance(found.examples, list)
    assert [t.row for t in Batcher(found, tokens_per_batch=50).next()] == [
        t.row for t in Batcher(held, tokens_per_batch=50).next()
    ]


def test_the_second_run_reads_no_row(write, tokenizer, tmp_path, monkeypatch):
    path = write(*TALKS)
    load_dataset(path, tokenizer, cache=tmp_path / "cache")
    monkeypatch.setattr("longtune.data.passes.read", lambda _: pytest.fail("rows were read again"))
    told = []
    assert len(load_dataset(path, tokenizer, cache=tmp_path / "cache", progress=told.append)) == len(TALKS)
    assert told == [len(TALKS)]


def test_other_data_settings_or_templates_are_read_anew(write, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    path = write(*TALKS)
    load_dataset(path, tokenizer, cache=cache)
    load_dataset(path, tokenizer, cache=cache, train_on="all")
    load_dataset(path, make_tokenizer("X" + str(tokenizer.chat_template)), cache=cache)
    state = os.stat(path)
    write(*TALKS[:-1], {"messages": [user("question 39"), assistant("anders 39 " * 5)]})
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert os.stat(path).st_size == state.st_size
    changed = load_dataset(path, tokenizer, cache=cache)
    assert "anders" in tokenizer.decode(changed.examples[-1].sequences[0].ids)
    assert len(list(cache.iterdir())) == 4


def test_damaged_folders_are_built_anew(write, tokenizer, tmp_path):
    path, cache = write(*TALKS), tmp_path / "cache"
    truth = described(load_dataset(path, tokenizer, cache=cache))
    for name in ("meta.json", "ids.bin", "spans.bin"):
        (folder,) = cache.iterdir()
        (folder / name).write_bytes((folder / name).read_bytes()[:-3])
        assert store.open_stored(folder) is None
        assert described(load_dataset(path, tokenizer, cache=cache)) == truth
        assert [entry.name for entry in cache.iterdir()] == [folder.name]
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"layout": -1}))
    assert described(load_dataset(path, tokenizer, cache=cache)) == truth


def test_what_nobody_uses_goes_away(write, tokenizer, tmp_path):
    cache, path = tmp_path / "cache", write(*TALKS)
    load_dataset(path, tokenizer, cache=cache)
    load_dataset(path, tokenizer, cache=cache, train_on="all")
    (cache / ".building-1").mkdir()
    (cache / "mine.txt").write_text("not ours")
    for file in cache.rglob("*"):
        os.utime(file, (1, 1))
    load_dataset(path, tokenizer, cache=cache)
    load_dataset(path, tokenizer, cache=cache, train_on="last")
    kept = [entry for entry in cache.iterdir() if entry.is_dir()]
    assert len(kept) == 2 and not (cache / ".building-1").exists() and (cache / "mine.txt").exists()


def test_data_with_errors_leaves_nothing_behind(write, tokenizer, tmp_path):
    with pytest.raises(UserError, match="not valid JSON"):
        load_dataset(write(*TALKS, "{"), tokenizer, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(write, tokenizer, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="LONGTUNE_CACHE"):
        load_dataset(write(*TALKS), tokenizer, cache=tmp_path / "cache")


def test_hub_data_is_mapped_and_kept_for_this_process_alone(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: [{"text": "a"}, {"text": "b"}])
    monkeypatch.chdir(tmp_path)
    data = load_dataset("owner/name", tokenizer, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert [tree.row for tree in data.trees] == ["owner/name:row 1", "owner/name:row 2"]


def _build(path, cache, queue, barrier):
    tokenizer = make_tokenizer()
    barrier.wait(60)
    data = load_dataset(path, tokenizer, cache=cache, workers=1)
    queue.put((data.fingerprint, len(data)))


def test_two_runs_may_build_it_at_once(write, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(2)
    path, cache = write(*TALKS), tmp_path / "cache"
    runs = [context.Process(target=_build, args=(path, cache, queue, barrier)) for _ in range(2)]
    for run in runs:
        run.start()
    found = [queue.get(timeout=120) for _ in runs]
    for run in runs:
        run.join(60)
    assert found[0] == found[1]
    assert len(list(cache.iterdir())) == 1


def test_the_loser_of_a_race_takes_the_winners_folder(write, tokenizer, tmp_path):
    example = load_dataset(write(*TALKS), tokenizer).examples[0]
    with store.Writer(tmp_path / "cache") as first, store.Writer(tmp_path / "cache") as second:
        for writer in (first, second):
            writer.extend([example])
        one, two = first.finish({"who": "first"}, "key"), second.finish({"who": "second"}, "key")
    assert one.meta["who"] == two.meta["who"] == "first"
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["key"]


def test_large_files_are_known_by_size_and_time(write, tokenizer, monkeypatch):
    from longtune.data.pipeline import Settings
    from longtune.data.sources import resolve

    monkeypatch.setattr("longtune.data.fingerprint._READ_WHOLE", 10)
    path = write(*TALKS)
    before = tokens_key(resolve(path), tokenizer, Settings(), 1)
    assert before == tokens_key(resolve(path), tokenizer, Settings(), 1)
    os.utime(path, ns=(1, 1))
    assert before != tokens_key(resolve(path), tokenizer, Settings(), 1)


def test_places_come_back_as_they_were():
    places = Places()
    given = ["a/b.jsonl:12", "a/b.jsonl:row 3", "x.jsonl:7[2]", "", "12", "no number", "zero:007", "[3]", "n[x]:1\n2"]
    for place in given:
        places.append(place)
    assert [places[i] for i in range(len(places))] == given


def test_forked_processes_make_the_same_in_the_same_order(write, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("longtune.data.passes.ALONE", 1)
    rows = [TALKS[i % 40] for i in range(4 * BATCH + 7)]
    rows[700] = {"messages": []}
    rows[100] = rows[900] = {"text": "other"}
    path = write(*rows)
    texts = []
    for workers in (1, 2):
        with pytest.raises(UserError) as caught:
            load_dataset(path, tokenizer, workers=workers)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert ":701: " in texts[0] and "2 of text" in texts[0]
    told = []
    data = [load_dataset(path, tokenizer, bad_rows="drop", workers=w, progress=told.append) for w in (1, 2)]
    assert described(data[0]) == described(data[1])
    assert data[0].report.as_dict() == data[1].report.as_dict()
    assert told.count(len(rows)) == 2


def test_ids_of_an_example_are_a_view_of_the_file(write, tokenizer, tmp_path):
    data = load_dataset(write(*TALKS), tokenizer, cache=tmp_path / "cache")
    ids = data.examples[3].sequences[0].ids
    assert type(ids) is np.ndarray and ids.base is not None and not ids.flags.writeable
