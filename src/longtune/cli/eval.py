"""`longtune eval`: loss on held-out rows, of a run's adapter, any adapter, or a model alone."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Columns, Overrides, run
from longtune.errors import counted


def eval_(
    target: Annotated[str, typer.Argument(help="A run folder, an adapter's folder, or a model.")],
    data: Annotated[str | None, typer.Option(help="Rows; the default is the run's own validation data.")] = None,
    model: Annotated[str | None, typer.Option(help="The base model, if not the one the adapter names.")] = None,
    method: Annotated[str | None, typer.Option(help="sft, dpo, orpo or simpo, if not the run's.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Use at most so many rows; all by default.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Measure the model without its adapter, too.")] = False,
    columns: Columns = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure the loss of TARGET on held-out rows. On pairs accuracy and margin, too.

    \b
    longtune eval runs/rows --base
    longtune eval smollm2 --data valid.jsonl
    """
    run(lambda: _eval(target, data, model, method, rows, base, columns, set_ or []), as_json)


def _eval(
    name: str,
    data: str | None,
    model: str | None,
    method: str | None,
    rows: int | None,
    base: bool,
    columns: str | None,
    overrides: list[str],
) -> dict[str, Any]:
    from longtune.cli.options import as_overrides, column_overrides, find_target
    from longtune.errors import Problem, UserError

    chosen = [*as_overrides({"method": method}), *column_overrides(columns), *overrides]
    target = find_target(name, model=model, overrides=chosen)

    from longtune.data.sources import resolve
    from longtune.engine import Engine
    from longtune.model.adapters import adapters_disabled, load_adapter
    from longtune.model.loading import choose_device, load_model, load_tokenizer
    from longtune.model.reference import load_reference
    from longtune.train.evaluate import Validation, choose_rows, chosen_rows, validate
    from longtune.train.planning import choose_plan
    from longtune.train.prepare import data_sources, frozen_adapter, load_data, make_objective
    from longtune.train.references import Reference, Referenced

    config = target.config
    source = data if data is not None else data_sources(config)[1] if target.is_run else None
    if source is None:
        raise UserError(Problem(f"eval {name}", "there is no validation data", "name it: --data valid.jsonl"))
    resolve(source)
    frozen = frozen_adapter(config)
    if frozen is not None and target.adapter is None:
        raise UserError(Problem("dpo.reference_adapter", f"{name} has no adapter that it could be compared with"))
    plan, _ = choose_plan(config.memory, choose_device(config.device))
    # What is wrong with the rows is said before the model takes its time to load.
    dataset = load_data(config, source, load_tokenizer(config.model, trust_remote_code=config.trust_remote_code))
    for line in dataset.report.lines():
        print(line)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        quantise=config.quantise_on_load,
    )
    tuned = loaded.model if target.adapter is None else load_adapter(loaded.model, target.adapter)
    if frozen is not None:
        load_reference(tuned, frozen)  # pyright: ignore[reportArgumentType]
    objective = make_objective(config)
    trees = choose_rows(dataset.trees, rows)
    engine = Engine(tuned, plan=plan)

    def measured() -> Validation:
        left_out = len(dataset.trees) - len(trees)
        return validate(engine, objective, trees, batch_size=config.train.batch_size, skipped=left_out)

    result: dict[str, Any] = {"target": name, "model": config.model, "adapter": target.adapter and str(target.adapter)}
    try:
        if objective.uses_reference and config.dpo.reference == "cached":
            referenced = Referenced(dataset)
            referenced.fill(Reference(engine, tuned, frozen), chosen_rows(len(dataset), rows))
            trees = choose_rows(referenced.trees, rows)
        elif objective.uses_reference:
            trees = Reference(engine, tuned, frozen).attach_all(trees)
        found = measured()
        result |= found.as_dict()
        if base and target.adapter is not None:
            with adapters_disabled(tuned):
                result["base"] = measured().as_dict()
    finally:
        engine.close()
    label = "with the adapter:    " if "base" in result else ""
    print(f"{label}{_summary(found.metrics)}")
    if "base" in result:
        print(f"without the adapter: {_summary(result['base'])}")
    print(
        f"{counted(found.rows, 'row')} ({found.skipped:,} left out), {counted(found.tokens, 'token')}, "
        f"{found.trained_tokens:,} trained"
    )
    return result


def _summary(metrics: dict[str, Any]) -> str:
    loss = f"loss {metrics['loss']:.4f}"
    if "pairs" not in metrics:
        return f"{loss}, perplexity {math.exp(min(metrics['loss'], 700)):.4g}"
    pairs = metrics["pairs"]
    ties = f" ({metrics['ties']:.0f} tied)" if metrics.get("ties") else ""
    return (
        f"{loss}, accuracy {metrics['correct']:.0f}/{pairs:.0f}{ties}, margin {metrics['margin']:.4g}; "
        f"by average log-prob {metrics['log_prob_correct']:.0f}/{pairs:.0f}, margin {metrics['log_prob_margin']:.4g}"
    )
