"""The public names of the package, and that importing it costs nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import longtune

PUBLIC = ["DoesNotFit", "Plan", "Problem", "UserError", "__version__", "load_config", "plan", "stream", "train"]
"""Adding a name is a decision; taking one away breaks somebody."""

SIGNATURES = {
    "Plan": [
        "layers_per_segment",
        "chunk_tokens",
        "boundary_store",
        "head_chunk",
        "keep",
        "keep_layers",
        "keep_below",
        "halves",
    ],
    "Problem": ["place", "reason", "fix"],
    "load_config": ["path", "overrides"],
    "plan": ["config", "device", "device_memory", "tokens", "on_stage"],
    "stream": ["model", "plan", "memory"],
    "train": ["config", "on_event", "resume", "cancel"],
}

HEAVY = ("torch", "transformers", "peft", "datasets", "numpy", "pydantic", "rich", "typer")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names_are_these():
    assert longtune.__all__ == PUBLIC
    assert dir(longtune) == sorted(PUBLIC)


def test_every_public_name_is_there():
    for name in PUBLIC:
        assert getattr(longtune, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_keep_their_names(name):
    function = getattr(longtune, name)
    if inspect.ismodule(function):
        # `longtune.train` is a package that can be called.
        function = function.train
    assert list(inspect.signature(function).parameters) == SIGNATURES[name]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        longtune.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, json, longtune; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    loaded = set(json.loads(run_python(code)))
    assert not loaded & set(HEAVY)


def test_the_command_line_answers_without_the_engine():
    heavy = ("torch", "transformers", "peft", "datasets")
    code = f"import sys, longtune.cli; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_the_package_has_one_version():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/longtune/__init__.py"
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    assert f"## {longtune.__version__}" in changelog


def test_dependencies_have_lower_bounds_and_no_pins():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["dependencies"]
    for dependency in project["dependencies"]:
        assert ">=" in dependency and "==" not in dependency and "<" not in dependency, dependency
