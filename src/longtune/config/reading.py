"""Reads a run's config: a YAML file or plain values, `key=value` overrides on top, and all problems at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from longtune.config.refusals import Unread, contradictions, extremes, unread
from longtune.config.schema import RunConfig
from longtune.config.wording import in_words
from longtune.errors import Problem, UserError

Config = RunConfig | Mapping[str, Any] | str | os.PathLike[str]
"""What Python code may give for a run: its config, the keys of one as plain values, or the path of a file or a run."""

_EITHER = (("train", "steps", "epochs"), ("train", "tokens_per_batch", "batch_size"))
"""Keys of which a run has one: an override of one takes the place of the other in the file."""


def load_config(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """A run from a YAML file, overrides of the form `key=value` (dotted keys, YAML values), or both.

    A run folder counts as its `config.yaml`, with `output` naming the folder itself.

    A key that nothing would read is refused, unless its value is the default. In the file it gives way where an
    override is the reason that it isn't read, and in the config of a run that was started already.

    Raises:
        UserError: with every problem of the file and the overrides.
    """
    name, own = "config", False
    values: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if file.is_dir():
            if not (file / "config.yaml").is_file():
                raise UserError(Problem(str(path), "this folder holds no config.yaml", "name a config file or a run"))
            overrides = [f"output={quoted(str(path))}", *overrides]
            file = file / "config.yaml"
            own = True
        name = str(file)
        values = _read_yaml(file)
        own = own or (file.name == "config.yaml" and (file.parent / "metrics.jsonl").exists())
    set_keys = _apply(values, overrides)
    _give_way(values, set_keys)
    return _validated(values, name, set_keys, own)


def check_config(config: Config) -> RunConfig:
    """The resolved config of a run that is started from Python.

    Raises:
        UserError: for what is not supported, or is no config.
    """
    if isinstance(config, (str, os.PathLike)):
        return load_config(config)
    if isinstance(config, Mapping):
        return _validated(copy.deepcopy(dict(config)), "config", set(), own=False)
    if not isinstance(config, RunConfig):
        fix = "longtune.load_config(path), the keys as a dict, or the path of a config file"
        raise UserError(Problem("config", f"is no config: a {type(config).__name__} was given", fix))
    config = config.resolved()
    refused = [Problem(f"config: {key}", why, fix) for key, why, fix in _refusals(config, list(unread(config)))]
    if refused:
        raise UserError(refused)
    return config


def _validated(values: dict[str, Any], name: str, set_keys: set[str], own: bool) -> RunConfig:
    """The resolved config of plain values.

    Args:
        name: where they are from, for problems.
        set_keys: dotted keys that overrides set.
        own: they are the config of a run that was started already.
    """
    while True:
        try:
            config = RunConfig.model_validate(values).resolved()
        except ValidationError as error:
            raise UserError(in_words(error, values, lambda key: _place(key, name, set_keys))) from None
        left = list(unread(config))
        yielding = [
            found
            for found in left
            if not _is_set(found.key, set_keys) and (own or any(_is_set(key, set_keys) for key in found.by))
        ]
        if not yielding:
            break
        for found in yielding:
            section, _, key = found.key.rpartition(".")
            (values[section] if section else values).pop(key)
    refused = [Problem(_place(key, name, set_keys), why, fix) for key, why, fix in _refusals(config, left, own)]
    if refused:
        raise UserError(refused)
    return config


def _refusals(config: RunConfig, left: Sequence[Unread], own: bool = False) -> list[tuple[str, str, str]]:
    """(key, reason, fix) of all that is wrong with a config whose values are of the schema's kinds."""
    told = [*contradictions(config), *((found.key, found.why, found.fix) for found in left)]
    return told if own else [*told, *extremes(config)]


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(Problem(str(file), "no such file", "write one with: longtune init DATA")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(str(file), f"can't be read: {error}")) from None
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        fix = f"is it data? longtune train --data {file}" if file.suffix not in (".yaml", ".yml") else ""
        raise UserError(Problem(place, f"not valid YAML: {getattr(error, 'problem', None) or error}", fix)) from None
    if not isinstance(values, dict):
        raise UserError(Problem(str(file), "holds no keys", "write one with: longtune init DATA"))
    return values


def quoted(text: str) -> str:
    """A text as a YAML value, so that an override takes it as it is."""
    return yaml.safe_dump(text, default_style='"', width=float("inf")).strip()


def _give_way(values: dict[str, Any], set_keys: set[str]) -> None:
    """Take out of `values` what an override stands instead of."""
    for section, one, other in _EITHER:
        inner = values.get(section)
        for given, replaced in ((one, other), (other, one)):
            overridden = f"{section}.{given}" in set_keys and f"{section}.{replaced}" not in set_keys
            if overridden and isinstance(inner, dict) and inner.get(given) is not None:
                inner.pop(replaced, None)


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> set[str]:
    """Writes the overrides into `values`; returns their dotted keys."""
    keys: set[str] = set()
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(Problem(f"--set {override}", "is not of the form key=value", "--set train.steps=100"))
            continue
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError:
            problems.append(Problem(f"--set {override}", "the value is not valid YAML", "put it in quotes"))
            continue
        *sections, last = key.split(".")
        inner = values
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = value
        keys.add(key)
    if problems:
        raise UserError(problems)
    return keys


def _is_set(key: str, set_keys: set[str]) -> bool:
    """Whether an override set a key, by itself or with its section."""
    return any(key == set_key or key.startswith(f"{set_key}.") for set_key in set_keys)


def _place(key: str, name: str, set_keys: set[str]) -> str:
    return f"--set {key}" if _is_set(key, set_keys) else f"{name}: {key}"
