// The page of one run: figures, alerts, curves, samples, plan against measured, events, config.

import { get, listen, post, throttled } from "./api.js";
import { Charts } from "./charts.js";
import { alertLine, duration, el, failure, figure, number, pace, size } from "./dom.js";

const OVER = new Set(["done", "failed", "stopped", "gone"]);

export async function showRun(view, name) {
  const head = el("section"), alerts = el("section"), said = el("div"), plots = el("section");
  const samples = el("section"), plan = el("section"), events = el("section"), rest = el("section");
  let page = await get("run", [["run", name]]);
  view.replaceChildren(head, said, alerts, plots, samples, plan, events, rest);
  const charts = new Charts(plots, (range) => loadSeries(range));
  const act = async (path) => {
    said.replaceChildren();
    try {
      await post(path, { run: name });
      const told = path === "stop" ? "Asked to stop: it saves a checkpoint after the step in work." : "Starting again from its newest checkpoint.";
      said.replaceChildren(el("div", { class: "alert", role: "status" }, told));
    } catch (error) { said.replaceChildren(failure(error)); }
  };

  const drawState = (facts) => {
    head.replaceChildren(...heading(facts, act));
    alerts.replaceChildren(...facts.alerts.map((alert) => alertLine(alert)));
  };
  async function loadSeries(range = charts.options.range) {
    const query = [["run", name], ["points", 800]];
    if (range) query.push(["first", range[0]], ["last", range[1]]);
    charts.set([{ name, series: await get("series", query), predicted: page.predicted_peak_bytes }]);
  }
  const drawPage = () => {
    plan.replaceChildren(...planTable(page));
    events.replaceChildren(...eventList(page.events));
  };
  const reload = throttled(async () => {
    try {
      page = await get("run", [["run", name]]);
      drawPage();
      await loadSeries();
      if (page.samples !== known) await drawSamples();
    } catch (error) { said.replaceChildren(failure(error)); }
  }, 2000);
  let known = 0;
  const drawSamples = async () => {
    known = page.samples;
    if (known) samples.replaceChildren(...sampleTable(await get("samples", [["run", name]])));
  };

  drawState(page);
  await loadSeries();
  drawPage();
  await drawSamples();
  rest.replaceChildren(...texts(page));
  const stop = listen([name], (facts) => { drawState(facts); reload(); });
  return () => { stop(); reload.cancel(); charts.close(); };
}

function heading(facts, act) {
  const share = facts.steps ? facts.step / facts.steps : 0;
  const what = [facts.method, facts.model && `on ${facts.model}`, facts.device, facts.dtype].filter(Boolean).join(", ");
  const buttons = [];
  if (facts.pid) buttons.push(el("button", { class: "danger", id: "stop", onclick: () => act("stop") }, "Stop after this step"));
  if (OVER.has(facts.status) && facts.status !== "done") buttons.push(el("button", { id: "resume", onclick: () => act("resume") }, "Resume"));
  const memory = facts.predicted_peak_bytes ? `peak memory of ${size(facts.predicted_peak_bytes)} planned` : "peak memory";
  const best = facts.best_validation ? `validation, best ${number(facts.best_validation.loss)} at ${facts.best_validation.step}` : "validation";
  const figures = [
    figure(`${facts.step.toLocaleString("en")} / ${facts.steps.toLocaleString("en")}`, "steps"),
    figure(number(facts.loss), `loss, smoothed ${number(facts.smoothed_loss)}`),
    facts.validation ? figure(number(facts.validation.loss), best) : null,
    facts.pairs ? figure(`${number(facts.correct)}/${number(facts.pairs)}`, `right in the step, margin ${number(facts.margin, 3)}`) : null,
    figure(facts.learning_rate === null ? "-" : facts.learning_rate.toExponential(2), "learning rate"),
    figure(number(facts.grad_norm), "gradient norm"),
    figure(facts.tokens_per_second === null ? "-" : Math.round(facts.tokens_per_second).toLocaleString("en"), `tokens/s, ${pace(facts.seconds_per_step)} a step`),
    figure(size(facts.peak_bytes), memory),
    figure(duration(facts.elapsed_seconds), facts.status === "running" ? `so far, ${duration(facts.eta_seconds)} to go` : "at work"),
  ];
  return [
    el("div", { class: "tools" }, el("h1", {}, facts.run), el("span", { class: `status ${facts.status}` }, facts.status), ...buttons),
    el("p", { class: "quiet" }, what),
    el("progress", { value: share, max: 1, "aria-label": "steps taken" }),
    el("div", { class: "figures" }, ...figures.filter(Boolean)),
  ];
}

