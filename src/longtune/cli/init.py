"""`longtune init`: writes a commented config for the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Columns, run

_LOOKED_AT = 200
"""Records whose columns are looked at."""

_STEPS, _EPOCHS = 200, 3
"""The length of a run: so many steps, or so many passes over data that these steps would go through more often."""

_SHOWN = {
    "": ("model", "data", "valid", "method", "output", "columns", "train_on"),
    "lora": ("rank", "alpha", "targets", "dropout"),
    "train": (
        "steps",
        "epochs",
        "learning_rate",
        "schedule",
        "warmup_ratio",
        "batch_size",
        "accumulate",
        "max_tokens",
        "overlong",
        "seed",
        "clip_norm",
        "eval_every",
        "save_every",
    ),
    "dpo": ("beta", "loss", "label_smoothing", "reference", "reference_adapter"),
    "orpo": ("lambda", "sft_scope"),
    "simpo": ("beta", "gamma"),
    "memory": (),
}
"""Keys that are written, by section (a method's own only for that method); the rest keep their defaults."""


def init(
    data: Annotated[str, typer.Argument(help="A file, a folder or a hub name.")],
    file: Annotated[Path, typer.Option(help="Where to write the config.")] = Path("longtune.yaml"),
    model: Annotated[str, typer.Option(help="Embedded (smollm2), folder, file.gguf or hub name.")] = "smollm2",
    columns: Columns = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at DATA and write a config for it, every key explained."""
    run(lambda: _init(data, file, model, columns, force), as_json)


def _init(data: str, file: Path, model: str, columns: str | None, force: bool) -> dict[str, Any]:
    from longtune.config import RunConfig
    from longtune.data.formats import parse_columns
    from longtune.data.sources import split_sources
    from longtune.errors import Problem, UserError
    from longtune.outputs import check_output, write_output

    check_output(file, f"--file {file}")
    if file.exists() and not force:
        raise UserError(Problem(str(file), "exists already", "choose another with --file, or add --force"))
    renames = parse_columns(columns)
    method, formats = detect_method(data, renames)
    _, valid = split_sources(data)
    config = RunConfig.model_validate(
        {"model": model, "data": data, "method": method, "columns": renames, "train": {"steps": _STEPS}}
    ).resolved()
    rows_of_run = _STEPS * config.train.batch_size * config.train.accumulate
    if _EPOCHS * _count(data, -(-rows_of_run // _EPOCHS)) < rows_of_run:
        train = config.train.model_copy(update={"steps": None, "epochs": float(_EPOCHS)})
        config = config.model_copy(update={"train": train})
    write_output(file, commented(config, formats, valid), f"--file {file}")
    print(f"{data}: {', '.join(formats)}; " + ("validation data found" if valid else "no validation data found"))
    print(f"wrote {file}; next: longtune check {file}, then longtune train {file}")
    return {"file": str(file), "method": method, "formats": formats, "valid": valid, "config": config.to_dict()}


def _count(data: str, most: int) -> int:
    """Rows of the training data, counted up to `most`."""
    from itertools import chain, islice

    from longtune.data.readers import read
    from longtune.data.sources import resolve, split_sources

    train, _ = split_sources(data)
    return sum(1 for _ in islice(chain.from_iterable(read(source) for source in resolve(train)), most))


def detect_method(data: Any, renames: dict[str, str]) -> tuple[str, list[str]]:
    """The method that fits the data, and the formats found in its first records."""
    from itertools import islice

    from longtune.data.formats import detect, rename
    from longtune.data.problems import Problems, RowError
    from longtune.data.readers import read
    from longtune.data.sources import resolve
    from longtune.errors import Problem, UserError

    found: dict[str, list[str]] = {}
    problems = {"sft": Problems(), "dpo": Problems()}
    for source in resolve(data):
        for place, record in islice(read(source), _LOOKED_AT):
            if isinstance(record, RowError):
                for gathered in problems.values():
                    gathered.add(place, record)
                continue
            for method, gathered in problems.items():
                try:
                    name = detect(rename(record, renames), method)
                except RowError as error:
                    gathered.add(place, error)
                    continue
                if name not in found.setdefault(method, []):
                    found[method].append(name)
    if not found:
        if not problems["sft"]:
            raise UserError(Problem(str(data), "holds no rows"))
        problems["sft"].raise_if_any()
    method = next(iter(found))
    return method, found[method]


def commented(config: Any, formats: list[str], valid: Any) -> str:
    """The config as YAML with each key's description beside it."""
    import yaml

    from longtune.config import LEARNING_RATES, describe_keys

    about = describe_keys()
    values = config.to_dict()
    lines = [
        f"# Data: {', '.join(formats)}. Other keys and their defaults: the config.yaml of any run's folder.",
        "# Train with: longtune train FILE; change a key for one run with --set key=value.",
    ]
    for section, keys in _SHOWN.items():
        if section in LEARNING_RATES and section != config.method:
            continue
        inner = values if not section else values[section]
        if not isinstance(inner, dict):
            lines += _commented_line(section, inner, about[section], "", yaml)
            continue
        if section:
            lines += ["", f"{section}:  # {about[section].rstrip('.')}"]
        for key in keys:
            value = inner[key]
            note = about[f"{section}.{key}" if section else key]
            if key == "valid" and valid:
                note = f"null takes {valid}"
            lines += _commented_line(key, value, note, "  " if section else "", yaml)
    return "\n".join(lines) + "\n"


def _commented_line(key: str, value: Any, note: str, indent: str, yaml: Any) -> list[str]:
    text = yaml.safe_dump({key: value}, default_flow_style=True, width=float("inf"), allow_unicode=True)
    line = f"{indent}{text.strip()[1:-1]}"
    # A description of several lines in the schema is one comment here.
    return [f"{line:<34}  # {' '.join(note.split()).rstrip('.')}"]
