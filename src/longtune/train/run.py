"""A run from its config to its adapter: everything checked first, then the folder, then the steps."""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longtune.config import Config, RunConfig, check_config
from longtune.data import Batcher
from longtune.engine import Plan
from longtune.errors import DoesNotFit, Problem, UserError
from longtune.model.adapters import parameter_groups, save_adapter
from longtune.model.reference import fingerprint
from longtune.outputs import writing
from longtune.train import checkpoint as checkpoints
from longtune.train import environment, files, measure, optimiser, trackers
from longtune.train.evaluate import choose_rows, chosen_rows, validate
from longtune.train.events import EventLog, OnEvent
from longtune.train.folder import RunFolder
from longtune.train.length import batcher
from longtune.train.loop import Loop, Progress, RunFailed
from longtune.train.planning import Planned, asked_bytes, plan_run, size
from longtune.train.prepare import Prepared, frozen_adapter, prepare
from longtune.train.references import Reference, Referenced
from longtune.train.samples import Samples
from longtune.train.stop import Stopper

_LESS = 0.88
"""Share of a failed plan's predicted bytes that the next one may need."""


@dataclass(frozen=True, slots=True)
class Run:
    """What `train` left behind.

    Attributes:
        folder: the run's folder.
        adapter: the final adapter; None if the run stopped early.
        reason: why it stopped early (SIGINT, SIGTERM, SIGHUP, cancelled, stop_after); None when all steps are done.
        step, steps: steps taken, and steps of the whole run.
        metrics: the values of metrics.json.
    """

    folder: Path
    adapter: Path | None
    reason: str | None
    step: int
    steps: int
    metrics: dict[str, Any]


def train(
    config: Config,
    on_event: OnEvent | None = None,
    *,
    resume: bool = False,
    cancel: threading.Event | None = None,
) -> Run:
    """Trains an adapter.

    Args:
        config: the run, its keys as plain values, or the path of a config file or a run's folder.
        on_event: called with every event of the run, as it is written to metrics.jsonl. An exception in it becomes
            one `warning` event, with the traceback on stderr, and the run goes on; to end it from there, set `cancel`.
        resume: go on from the newest whole checkpoint in the run's folder, bit for bit.
        cancel: when set (from any thread, or in `on_event`), the run saves a checkpoint after the step in work and
            returns.

    Raises:
        UserError: the config, data, model or folder must be changed; nothing was written.
        DoesNotFit: the device ran out of memory.
        RunFailed: the run can't go on (a loss that is not finite, a full disk).
    """
    config = check_config(config)
    trackers.check_installed(config.track)
    folder = RunFolder(Path(config.output))
    with contextlib.ExitStack() as stack:
        found: checkpoints.Checkpoint | None = None
        damaged: list[str] = []
        changed: list[str] = []
        if resume:
            changed = folder.check_resumable(config)
            # Before looking for checkpoints: the one found must still be the newest when the first step begins.
            stack.enter_context(folder.lock())
            found, damaged = checkpoints.newest(folder.path)
            if damaged and found is None:
                raise _all_damaged(folder, damaged)
        else:
            folder.check_new()
        stored = _stored_plan(folder) if resume else None
        prepared = prepare(config, found.folder if found else None, stored, resumed=resume)
        stack.enter_context(contextlib.closing(prepared.engine))
        _check_keep(config, prepared)
        samples = Samples(config, prepared) if config.samples.prompts else None
        facts = _facts(config, prepared)
        if resume:
            changed += folder.compare(facts)
        if not resume:
            stack.enter_context(folder.lock())
            folder.check_new()
        stopper = stack.enter_context(Stopper(cancel, config.train.stop_after))
        with writing(str(folder.events)):
            log = EventLog(folder.events, [on_event] if on_event else [], config.train.on_save_error)
        events = stack.enter_context(contextlib.closing(log))
        if resume:
            checkpoints.set_damaged_aside(folder.path, found.step if found else 0)
        files.remove_leftovers(folder.path, [".*.tmp", ".adapter-*"])
        tracking = trackers.Tracking(folder.path, config, events, resumed=resume and not events.is_new)
        stack.enter_context(contextlib.closing(tracking))
        if events.is_new or not folder.is_described():
            try:
                _write_start(folder, config, prepared, facts, anew=events.is_new)
            except OSError as error:
                # Without a config nothing of the run is there yet, and nothing can be resumed.
                fix = "make room, and start it again" + (" with --resume" if folder.config.exists() else "")
                raise UserError(
                    Problem(str(folder.path), f"can't be written: {error.strerror or error}", fix)
                ) from error
        return _ActiveRun(config, folder, prepared, events, stopper, found, samples).run(
            [*(f"damaged checkpoint passed over: {line}" for line in damaged), *tracking.problems], changed
        )


