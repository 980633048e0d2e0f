"""Following a growing file: every complete line once, whatever the writer does in between."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtune.watch import tail
from longtune.watch.tail import Tail


def added(follower: Tail) -> tuple[list[bytes], int]:
    """New lines, and how often the reader was told to start anew."""
    restarts = []
    lines = list(follower.lines(lambda: restarts.append(1)))
    return lines, len(restarts)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_whatever_the_pieces_every_complete_line_comes_once(tmp_path_factory, content, cuts):
    file = tmp_path_factory.mktemp("tail") / "log"
    follower, seen = Tail(file), []
    places = sorted({0, *(min(cut, len(content)) for cut in cuts), len(content)})
    with file.open("ab", buffering=0) as out:
        for start, end in pairwise(places):
            out.write(content[start:end])
            lines, restarts = added(follower)
            assert not restarts
            seen += lines
    assert seen == content.split(b"\n")[:-1]


def test_a_half_line_waits_for_its_end(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b'{"a":1}\n{"b"')
    follower = Tail(file)
    assert added(follower) == ([b'{"a":1}'], 0)
    assert added(follower) == ([], 0)
    with file.open("ab") as out:
        out.write(b":2}\n")
    assert added(follower) == ([b'{"b":2}'], 0)


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path):
    file = tmp_path / "log"
    follower = Tail(file)
    assert added(follower) == ([], 0)
    file.write_bytes(b"a\n")
    assert added(follower) == ([b"a"], 0)


@pytest.mark.parametrize(
    "content", [b"x\n", b"", b"other\nlines\nthat\nare\nlonger\n"], ids=["shorter", "empty", "longer and different"]
)
@pytest.mark.parametrize("way", ["in place", "by renaming"])
def test_a_file_that_was_replaced_is_read_anew(tmp_path, content, way):
    file = tmp_path / "log"
    file.write_bytes(b"one\ntwo\nthree\n")
    follower = Tail(file)
    added(follower)
    if way == "in place":
        file.write_bytes(content)
    else:
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(file)
    os.utime(file, ns=(1, 1))
    assert added(follower) == (content.split(b"\n")[:-1], 1)


def test_a_file_that_goes_away_and_comes_back_is_read_anew(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"a\n")
    follower = Tail(file)
    added(follower)
    file.unlink()
    assert added(follower) == ([], 1)
    assert added(follower) == ([], 0)
    file.write_bytes(b"a\n")
    assert added(follower) == ([b"a"], 0)


def test_lines_longer_than_a_block_are_whole_and_endless_ones_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "BLOCK", 16)
    monkeypatch.setattr(tail, "LONGEST", 64)
    file = tmp_path / "log"
    file.write_bytes(b"a" * 50 + b"\n" + b"b" * 500)
    follower = Tail(file)
    assert added(follower) == ([b"a" * 50], 0)
    with file.open("ab") as out:
        out.write(b"b" * 200 + b"\nnext\n")
    assert added(follower) == ([b"next"], 0)


def test_an_unchanged_file_is_not_opened(tmp_path, monkeypatch):
    file = tmp_path / "log"
    file.write_bytes(b"a\n")
    follower = Tail(file)
    added(follower)
    monkeypatch.setattr(type(file), "open", lambda *_: pytest.fail("opened"))
    assert added(follower) == ([], 0)


def test_a_file_that_cannot_be_opened_has_no_lines_and_is_tried_again(tmp_path, monkeypatch):
    file = tmp_path / "log"
    file.write_bytes(b"a\n")
    follower = Tail(file)

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(type(file), "open", refused)
        assert added(follower) == ([], 0)
    assert added(follower) == ([b"a"], 0)
