"""The arrows between the rooms: cli -> train -> (data, objective, head, engine) -> (attention, model) -> tree.

Every import in `src/longtune`, also one inside a function, is read from the source and must go down.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import longtune

ROOMS = Path(longtune.__file__).parent

CORE = {"tree", "errors", "fallback", "outputs"}
LOWER = CORE | {"attention", "model"}
STEP = LOWER | {"objective", "head", "engine"}

MAY_USE = {
    # What everything stands on.
    "errors": set(),
    "fallback": set(),
    "outputs": {"errors"},
    "tree": {"errors"},
    "attention": CORE,
    "model": CORE,
    # One step. A head asks the model for its matrix; an objective sees log-probs and trees, never a model.
    "objective": CORE,
    "head": CORE | {"model"},
    "engine": STEP,
    "data": CORE,
    # A run. The schema asks which methods there are objectives for.
    "config": CORE | {"objective"},
    "train": STEP | {"data", "config"},
    # Pure functions of a run's events.
    "watch": CORE,
    # Ways in.
    "integrations": STEP,
    "demo": STEP | {"data", "config", "train"},
    # Models and adapters on disk, without a run: what made them does not matter.
    "export": LOWER,
    # A model in fewer bits; which rows it is measured on does not matter.
    "quantise": LOWER | {"engine"},
    "cli": STEP | {"data", "config", "train", "watch", "demo", "integrations", "export", "quantise"},
    # The public names, each imported when it is first used.
    "__init__": {"config", "engine", "errors", "integrations", "train"},
}
"""For each room (folder or module), the rooms that it may import."""

FILES = sorted(ROOMS.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(ROOMS).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of longtune, `import_module("...")` with a literal name included."""
    package = ["longtune", *file.relative_to(ROOMS).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")]).rstrip(".")
            # `from longtune import x` may name a room.
            found = [f"{base}.{alias.name}" for alias in node.names] if base == "longtune" else [base]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found = [argument.value]
        for name in found:
            if name == "longtune" or name.startswith("longtune."):
                yield node.lineno, name


def test_every_room_has_its_place_in_the_order():
    rooms = {room_of(file) for file in FILES}
    assert rooms == MAY_USE.keys(), "a new room needs a line here: what may it use?"


def test_the_order_has_no_circle():
    done: set[str] = set()
    while len(done) < len(MAY_USE):
        # A room may use itself; every other room that it uses must have been placed before it.
        ready = {room for room, used in MAY_USE.items() if used - {room} <= done} - done
        assert ready, f"these rooms wait for each other: {sorted(MAY_USE.keys() - done)}"
        done |= ready


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOMS).as_posix())
def test_imports_go_down(file):
    own = room_of(file)
    wrong = []
    for line, name in imported_modules(file):
        parts = name.split(".")
        if len(parts) == 1 or not ((ROOMS / parts[1]).is_dir() or (ROOMS / f"{parts[1]}.py").is_file()):
            continue  # The package itself, for its version or a public name.
        if parts[1] != own and parts[1] not in MAY_USE[own]:
            wrong.append(f"{file.relative_to(ROOMS)}:{line} imports {name}")
    assert not wrong


def test_the_watchers_need_neither_torch_nor_the_engine():
    for file in sorted((ROOMS / "watch").rglob("*.py")):
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert not names & {"torch", "transformers", "peft"}, file


def test_the_tests_of_kernels_need_only_what_a_gpu_machine_has():
    """torch, transformers, peft, numpy: no package for data, configs or commands."""
    tests = Path(__file__).parent
    folders = ("attention", "head", "model/packed/support.py", "model/packed/test_kernel.py", "engine/test_cuda.py")
    files = [file for place in folders for file in ([tests / place] if "." in place else (tests / place).glob("*.py"))]
    names = sorted({".".join(file.relative_to(tests.parent).with_suffix("").parts) for file in files})
    program = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(['orjson', 'pydantic', 'datasets', 'typer', 'rich']))\n"
        f"for name in {names}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException as skipped:\n"
        "        if type(skipped).__name__ != 'Skipped': raise\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tests.parent)