class _ActiveRun:
    """The part of a run that happens inside its locked folder."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        prepared: Prepared,
        events: EventLog,
        stopper: Stopper,
        found: checkpoints.Checkpoint | None,
        samples: Samples | None,
    ):
        self.samples = samples
        self.told_of_budget = False
        self.config, self.folder, self.prepared, self.events = config, folder, prepared, events
        settings = config.train
        assert settings.learning_rate is not None, "the config is resolved"
        self.engine = prepared.engine
        groups = parameter_groups(
            prepared.model,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            lora_plus_ratio=config.lora.lora_plus_ratio,
        )
        self.optimiser = optimiser.build(groups, settings)
        if config.compile == "auto":
            self.engine.on_compile_failure = self._not_compiled
        if "memory" in config.log:
            self.engine.on_phase = self._log_memory
        self.reference: Reference | None = None
        self.referenced: dict[str, Referenced] = {}
        self.reference_keys: dict[str, str | None] | None = None
        if prepared.objective.uses_reference:
            self.reference = Reference(self.engine, prepared.model, frozen_adapter(config))
            if config.dpo.reference == "cached":
                sets = {"train": prepared.train, "validation": prepared.valid}
                self.referenced = {name: Referenced(data) for name, data in sets.items() if data}
        self.batches = batcher(config, self.referenced.get("train", prepared.train))
        self.valid = choose_rows(prepared.valid.trees, settings.eval_rows) if prepared.valid else []
        self.loop = Loop(
            train=settings,
            engine=self.engine,
            objective=prepared.objective,
            optimiser=self.optimiser,
            batches=self.batches,
            steps=prepared.length.steps,
            micro_batches=prepared.length.micro_batches,
            device=prepared.device,
            events=events,
            stopper=stopper,
            validate=self._validate if prepared.valid else None,
            save=self._save,
            sample=self._sample if samples is not None else None,
            replan=self._replan,
            refer=self.reference.attach if self.reference and not self.referenced else lambda trees: trees,
        )
        if found is not None:
            checkpoints.restore(found, prepared.model, self.optimiser)
            self.batches.load_state(found.state["batches"])
            self.loop.progress = Progress(**found.state["progress"])
            self.loop.last_checkpoint, self.loop.saved_step = found.folder, found.step
            self.reference_keys = found.state.get("references")

    def run(self, warnings: list[str], changed: list[str]) -> Run:
        loop, progress = self.loop, self.loop.progress
        measure.reset_peak(self.prepared.device)
        try:
            self._announce(warnings, changed)
            # A kill may have come between a checkpoint and the removal of older ones.
            self._prune(progress)
            self._refer()
            reason = loop.run()
            self._tell_of_budget()
            metrics = self._metrics("stopped" if reason else "done")
            if reason:
                files.write_json(self.folder.metrics, metrics)
                last = str(loop.last_checkpoint) if loop.last_checkpoint else None
                self.events.emit("stopped", step=progress.step, reason=reason, checkpoint=last)
                self.events.sync()
                return Run(self.folder.path, None, reason, progress.step, loop.steps, metrics)
            with files.disk_errors():
                save_adapter(self.prepared.model, self.folder.adapter)
            files.sync_folder(self.folder.path)
            self._write_measured(metrics)
            files.write_json(self.folder.metrics, metrics)
            self.events.emit("done", step=progress.step, adapter=str(self.folder.adapter), **_summary(metrics))
            self.events.sync()
            return Run(self.folder.path, self.folder.adapter, None, progress.step, loop.steps, metrics)
        except torch.OutOfMemoryError as error:
            self._failed(error)
            fix = "start anew with a smaller memory.chunk_tokens or boundary_store: host (init_adapter: a checkpoint)"
            raise DoesNotFit(Problem(f"step {progress.step + 1}", "the device ran out of memory", fix)) from error
        except OSError as error:
            self._failed(failure := self._disk_failure(error))
            raise failure from error
        except Exception as error:
            self._failed(error)
            raise

    def _replan(self, step: int, failure: str) -> None:
        """Another plan after the device ran out of memory, one that needs less; the same where there is none.

        What was held is given back first, so the same plan may succeed: memory in pieces, or a passing neighbour.
        """
        gc.collect()
        if self.prepared.device.type == "cuda":
            torch.cuda.empty_cache()
        plan = files.read_json(self.folder.plan)
        predicted = plan["predicted"]
        planned = Planned(self.engine.plan, "no smaller plan is known: once more by the same", predicted)
        if predicted is not None:
            with contextlib.suppress(DoesNotFit):
                less = int(_LESS * predicted["needed_bytes"])
                found = plan_run(self.config, self.engine, self.prepared.train, less)
                planned = planned if found.plan == planned.plan else found
        self.engine.set_plan(planned.plan)
        plan |= {"plan": planned.plan.as_dict(), "reason": planned.reason, "predicted": planned.predicted}
        files.write_json(self.folder.plan, plan)
        self.events.emit(
            "replanned",
            step=step,
            reason=" ".join(failure.split())[:300],
            plan=planned.plan.as_dict(),
            plan_reason=planned.reason,
            predicted=_short(planned.predicted),
        )

    def _tell_of_budget(self) -> None:
        """A process that took more than it was allowed does not end with a word of it by itself, as a device does."""
        allowed, peak = asked_bytes(self.config), self.loop.peak_bytes()
        if self.told_of_budget or allowed is None or peak <= allowed:
            return
        self.told_of_budget = True
        why = " (in bf16 on a CPU every new length takes some: docs/memory.md)" if self._rounds_on_cpu else ""
        reason = f"{size(peak)} were taken at the peak, and memory allows {size(allowed, up=False)}{why}"
        self.events.emit("warning", step=self.loop.progress.step, reason=reason)

    @property
    def _rounds_on_cpu(self) -> bool:
        return self.prepared.device.type == "cpu" and self.engine.stack.dtype == torch.bfloat16

    def _not_compiled(self, reason: str) -> None:
        self.events.emit("warning", step=self.loop.progress.step, reason=f"{reason}; the run goes on without")

    def _log_memory(self, phase: str, layer: int | None) -> None:
        """One event for each phase of a walk."""
        peak = self.loop.take_peak()
        self.events.emit(
            "memory",
            step=self.loop.progress.step + 1,
            phase=phase,
            layer=layer,
            peak_bytes=peak,
            active_bytes=measure.active_bytes(self.prepared.device),
        )

    def _disk_failure(self, error: OSError) -> RunFailed:
        step, last = self.loop.progress.step, self.loop.last_checkpoint
        where = f" ({error.filename})" if error.filename else ""
        saved = f"the last checkpoint is {last}" if last else "there is no checkpoint yet"
        return RunFailed(
            f"step {step}: {error.strerror or error}{where}; {saved}; go on with --resume when it is mended"
        )

    def _refer(self) -> None:
        """Fills in the reference log-probs of every row that the run's steps and validations see."""
        if not self.referenced:
            return
        step, loop = self.loop.progress.step, self.loop

        def tell(found: dict[str, Any]) -> None:
            if "problem" in found:
                reason = f"cached reference log-probs {found['path']}: {found['problem']}"
                self.events.emit("warning", step=step, reason=reason)
            else:
                self.events.emit("reference", step=step, split=split, **found)

        assert self.reference is not None
        for split, data in self.referenced.items():
            if split == "train":
                # Of a resumed run all, too: values are then computed in the same company, if the cache is gone.
                rows = _rows_seen(self.batches, loop.micro_batches, len(data.trees))
            else:
                rows = chosen_rows(len(data.trees), self.config.train.eval_rows)
            data.fill(self.reference, rows, tell, stopped=lambda: loop.stopper.reason)
        if "validation" in self.referenced:
            self.valid = choose_rows(self.referenced["validation"].trees, self.config.train.eval_rows)
        keys = {split: data.key for split, data in self.referenced.items()}
        if self.reference_keys not in (None, keys):
            raise RunFailed(
                f"step {step}: the reference model or its data is not what this run's checkpoint was trained against; "
                "put the old one back, or start a new run with init_adapter"
            )
        self.reference_keys = keys

    def _validate(self) -> Any:
        assert self.prepared.valid is not None
        if self.reference is not None and self.valid[0].reference is None:
            # Online, and the frozen model gives the same every time.
            self.valid = self.reference.attach_all(self.valid)
        return validate(
            self.engine,
            self.prepared.objective,
            self.valid,
            batch_size=self.config.train.batch_size,
            skipped=len(self.prepared.valid) - len(self.valid),
            stopped=lambda: self.loop.stopper.reason,
        )

    def _sample(self) -> dict[str, Any]:
        assert self.samples is not None
        return self.samples(lambda: self.loop.stopper.reason)

    def _save(self, progress: Progress) -> Path:
        self._tell_of_budget()
        state = {
            "progress": progress.as_dict(),
            "batches": self.batches.state(),
            "references": self.reference_keys,
            "config": self.config.digest,
        }
        saved = checkpoints.save(self.folder.path, progress.step, self.prepared.model, self.optimiser, state)
        self._prune(progress)
        return saved

    def _prune(self, progress: Progress) -> None:
        keep = self.config.train.keep
        try:
            checkpoints.prune(self.folder.path, keep, _scores(keep, progress.trajectory))
        except OSError as error:
            reason = f"old checkpoints can't be removed ({error.strerror or error})"
            self.events.emit("warning", step=progress.step, reason=reason, problem="prune")

    def _failed(self, error: BaseException) -> None:
        last = str(self.loop.last_checkpoint) if self.loop.last_checkpoint else None
        reason = str(error) or type(error).__name__
        rows = error.rows if isinstance(error, RunFailed) else []
        # A full disk may be why the run failed: the reason must not be lost over telling it.
        with contextlib.suppress(OSError):
            self.events.emit("failed", step=self.loop.progress.step, reason=reason, rows=rows, checkpoint=last)
            files.write_json(self.folder.metrics, self._metrics("failed"))

    def _announce(self, warnings: list[str], changed: list[str]) -> None:
        step = self.loop.progress.step
        if self.events.is_new:
            self._describe()
        else:
            last = str(self.loop.last_checkpoint) if self.loop.last_checkpoint else None
            self.events.emit("resumed", step=step, steps=self.loop.steps, checkpoint=last, changed=changed)
        for reason in [*warnings, *self.prepared.warnings]:
            self.events.emit("warning", step=step, reason=reason)

    def _describe(self) -> None:
        prepared, config = self.prepared, self.config
        report, length = prepared.train.report, prepared.length
        self.events.emit(
            "meta",
            run=self.folder.path.name,
            folder=str(self.folder.path.absolute()),
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            method=config.method,
            model=config.model,
            steps=self.loop.steps,
            micro_batches=self.loop.micro_batches,
            rows=len(prepared.train),
            tokens=report.tokens,
            trained_tokens=report.trained,
            epochs=round(length.epochs, 4),
            seen_rows=sum(length.rows),
            seen_tokens=length.tokens,
            valid_rows=len(self.valid),
            trainable_parameters=sum(p.numel() for p in prepared.model.parameters() if p.requires_grad),
            data=[*report.lines(), *length.lines(prepared.train.shares)],
            device=str(prepared.device),
            dtype=prepared.loaded.dtype_reason,
            config_digest=config.digest,
            plan=prepared.engine.plan.as_dict(),
            plan_reason=prepared.planned.reason,
            predicted=_short(prepared.planned.predicted),
            ranks=prepared.ranks.describe() if prepared.ranks else None,
        )

    def _metrics(self, status: str) -> dict[str, Any]:
        progress, loop = self.loop.progress, self.loop
        loop.count_time()
        return {
            "status": status,
            "step": progress.step,
            "steps": loop.steps,
            "loss": progress.loss,
            "best": {"step": progress.best_step, "loss": progress.best_loss} if progress.best_step else None,
            "best_margin": _best_margin(progress.trajectory),
            "validation": progress.trajectory[-1] if progress.trajectory else None,
            "trajectory": progress.trajectory,
            "skipped_steps": progress.skipped_steps,
            "tokens": progress.tokens,
            "trained_tokens": progress.trained_tokens,
            "seconds": progress.seconds,
            "wall_seconds": progress.wall_seconds,
            "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else None,
            "peak_bytes": loop.peak_bytes(),
        }

    def _write_measured(self, metrics: dict[str, Any]) -> None:
        plan = files.read_json(self.folder.plan)
        plan["measured"] = {
            "peak_bytes": metrics["peak_bytes"],
            "seconds": metrics["seconds"],
            "seconds_per_step": metrics["seconds"] / metrics["step"] if metrics["step"] else None,
            "tokens_per_second": metrics["tokens_per_second"],
        }
        files.write_json(self.folder.plan, plan)
        metrics["predicted"] = _short(plan["predicted"])


