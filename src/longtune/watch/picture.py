"""A run's curves as a PNG, with matplotlib (the extra `report`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longtune.watch.charts import charts_for
from longtune.watch.report import POINTS, SMOOTHING
from longtune.watch.runs import WatchedRun
from longtune.watch.series import smooth

_COLOURS = ("#14697a", "#c4621a")


def draw(run: WatchedRun, file: Path) -> None:
    """Writes the picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    # The object interface: no window system is looked for, and nothing global is changed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    state = run.state
    charts = [chart for chart in charts_for(state.has_pairs) if np.isfinite(state.train.column(chart.train[0])).any()]
    rows = max(1, -(-len(charts) // 2))
    figure = Figure(figsize=(11, 0.6 + 2.6 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    # A dollar sign in a name is no formula.
    title = f"{run.name}: {state.meta.get('method', '')} on {state.meta.get('model', '')}, {run.status}"
    figure.suptitle(title, parse_math=False)
    for index, chart in enumerate(charts):
        axes = figure.add_subplot(rows, 2, index + 1)
        scale = chart.unit
        weight = SMOOTHING if chart.smoothed and len(state.train) > 20 else 0.0
        for number, metric in enumerate(chart.train):
            found = state.train.buckets(metric, POINTS)
            label = metric.removesuffix("_bytes") if len(chart.train) > 1 else "training"
            if weight:
                axes.plot(found.step, found.mean / scale, color=_COLOURS[number], alpha=0.25, linewidth=0.8)
            values = smooth(found.mean, weight) / scale
            axes.plot(found.step, values, color=_COLOURS[number], label=label, linewidth=1.5)
        for metric in chart.validation:
            found = state.validation.buckets(metric, POINTS)
            if np.isfinite(found.mean).any():
                axes.plot(
                    found.step, found.mean, "o-", color=_COLOURS[1], label="validation", markersize=4, linewidth=1
                )
        if chart.key == "memory" and run.surroundings.predicted_peak:
            axes.axhline(run.surroundings.predicted_peak / scale, color="#b8336a", linestyle="--", label="planned")
        axes.set_title(chart.title + (", GiB" if chart.key == "memory" else ""), fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        if len(axes.get_lines()) > 1:
            axes.legend(fontsize=8)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
