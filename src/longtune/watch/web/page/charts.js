// Which metrics share a chart, and the charts of one run or of several.

import { el, number, size } from "./dom.js";
import { Plot } from "./plot.js";

const CHARTS = [
  { key: "loss", title: "Loss", train: ["loss"], validation: ["loss"], smoothed: true, large: true },
  { key: "accuracy", title: "Accuracy", train: ["accuracy"], validation: ["accuracy"], smoothed: true },
  { key: "margin", title: "Margin", train: ["margin"], validation: ["margin"], smoothed: true },
  { key: "learning_rate", title: "Learning rate", train: ["learning_rate"], told: (value) => value.toExponential(1) },
  { key: "grad_norm", title: "Gradient norm", train: ["grad_norm"], smoothed: true },
  { key: "tokens_per_second", title: "Tokens per second", train: ["tokens_per_second"], told: (value) => Math.round(value).toLocaleString("en") },
  { key: "memory", title: "Memory", train: ["peak_bytes", "active_bytes"], unit: 2 ** 30, told: size },
  { key: "seconds", title: "Seconds per step", train: ["seconds"], smoothed: true },
];
const KNOWN = new Set([...CHARTS.flatMap((chart) => chart.train), "step", "t", "tokens", "trained_tokens", "pairs", "correct", "rows", "skipped"]);
const NAMES = { peak_bytes: "peak", active_bytes: "active" };

export class Charts {
  // box: where they go. refetch(range): the range to look at has changed.
  constructor(box, refetch) {
    this.box = box;
    this.refetch = refetch;
    this.plots = new Map();
    this.data = [];
    this.options = { smoothing: 0.6, log: false, range: null };
    const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: this.options.smoothing, "aria-label": "smoothing" });
    const log = el("input", { type: "checkbox" });
    this.all = el("button", { onclick: () => this.zoom(null), disabled: true }, "Show all steps");
    const told = el("span", { class: "quiet" }, slider.value);
    slider.addEventListener("input", () => { told.textContent = slider.value; this.change({ smoothing: Number(slider.value) }); });
    log.addEventListener("change", () => this.change({ log: log.checked }));
    this.grid = el("div", { class: "charts" });
    box.replaceChildren(
      el("div", { class: "tools" }, el("label", {}, "Smoothing", slider, told), el("label", {}, log, "Logarithmic"), this.all,
        el("span", { class: "quiet" }, "Drag over a chart to zoom, double-click to see all.")),
      this.grid,
    );
  }

  change(options) {
    Object.assign(this.options, options);
    this.draw();
  }

  zoom(range) {
    this.all.disabled = range === null;
    this.change({ range });
    this.refetch(range);
  }

  // data: [{name, series, predicted}], one entry a run; several share their charts.
  set(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const several = this.data.length > 1;
    for (const chart of [...CHARTS, ...this.others()]) {
      const curves = this.data.flatMap((run, index) => curvesOf(chart, run, index, several));
      if (!curves.some((curve) => curve.step.length)) continue;
      let plot = this.plots.get(chart.key);
      if (!plot) {
        const place = el("div", { "data-chart": chart.key });
        this.grid.append(place);
        plot = new Plot(place, { title: chart.title, told: chart.told ?? ((value) => number(value)), unit: chart.unit, large: chart.large, onZoom: (range) => this.zoom(range) });
        this.plots.set(chart.key, plot);
      }
      plot.set(curves, this.options);
    }
  }

  // Metrics that no chart of ours names: a method's own.
  others() {
    const names = new Set(this.data.flatMap((run) => Object.keys(run.series.train)));
    return [...names].filter((name) => !KNOWN.has(name)).sort().map((name) => (
      { key: `own-${name}`, title: name.replaceAll("_", " "), train: [name], validation: [name], smoothed: true }
    ));
  }

  close() {
    for (const plot of this.plots.values()) plot.close();
  }
}

function curvesOf(chart, run, index, several) {
  const curves = [];
  const add = (found, label, more) => { if (found) curves.push({ label: several ? `${run.name} ${label}`.trim() : label, ...found, ...more }); };
  for (const [at, name] of chart.train.entries()) {
    if (several && at) break;
    const label = several ? "" : NAMES[name] ?? (chart.validation ? "training" : "");
    add(run.series.train[name], label, { form: "line", colour: several ? index : at, smoothed: chart.smoothed });
  }
  for (const name of chart.validation ?? []) {
    add(run.series.validation[name], "validation", { form: "points", colour: several ? index : 1 });
  }
  if (chart.key === "memory" && run.predicted && !several) {
    const step = run.series.train.peak_bytes?.step.slice(0, 1) ?? [];
    if (step.length) add({ step, mean: [run.predicted] }, "planned", { form: "level", colour: 4 });
  }
  return curves;
}
