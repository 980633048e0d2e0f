"""`longtune sensitivity`: how much a model's output changes when one module alone is quantised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Columns, Overrides, run


def sensitivity(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or smollm2.")],
    data: Annotated[str, typer.Option(help="Rows to measure on.")],
    bits: Annotated[str, typer.Option(help="Width to measure at; several: 4,8.")] = "4",
    group_size: Annotated[int, typer.Option(min=1, help="Numbers that share a scale.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the rows, in all.")] = 2048,
    row_tokens: Annotated[int, typer.Option(min=2, help="Longer rows are cut.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Which rows are drawn.")] = 0,
    out: Annotated[Path, typer.Option(help="The file of figures.")] = Path("sensitivity.json"),
    columns: Columns = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure what quantising each module of MODEL alone costs.

    \b
    longtune sensitivity smollm2 --data rows.jsonl

    The cost is the mean KL divergence of the output. A stopped measurement goes on where it was. The figures serve
    `longtune quantise`, and lora.rank_policy by_kl.
    """
    run(
        lambda: _sensitivity(model, data, bits, group_size, tokens, row_tokens, seed, out, columns, set_ or []), as_json
    )


def _sensitivity(
    name: str,
    data: str,
    bits: str,
    group_size: int,
    tokens: int,
    row_tokens: int,
    seed: int,
    out: Path,
    columns: str | None,
    overrides: list[str],
) -> dict[str, Any]:
    from longtune.cli.options import as_overrides, column_overrides
    from longtune.config import load_config

    config = load_config(None, [*as_overrides({"model": name, "data": data}), *column_overrides(columns), *overrides])
    formats = affine_formats(bits, group_size)

    from longtune.outputs import check_output, writing

    check_output(out, f"--out {out}")

    from longtune.data.sources import resolve
    from longtune.model.loading import load_model
    from longtune.model.reference import fingerprint
    from longtune.quantise import find_units, measure, samples_of
    from longtune.quantise.journal import Journal
    from longtune.quantise.sensitivity import digest_of
    from longtune.quantise.writing import sensitivity_entries
    from longtune.train.files import write_json
    from longtune.train.prepare import load_data

    resolve(data)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        quantise=config.quantise_on_load,
    )
    units, left = find_units(loaded.model, group_size)
    print_left(left)
    dataset = load_data(config, data, loaded.tokenizer)
    samples = samples_of(dataset.trees, tokens=tokens, row_tokens=row_tokens, seed=seed)
    count = sum(sample.positions.numel() for sample in samples)
    about = {
        "model": fingerprint(loaded.model),
        "data": digest_of(samples),
        "group size": group_size,
        "dtype": str(loaded.model.dtype),
    }
    partial = out.with_name(f"{out.name}.partial")
    with writing(str(partial)):
        journal = Journal(partial, about)
    wanted = [(unit, format) for format in formats for unit in units]
    jobs = [job for job in wanted if (job[0].name, job[1].bits) not in journal.figures]
    print(f"{len(units)} modules, {len(samples)} rows, {count:,} predictions; {loaded.dtype_reason}")
    if len(jobs) < len(wanted):
        print(f"{len(wanted) - len(jobs)} figures of an earlier run are used")
    try:
        with bar("measuring", len(jobs)) as step:

            def keep(unit: Any, format: Any, kl: float) -> None:
                with writing(str(partial), "make room, and start it again: it goes on where it was"):
                    journal.add(unit.name, format.bits, kl)
                step(f"{unit.name} {kl:.3g}")

            if jobs:
                measure(loaded.model, samples, jobs, keep)
    except BaseException:
        journal.close()
        raise
    kl: dict[str, dict[int, float]] = {}
    for unit, format in wanted:
        kl.setdefault(unit.name, {})[format.bits] = journal.figures[unit.name, format.bits]
    with writing(f"--out {out}", "make room, and start it again: the figures are kept"):
        write_json(out, sensitivity_entries(units, kl))
    journal.remove()
    lowest = min(format.bits for format in formats)
    order = sorted(units, key=lambda unit: kl[unit.name][lowest], reverse=True)
    print(f"the most sensitive at {lowest} bits, in nats:")
    for unit in order[:5]:
        print(f"  {kl[unit.name][lowest]:.3g}  {unit.name}")
    print(f"wrote {out}")
    return {
        "model": name,
        "out": str(out),
        "modules": len(units),
        "predictions": count,
        "left": left,
        "kl": {unit.name: {str(bits): value for bits, value in kl[unit.name].items()} for unit in units},
    }


def affine_formats(bits: str, group_size: int, option: str = "--bits") -> list[Any]:
    """The affine formats that an option names, the narrowest first.

    Raises:
        UserError: a width that there is not.
    """
    from longtune.errors import Problem, UserError
    from longtune.model.packed import Format

    try:
        widths = sorted({int(part) for part in bits.split(",")})
        return [Format("affine", width, group_size) for width in widths]
    except ValueError as error:
        raise UserError(Problem(f"{option} {bits}", str(error), "use 1, 2, 3, 4, 5, 6 or 8")) from None


def print_left(left: dict[str, str]) -> None:
    """Say which modules stay as they are."""
    for name, reason in list(left.items())[:5]:
        print(f"{name} stays as it is: {reason}")
    if len(left) > 5:
        print(f"so do {len(left) - 5} more")


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A callback for each finished piece of work: a bar on a terminal, a line for every tenth part elsewhere."""
    done = 0
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        shown = TextColumn("{task.description}")
        parts = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown)
        with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=total)
            yield lambda text: progress.update(task, advance=1, description=text)
        return

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        if done == total or done * 10 // total > (done - 1) * 10 // total:
            print(f"{title} {done} of {total}", file=sys.stderr)

    yield tell
