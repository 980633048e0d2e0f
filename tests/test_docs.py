"""What the pages say is so: links lead somewhere, commands parse, configs load, and no page knows this machine."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from longtune import Plan, load_config
from longtune.config import MemoryPlan

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
SHELL = ("sh", "bash", "console")

# Spelled in pieces, so that this file passes its own test.
FOREIGN = re.compile(
    "|".join(
        [
            "/" + r"(work|root|farm)/",
            "/" + r"(home|Users)/\w+/",
            "/" + "opt/wheels",
            r"pypi\." + "org",
            "python" + "hosted",
            r"registry\." + "npmjs",
            r"deb\." + "debian",
        ]
    )
)


def ident(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """(place, text) of the fenced blocks in some languages."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        if match[1] in languages:
            line = page.read_text(encoding="utf-8").count("\n", 0, match.start()) + 2
            yield f"{ident(page)}:{line}", match[2]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def shell_lines() -> Iterator[tuple[str, str]]:
    """(place, command) of every command line in a fenced block; continued lines are joined."""
    for page in PAGES:
        for place, text in blocks(page, *SHELL):
            for line in text.replace("\\\n", " ").splitlines():
                yield place, line.removeprefix("$ ").strip()


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get on the usual forges."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def command_group():
    import typer

    from longtune.cli import app

    return typer.main.get_command(app)


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=ident)
def test_links_within_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page)) + re.findall(r'(?:src|href)="([^"]+)"', prose(page))
    lost = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_command_lines_parse():
    group = command_group()
    wrong = []
    for place, line in shell_lines():
        words = shlex.split(line, comments=True)
        if not words or words[0] != "longtune":
            continue
        verb = group.commands.get(words[1]) if len(words) > 1 else None
        if verb is None:
            wrong.append(f"{place}: no such verb: {line}")
            continue
        try:
            verb.make_context(words[1], words[2:])
        except Exception as error:
            wrong.append(f"{place}: {line}: {error}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=ident)
def test_verbs_named_in_the_text_exist(page):
    named = set(re.findall(r"`longtune ([a-z]+)[^`]*`", prose(page)))
    assert named <= command_group().commands.keys()


def test_every_verb_is_in_the_guide():
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert not [verb for verb in command_group().commands if f"longtune {verb}" not in guide]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {line.split()[1] for _, line in shell_lines() if line.startswith("make ")}
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("file", EXAMPLES, ids=ident)
def test_examples_load(file):
    config = load_config(file)
    assert config.data


def test_there_are_examples():
    assert EXAMPLES


def test_configs_in_the_pages_load(tmp_path):
    """A page may show a part of a config: what it leaves out is filled in here."""
    for page in PAGES:
        for place, text in blocks(page, "yaml"):
            file = tmp_path / "run.yaml"
            file.write_text(text if re.search(r"^data:", text, re.M) else f"data: rows.jsonl\n{text}")
            assert load_config(file), place


def test_python_in_the_pages_compiles():
    for page in PAGES:
        for place, text in blocks(page, "python"):
            compile(text, place, "exec")


def test_the_memory_page_explains_every_key_and_value_of_a_plan():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    values = [
        value for key in ("boundary_store", "keep") for value in get_args(MemoryPlan.model_fields[key].annotation)
    ]
    for word in [*(field.name for field in dataclasses.fields(Plan)), *values]:
        assert f"`{word}`" in page or f"`{word}:" in page, word


def test_the_annotated_tree_names_every_room():
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = [entry for entry in (ROOT / "src" / "longtune").iterdir() if not entry.name.startswith("_")]
    assert not [room.name for room in rooms if not re.search(rf"^ +{room.name}/? ", tree, re.M)]


def test_no_file_knows_a_machine_or_a_registry():
    found = []
    for file in tracked_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{ident(file)}: {match[0]}" for match in FOREIGN.finditer(text)]
    assert not found
