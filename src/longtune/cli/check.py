"""`longtune check`: looks at data as a run would read it, before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Columns, Overrides, run


def check(
    target: Annotated[list[str], typer.Argument(metavar="TARGET...", help="A config, a run's folder, or data.")],
    model: Annotated[str | None, typer.Option(help="Whose tokenizer and template.")] = None,
    method: Annotated[str | None, typer.Option(help="sft, dpo, orpo or simpo; by the columns.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Show so many rows, trained tokens marked.")] = 1,
    html: Annotated[Path | None, typer.Option(help="Write a page with the shown rows there.")] = None,
    columns: Columns = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check data: formats, lengths, masks, duplicates, tokens.

    \b
    longtune check longtune.yaml --show 3
    longtune check rows.jsonl --map question=prompt,answer=completion

    Leaves with 2 where a run would stop before its first step.
    """
    run(lambda: _check(target, model, method, show, html, columns, set_ or []), as_json)


def _check(
    targets: list[str],
    model: str | None,
    method: str | None,
    show: int,
    html: Path | None,
    columns: str | None,
    overrides: list[str],
) -> dict[str, Any]:
    from longtune.outputs import check_output, write_output

    if html is not None:
        check_output(html, f"--html {html}")
    config = _config(targets, model, method, columns, overrides)

    from longtune.cli import check_view
    from longtune.data.check import check_data, estimate, has_errors
    from longtune.data.pipeline import Settings
    from longtune.data.sources import split_sources
    from longtune.errors import UserError
    from longtune.model.loading import load_tokenizer
    from longtune.train.length import batcher, length, refusals
    from longtune.train.prepare import data_settings
    from longtune.train.unread import unread_settings

    settings = data_settings(config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    named = config.data if isinstance(config.data, str) else [source.model_dump() for source in config.data]
    train, valid = split_sources(named)
    sources = {"train": train, "valid": config.valid or valid}
    if problems := unread_settings(config, sources["valid"], tokenizer):
        raise UserError(problems)
    splits = check_data(
        {name: source for name, source in sources.items() if source is not None},
        tokenizer,
        Settings(**settings),
        show=show,
        positions=_positions(config, tokenizer),
    )
    train_split = splits[0]
    run_length: dict[str, float] = {}
    lines: list[str] = []
    if len(train_split.sizes):
        batches = batcher(config, train_split)
        found = length(config, batches)
        train_split.add_run(refusals(config, batches, found), found.not_reached(train_split.shares))
        run_length, lines = estimate(batches, found), found.lines(train_split.shares)
    check_view.show(splits, run_length, config, lines)
    if html is not None:
        write_output(html, check_view.page(splits, run_length, config.model), f"--html {html}")
        print(f"wrote {html}")
    return {
        "model": config.model,
        "method": config.method,
        "splits": {split.name: split.as_dict() for split in splits},
        "estimate": run_length,
        "html": html and str(html),
        "exit_code": 2 if has_errors(splits) else 0,
    }


def _positions(config: Any, tokenizer: Any) -> int | None:
    """The positions that the model was made for: by its config, or else by its tokenizer."""
    from longtune.model.meta import model_positions

    found = model_positions(config.model, trust_remote_code=config.trust_remote_code)
    told = getattr(tokenizer, "model_max_length", None)
    return found or (told if told and told < 10**9 else None)


def _config(
    targets: list[str], model: str | None, method: str | None, columns: str | None, overrides: list[str]
) -> Any:
    """The config that is named, or one of defaults around the data that is."""
    import json

    from longtune.cli.init import detect_method
    from longtune.cli.options import as_overrides, column_overrides
    from longtune.config import load_config
    from longtune.data.formats import parse_columns
    from longtune.errors import UserError

    first = Path(targets[0])
    is_config = first.suffix.lower() in (".yaml", ".yml") or (first / "config.yaml").is_file()
    chosen = [*as_overrides({"model": model, "method": method}), *column_overrides(columns), *overrides]
    if is_config and len(targets) == 1:
        return load_config(first, chosen)
    data = (
        as_overrides({"data": targets[0]})
        if len(targets) == 1
        else ["data=" + json.dumps([{"path": target} for target in targets])]
    )
    if method is None and not any(item.startswith("method=") for item in overrides):
        try:
            found, _ = detect_method(targets, parse_columns(columns))
        except UserError:
            found = "sft"  # What is wrong with the rows is told, with all the rest, when they are read.
        chosen = [*as_overrides({"method": found}), *chosen]
    return load_config(None, [*data, *chosen])
