"""`longtune export`: an adapter for other tools, a merged model, or several adapters as one; each checks itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Failed, run


def export(
    target: Annotated[str, typer.Argument(help="A run folder, or an adapter's folder.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    to: Annotated[str, typer.Option(help="peft, merged, mlx, mlx-merged, gguf-lora.", show_default=False)] = "peft",
    model: Annotated[str | None, typer.Option(help="The base model, if not the one the adapter names.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; the default changes nothing.")] = None,
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="OTHER:WEIGHT", help="Add another adapter; repeatable.")
    ] = None,
    requantise: Annotated[
        bool, typer.Option("--requantise", help="mlx-merged: pack merged weights as the base was.")
    ] = False,
    even_ranks: Annotated[bool, typer.Option("--even-ranks", help="peft: one rank for all, padded.")] = False,
    prompt: Annotated[str | None, typer.Option(help="What the check reads.")] = None,
    device: Annotated[str, typer.Option(help="Where the base model is loaded.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace an older export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export the adapter of TARGET; each export checks itself.

    \b
    longtune export runs/rows --out adapter
    longtune export runs/rows --to merged --out model --dtype bf16
    longtune export runs/rows --with runs/tone:0.5 --out both
    """
    named = {"dtype": dtype, "requantise": requantise, "even_ranks": even_ranks, "device": device, "force": force}
    if prompt is not None:
        named["prompt"] = prompt
    run(lambda: _export(target, out, to, model, with_ or [], named), as_json)


def _export(
    name: str, out: Path, to: str, model: str | None, others: list[str], named: dict[str, Any]
) -> dict[str, Any]:
    from longtune.export import ExportFailed, Request
    from longtune.export import export as run_export
    from longtune.export.run import as_dict

    adapter, base, trusted, note = _source(name, model)
    request = Request(
        adapter=adapter,
        model=base,
        to=to,
        out=out,
        others=tuple(_weighted(other) for other in others),
        trust_remote_code=trusted,
        **named,
    )
    try:
        done = run_export(request, tell=print)
    except ExportFailed as error:
        raise Failed(str(error)) from error
    difference = done.difference
    if note:
        done.notes.append(note)
    for note in done.notes:
        print(f"note: {note}")
    for file, size in done.files.items():
        print(f"{size:>15,}  {done.folder / file}")
    print(
        f"largest logit difference from base + adapter: {difference.largest:.3g} (allowed: {difference.allowed:.3g}; "
        f"the adapter itself moves logits by up to {difference.effect:.3g}), as read by {done.checked_by}"
    )
    return {"target": name, "to": to, "model": base, **as_dict(done)}


def _source(name: str, model: str | None) -> tuple[Path, str, bool, str]:
    """(adapter's folder, base model, whether its code may run, what to tell the user) of TARGET."""
    from longtune.cli.options import find_target
    from longtune.errors import Problem, UserError
    from longtune.model.adapter_files import find_any_adapter, read_updates

    folder = Path(name)
    if (folder / "config.yaml").is_file():
        found = find_target(name, model=model)
        assert found.adapter is not None
        way = found.config.quantise_on_load
        note = f"the run trained on weights that were stored as {way} on loading; here the base is as its files hold it"
        return found.adapter, found.config.model, found.config.trust_remote_code, note if way else ""
    path, _ = find_any_adapter(folder)
    base = model or read_updates(path).base_model
    if base is None:
        raise UserError(Problem(name, "doesn't say which model it was made for", "name it: --model MODEL"))
    return path, base, False, ""


def _weighted(text: str) -> tuple[Path, float]:
    """ADAPTER:WEIGHT, or an adapter alone with a weight of 1."""
    from longtune.cli.options import find_target
    from longtune.errors import Problem, UserError

    name, colon, weight = text.rpartition(":")
    if not colon or Path(text).exists():
        name, weight = text, "1"
    try:
        number = float(weight)
    except ValueError:
        fix = "write it as runs/other:0.5"
        raise UserError(Problem(f"export --with {text}", f"{weight!r} is no weight", fix)) from None
    if (Path(name) / "config.yaml").is_file():
        found = find_target(name)
        assert found.adapter is not None
        return found.adapter, number
    return Path(name), number