def _rows_seen(batches: Batcher, count: int, most: int) -> list[int]:
    """Indices of the rows of the first `count` batches, of `most` that there are."""
    rows: set[int] = set()
    for epoch in batches.filled_epochs():
        part = batches.plan(epoch)[:count]
        rows.update(row for batch in part for row in batch)
        count -= len(part)
        if count <= 0 or len(rows) == most:
            break
    return sorted(rows)


def _write_start(folder: RunFolder, config: RunConfig, prepared: Prepared, facts: dict[str, Any], anew: bool) -> None:
    """Writes what describes the run; with `anew` false only what somebody removed of it."""
    if anew or not folder.config.exists():
        files.write_text(folder.config, config.anchored().to_yaml())
    if anew or not folder.environment.exists():
        files.write_json(folder.environment, facts)
    if not anew and folder.plan.exists():
        return
    plan = {
        "memory": config.to_dict()["memory"],
        "reason": prepared.planned.reason,
        "plan": prepared.engine.plan.as_dict(),
        "compile": prepared.planned.compile,
        "ranks": prepared.ranks.describe() if prepared.ranks else None,
    }
    files.write_json(folder.plan, plan | {"predicted": prepared.planned.predicted, "measured": None})


def _stored_plan(folder: RunFolder) -> Planned | None:
    """The plan that a run was walked by last; None where it didn't get that far."""
    stored = folder.stored_plan()
    if stored is None:
        return None
    try:
        compiled = stored.get("compile") is True
        return Planned(Plan(**stored["plan"]), stored["reason"], stored.get("predicted"), compile=compiled)
    except TypeError as error:
        fix = "resume with the version that wrote it, or remove it to have the run planned anew"
        raise UserError(Problem(str(folder.plan), f"holds no plan that is known here ({error})", fix)) from None


