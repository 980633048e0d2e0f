"""`longtune plan`: whether a run fits, by which plan, and how long it takes, before it is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Columns, Overrides, run, stages
from longtune.errors import counted


def plan(
    config: Annotated[str | None, typer.Argument(help="A config file, or a run folder.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Embedded (smollm2), folder, file.gguf or hub name.")] = None,
    data: Annotated[str | None, typer.Option(help="A file, a folder or a hub name.")] = None,
    memory: Annotated[str | None, typer.Option(help="A budget: 24GB, 22.5GiB.")] = None,
    device: Annotated[str | None, typer.Option(help="A device that isn't here: h200, rtx4090, l4, ...")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Its memory, if it is another.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Plan for one row of so many tokens.")] = None,
    columns: Columns = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a run fits, by which plan, and how long it takes.

    \b
    longtune plan longtune.yaml
    longtune plan longtune.yaml --memory 24GB
    longtune plan --model ./llama-8b --tokens 131072 --device rtx4090

    Exit code 3 where it doesn't fit; the fixes that are shown were tried.
    """
    named = {"model": model, "data": data}
    with stages(quiet=as_json) as say:
        run(lambda: _plan(config, named, columns, set_ or [], memory, device, device_memory, tokens, say), as_json)


def _plan(
    path: str | None,
    named: dict[str, str | None],
    columns: str | None,
    overrides: list[str],
    memory: str | None,
    device: str | None,
    device_memory: str | None,
    tokens: int | None,
    say: Callable[[str | None], None],
) -> dict[str, Any]:
    from longtune.cli.options import as_overrides, column_overrides
    from longtune.config import load_config
    from longtune.engine.budget import memory_bytes
    from longtune.errors import Problem, UserError

    if device_memory is not None:
        memory_bytes(device_memory)
    given = [*as_overrides(named), *column_overrides(columns), *overrides]
    if path is None and not any(item.startswith("data=") for item in given):
        if tokens is None:
            raise UserError(Problem("plan", "neither a config nor data is named", "name one, or give --tokens N"))
        given.append("data=none")
    config = load_config(path, given)
    if memory is not None:
        budget = memory_bytes(memory)
        if isinstance(config.memory, str):
            config = load_config(path, [*given, *as_overrides({"memory": memory})])
        elif budget is not None and device_memory is None:
            device_memory = memory  # Beside keys of the plan, which stay.

    from longtune.train.planning import plan as plan_run
    from longtune.train.planning import row_of

    try:
        found = plan_run(config, device=device, device_memory=device_memory, tokens=tokens, on_stage=say)
    finally:
        say(None)
    for line in _lines(found, config):
        print(line)
    if tokens is not None and (said := row_of(tokens, config)[1]):
        print(f"note       {said}")
    return {**found.as_dict(), "exit_code": 0 if found.fits else 3}


_WHAT = {
    "weights": "frozen weights",
    "adapters": "adapters",
    "optimiser": "optimiser state",
    "gradients": "gradients",
    "process": "Python and libraries",
    "kv": "keys, values and their gradients",
    "boundaries": "kept boundaries",
    "flow": "residual stream",
    "kept": "kept activations",
    "prologue": "rotary tables and the like",
    "cell": "one cell",
    "head": "loss head",
    "scratch": "workspaces of libraries",
    "slack": "slack of the allocator",
    "host": "host memory",
    "disk": "disk",
}


def _lines(found: Any, config: Any) -> list[str]:
    from longtune.watch.view import duration

    prediction, device, budget = found.prediction, found.device, found.budget
    verdict = "fits" if found.fits else "does not fit"
    lines = [
        f"{config.model}, {config.method}, a row of {found.tokens:,} tokens on {device.name}: {verdict}",
        f"plan       {_plan_words(prediction.plan)}",
        f"memory     {_gib(prediction.needed_bytes)} of {_gib(budget.device)}",
    ]
    for name, size in prediction.terms.items():
        if name not in ("host", "disk") or device.kind == "cpu":
            lines.append(f"  {_WHAT.get(name, name):<34} {_gib(size):>10}")
    if prediction.host_bytes:
        lines.append(f"host       {_gib(prediction.host_bytes)} of {_gib(budget.host)}, pinned")
    if prediction.disk_bytes:
        lines.append(f"disk       {_gib(prediction.disk_bytes)} of {_gib(budget.disk)}")
    first = f", the first {found.first_step_seconds:.0f} s longer" if found.first_step_seconds >= 1 else ""
    lines.append(f"time       {_seconds(found.seconds_per_step)} a step at most{first} (rates {device.source})")
    if found.run_seconds is not None and found.fits:
        lines.append(f"           {duration(found.run_seconds)} for the run")
    if device.kind == "cuda" and prediction.seconds.launches > 0.25 * prediction.seconds.total:
        lines.append("           the host launches more slowly than the device computes: a busy host takes longer")
    reach = f"a row of {found.largest_row:,} tokens fits" if found.largest_row else "no row fits"
    lines.append(f"longest    {reach} this budget")
    lines += [f"{'ranks' if number == 0 else '':<10} {line}" for number, line in enumerate(found.ranks.lines())]
    lines += [f"note       {note}" for note in (*found.notes, *found.ranks.notes)]
    lines += [f"fix        {fix}" for fix in found.fixes]
    return lines


def _plan_words(plan: Any) -> str:
    chunk = "the row in one chunk" if plan.chunk_tokens is None else f"chunks of {counted(plan.chunk_tokens, 'token')}"
    names = {"everything": "all activations", "attention": "attention outputs", "kv": "keys and values"}
    kept = names.get(plan.keep)
    if plan.keep == "everything" and plan.keep_layers is None:
        return f"{chunk}, {kept} kept"
    layers = "all layers" if plan.layers_per_segment is None else counted(plan.layers_per_segment, "layer")
    if plan.keep_layers is None:
        what = f"{kept or 'nothing else'} kept"
    else:
        last = counted(plan.keep_layers, "layer")
        below = names.get(plan.keep_below, "nothing")
        what = f"{kept or 'nothing'} of the last {last} kept, {below} of the others"
    return f"{chunk}, {layers} a segment, boundaries on the {plan.boundary_store}, {what}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 27 else f"{size / (1 << 20):,.1f} MiB"


def _seconds(value: float) -> str:
    from longtune.watch.view import duration

    if value >= 600:
        return duration(value)
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"
