"""The `longtune` command: its verbs, in the order in which a newcomer meets them."""

from __future__ import annotations

import os

import typer

from longtune.cli import (
    chat,
    check,
    demo,
    doctor,
    eval,
    export,
    init,
    plan,
    quantise,
    report,
    sensitivity,
    train,
    watch,
)

# Plain help: boxes would not leave room for a verb's options on one screen.
app = typer.Typer(
    name="longtune",
    help="Fine-tunes language models with LoRA on long rows, in the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    demo.demo,
    init.init,
    check.check,
    plan.plan,
    train.train,
    watch.watch,
    report.report,
    eval.eval_,
    chat.chat,
    export.export,
    sensitivity.sensitivity,
    quantise.quantise,
    doctor.doctor,
):
    app.command(verb.__name__.rstrip("_"))(verb)


def main() -> None:
    """The entry point of the `longtune` script."""
    # OpenMP's threads spin while they wait, which costs several times over as soon as another program wants the cores.
    # It is read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app()
