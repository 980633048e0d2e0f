"""Every command that writes: a place where nothing can be made, and a disk that is full, are said in plain words."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longtune.cli import app
from longtune.model.embedded import find_gguf
from tests.model.packed import support
from tests.tiny_run import write_config, write_rows

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits of files are asked of a POSIX system")

WRITERS = ("init", "check", "report", "sensitivity", "quantise", "export", "train", "demo")
FOLDERS = ("quantise", "export", "train", "demo")
"""Those that make a folder; the others make a file."""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A model, rows, and a finished run."""
    folder = tmp_path_factory.mktemp("outputs")
    support.write_plain(folder / "model", "llama")
    write_rows(folder / "rows")
    write_config(folder / "run.yaml", folder / "model", folder / "rows", folder / "run", steps=1, eval_every=0)
    code, output = call("train", folder / "run.yaml")
    assert code == 0, output
    return folder


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def command(name: str, here: Path, out: Path) -> list[object]:
    rows = here / "rows" / "train.jsonl"
    commands = {
        "init": [rows, "--file", out, "--force"],
        "check": [here / "run.yaml", "--html", out],
        "report": [here / "run", "--out", out],
        "sensitivity": [here / "model", "--data", rows, "--group-size", 32, "--tokens", 20, "--out", out],
        "quantise": [here / "model", "--uniform", "--group-size", 32, "--out", out],
        "export": [here / "run", "--out", out],
        "train": [here / "run.yaml", "--set", f"output={out}"],
        "demo": ["--output", out],
    }
    return [name, *commands[name]]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A system that lets no file grow further, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def is_refused(answer: tuple[int, str], out: Path) -> None:
    code, output = answer
    assert code == 2 and "Traceback" not in output, output
    assert f"{out}" in output.replace("\n", "") and "fix: " in output, output


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_below_a_file_is_refused(name, here, tmp_path):
    (tmp_path / "file").write_text("kept")
    out = tmp_path / "file" / "x" / "y.html"
    is_refused(call(*command(name, here, out)), out)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that even root can't write to is in /proc")
@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_takes_no_files_is_refused(name, here):
    out = Path("/proc/nothing.html")
    is_refused(call(*command(name, here, out)), out)


@pytest.mark.parametrize("name", WRITERS)
def test_something_of_another_kind_is_not_replaced(name, here, tmp_path):
    out = tmp_path / "there.html"
    if name in FOLDERS:
        out.write_text("kept")
    else:
        (out / "kept").mkdir(parents=True)
    is_refused(call(*command(name, here, out)), out)
    assert out.is_file() or (out / "kept").is_dir()
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "demo"])
def test_a_full_disk_is_said_and_leaves_no_half_of_an_output(name, here, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTUNE_CACHE", str(here / "cache"))
    out = tmp_path / "new" / "x.html"
    if name in ("sensitivity", "train"):  # Their tokens are kept, so that the output is what finds no room.
        code, output = call(*command(name, here, tmp_path.parent / f"{name}.html"))
        assert code == 0, output
    with files_of_at_most(100):
        answer = call(*command(name, here, out))
    is_refused(answer, tmp_path / "new")
    assert "File too large" in answer[1] or "os error 27" in answer[1], answer[1]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {".lock", "metrics.jsonl", "x.html.partial"}, left
    # What it says is true: with room, the same command works.
    code, output = call(*command(name, here, out))
    assert code == 0, output


def test_a_full_disk_below_the_tokens_is_said(here, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "cache"))
    with files_of_at_most(100):
        code, output = call(*command("train", here, tmp_path / "run"))
    assert code == 2 and "tokens can't be kept there" in output and "Traceback" not in output, output
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_run_that_found_no_room_is_started_again_as_it_says(here, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTUNE_CACHE", str(here / "cache"))
    assert call(*command("train", here, tmp_path / "first"))[0] == 0
    out = tmp_path / "run"
    for size, fix in ((100, "start it again"), (1500, "start it again with --resume")):
        with files_of_at_most(size):
            code, output = call(*command("train", here, out))
        assert code == 2 and output.rstrip().endswith(fix), output
    code, output = call("train", out, "--resume")
    assert code == 0, output


def test_a_cache_that_can_not_be_written_is_said(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="the embedded model is a GGUF file")
    if find_gguf() is None:
        pytest.skip("needs the package of the embedded model")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path / "file"))
    code, output = call("plan", "--tokens", 100)
    assert code == 2 and "can't be written (File exists)" in output and "LONGTUNE_CACHE=FOLDER" in output, output


def test_folders_above_a_config_are_made(here, tmp_path):
    out = tmp_path / "a" / "b" / "x.yaml"
    assert call(*command("init", here, out))[0] == 0 and out.is_file()


def test_a_config_goes_through_a_link_and_to_a_device(here, tmp_path):
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    assert call(*command("init", here, tmp_path / "link.yaml"))[0] == 0
    assert (tmp_path / "link.yaml").is_symlink() and "model:" in (tmp_path / "real.yaml").read_text()
    assert call(*command("init", here, Path("/dev/null")))[0] == 0 and not Path("/dev/null").is_file()
    code, output = call(*command("init", here, Path("/dev/full")))
    assert code == 2 and "No space left on device" in output


@pytest.mark.parametrize(("size", "fix"), [(40, "use 32"), (1000, "use 32")])
@pytest.mark.parametrize("name", ["quantise", "sensitivity"])
def test_a_group_size_that_divides_no_row_is_refused(name, size, fix, here, tmp_path):
    arguments = command(name, here, tmp_path / "x")
    arguments[arguments.index("--group-size") + 1] = size
    code, output = call(*arguments)
    assert code == 2 and f"group size {size}: divides the rows of no module (of 64, 96 numbers)" in output, output
    assert fix in output and not list(tmp_path.iterdir())