def _short(predicted: dict[str, Any] | None) -> dict[str, Any] | None:
    names = ("tokens", "peak_bytes", "host_bytes", "disk_bytes", "seconds_per_step")
    return predicted and {name: predicted[name] for name in names}


def _facts(config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    """What environment.json holds, and a resumed run is compared with."""
    data = {"train": prepared.train.fingerprint, "valid": prepared.valid.fingerprint if prepared.valid else None}
    return {
        **environment.describe(prepared.device),
        "seed": config.train.seed,
        "data": data,
        "model": fingerprint(prepared.model),
        "trust_remote_code": config.trust_remote_code,
    }


def _check_keep(config: RunConfig, prepared: Prepared) -> None:
    if config.train.keep.startswith("best") and prepared.valid is None:
        reason = "the best checkpoint can't be told without validation data"
        raise UserError(Problem("train.keep", reason, "name some with valid, or use all or last N"))


def _all_damaged(folder: RunFolder, damaged: list[str]) -> UserError:
    """Going on from nothing would throw away what a person may be able to mend, so that must be asked for."""
    *others, last = [line.partition(": ") for line in damaged]
    fix = (
        f"put a whole one back from a copy; or, to take the run again from step 0, remove {folder.path / 'checkpoints'}"
        " and resume; or start a new run with init_adapter"
    )
    return UserError([*(Problem(place, why) for place, _, why in others), Problem(last[0], last[2], fix)])


def _scores(keep: str, trajectory: list[dict[str, Any]]) -> dict[int, float]:
    """By step, what `keep: best` looks for the lowest of."""
    name = keep.removeprefix("best").strip() or "loss"
    sign = 1.0 if name == "loss" else -1.0
    return {entry["step"]: sign * entry[name] for entry in trajectory if name in entry}


def _best_margin(trajectory: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The validation with the widest margin, of methods that have one."""
    found = [entry for entry in trajectory if math.isfinite(entry.get("margin", math.nan))]
    best = max(found, key=lambda entry: entry["margin"], default=None)
    return best and {"step": best["step"], "margin": best["margin"]}


def _summary(metrics: dict[str, Any]) -> dict[str, Any]:
    names = ("loss", "best", "validation", "seconds", "tokens", "tokens_per_second", "peak_bytes")
    return {name: metrics[name] for name in names} | {"predicted": metrics.get("predicted")}
