// Several runs side by side: curves in one chart, figures in one table, and what differs in their configs.

import { get, listen, throttled } from "./api.js";
import { Charts } from "./charts.js";
import { alertLine, duration, el, failure, number, pace, runLink, size } from "./dom.js";

export async function showComparison(view, names) {
  const table = el("section"), alerts = el("section"), plots = el("section"), difference = el("section"), said = el("div");
  const states = new Map();
  view.replaceChildren(el("h1", {}, "Comparison"), said, table, alerts, plots, difference);
  const charts = new Charts(plots, (range) => load(range));
  async function load(range = charts.options.range) {
    charts.set(await Promise.all(names.map(async (name) => {
      const query = [["run", name], ["points", 600]];
      if (range) query.push(["first", range[0]], ["last", range[1]]);
      return { name, series: await get("series", query) };
    })));
  }
  const drawStates = () => {
    const shown = names.map((name) => states.get(name)).filter(Boolean);
    table.replaceChildren(figures(shown, names));
    alerts.replaceChildren(...shown.flatMap((facts) => facts.alerts.map((alert) => alertLine(alert, facts.run))));
  };
  const reload = throttled(() => load().catch((error) => said.replaceChildren(failure(error))), 2000);
  for (const facts of await Promise.all(names.map((name) => get("run", [["run", name]])))) states.set(facts.run, facts);
  drawStates();
  await load();
  difference.replaceChildren(...differenceTable(await get("diff", names.map((name) => ["run", name]))));
  const stop = listen(names, (facts) => { states.set(facts.run, facts); drawStates(); reload(); });
  return () => { stop(); reload.cancel(); charts.close(); };
}

function figures(states, names) {
  const heads = ["run", "status", "step", "loss", "validation", "best", "accuracy", "margin", "a step", "tokens/s", "peak", "time"];
  const rows = states.map((facts) => {
    const values = [
      `${facts.step}/${facts.steps}`, number(facts.smoothed_loss), number(facts.validation?.loss), number(facts.best_validation?.loss),
      number(facts.validation?.accuracy ?? facts.accuracy), number(facts.validation?.margin ?? facts.margin), pace(facts.seconds_per_step),
      facts.tokens_per_second === null ? "-" : Math.round(facts.tokens_per_second).toLocaleString("en"), size(facts.peak_bytes), duration(facts.elapsed_seconds),
    ];
    return el("tr", {},
      el("td", {}, el("i", { class: `swatch c${names.indexOf(facts.run) % 8}` }), el("a", { href: runLink(facts.run) }, facts.run)),
      el("td", {}, el("span", { class: `status ${facts.status}` }, facts.status)),
      ...values.map((value) => el("td", { class: "number" }, value)));
  });
  const head = el("tr", {}, ...heads.map((text, index) => el("th", { class: index > 1 ? "number" : "" }, text)));
  return el("div", { class: "scroll" }, el("table", { id: "comparison" }, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function differenceTable({ runs, rows, same }) {
  const told = rows.map((row) => el("tr", {}, el("th", {}, row.key), ...row.values.map((value) => el("td", {}, value ?? "-"))));
  return [
    el("h2", {}, "Config"),
    el("p", { class: "quiet" }, `${rows.length} keys differ, ${same} are the same.`),
    rows.length ? el("div", { class: "scroll" }, el("table", { id: "difference" }, el("thead", {}, el("tr", {}, el("th", {}, "key"), ...runs.map((run) => el("th", {}, run)))), el("tbody", {}, ...told))) : "",
  ];
}