function planTable(page) {
  const plan = page.plan;
  if (!plan) return [];
  const { predicted, measured } = { predicted: plan.predicted ?? {}, measured: plan.measured ?? {} };
  const now = { peak_bytes: page.peak_bytes, seconds_per_step: page.seconds_per_step, tokens_per_second: page.tokens_per_second };
  const told = (key, value) => (typeof value !== "number" ? String(value ?? "-") : key.endsWith("bytes") ? size(value) : number(value));
  const simple = (values) => Object.keys(values).filter((key) => values[key] === null || typeof values[key] !== "object");
  const keys = [...new Set([...simple(predicted), ...simple(measured), ...Object.keys(now)])];
  const rows = keys.map((key) => el("tr", {},
    el("th", {}, key.replaceAll("_", " ")),
    el("td", { class: "number" }, told(key, predicted[key])),
    el("td", { class: "number" }, told(key, measured[key] ?? now[key]))));
  const terms = Object.entries(predicted.terms ?? {}).filter(([, value]) => typeof value === "number");
  const parts = terms.map(([key, value]) => el("tr", {}, el("th", {}, key.replaceAll("_", " ")), el("td", { class: "number" }, size(value))));
  const settings = Object.entries(plan.plan ?? {}).map(([key, value]) => `${key}: ${value ?? "all"}`).join(", ");
  return [
    el("h2", {}, "Plan and measured"),
    el("p", { class: "quiet" }, settings, plan.reason ? ` (${plan.reason})` : ""),
    el("div", { class: "scroll" }, el("table", {}, el("tr", {}, el("th", {}, ""), el("th", { class: "number" }, "planned"), el("th", { class: "number" }, "measured")), ...rows)),
    parts.length ? el("details", {}, el("summary", {}, "Of the planned memory"), el("table", {}, ...parts)) : "",
  ];
}

// A prompt a row, its first answer beside that of a chosen evaluation.
function sampleTable(samples) {
  const body = el("tbody");
  const choice = el("select", { "aria-label": "evaluation" }, ...samples.map((found, index) => el("option", { value: index }, `step ${found.step}`)));
  const draw = () => {
    const chosen = samples[Number(choice.value)];
    body.replaceChildren(...chosen.items.map((item) => {
      const before = samples[0].items.find((other) => other.prompt === item.prompt);
      return el("tr", {}, ...[item.prompt, item.reference ?? "", before?.answer ?? "", item.answer ?? ""].map((text) => el("td", {}, el("pre", {}, text))));
    }));
  };
  choice.value = String(samples.length - 1);
  choice.addEventListener("change", draw);
  draw();
  const heads = ["prompt", "reference", `step ${samples[0].step}`];
  return [
    el("h2", {}, "Sample answers"),
    el("div", { class: "scroll" }, el("table", { id: "samples" }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {}, head)), el("th", {}, choice))), body)),
  ];
}

function eventList(events) {
  const items = [...events].reverse().flatMap((event) => event.lines.map((line) => el("li", {}, event.t ? el("span", { class: "quiet" }, `${new Date(event.t * 1000).toLocaleTimeString()}  `) : null, line)));
  return items.length ? [el("h2", {}, "Events"), el("ul", { class: "events" }, ...items)] : [];
}

function texts(page) {
  const parts = [];
  if (page.meta.data?.length) parts.push(el("h2", {}, "Data"), el("ul", {}, ...page.meta.data.map((line) => el("li", {}, String(line)))));
  if (page.config) parts.push(el("details", {}, el("summary", {}, "Config"), el("pre", {}, page.config)));
  if (page.environment) parts.push(el("details", {}, el("summary", {}, "Environment"), el("pre", {}, JSON.stringify(page.environment, null, 2))));
  return parts;
}
