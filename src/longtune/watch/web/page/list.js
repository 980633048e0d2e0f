// The list of runs, the configs that can be started, and what was started from here.

import { get, listen, post } from "./api.js";
import { duration, el, failure, number, runLink } from "./dom.js";

export async function showList(view) {
  const chosen = new Set();
  const compare = el("button", { disabled: true, onclick: () => { location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join("/")}`; } }, "Compare");
  const body = el("tbody");
  const said = el("div");
  const starts = el("section");
  const jobs = el("section");
  const first = await get("runs");
  const heads = ["", "run", "status", "method", "step", "loss", "validation", "time left", "written"];
  view.replaceChildren(
    el("h1", {}, "Runs"),
    el("p", { class: "quiet" }, first.root),
    said,
    el("div", { class: "tools" }, compare, el("span", { class: "quiet" }, "Choose two to eight runs.")),
    el("div", { class: "scroll" }, el("table", { id: "runs" }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {}, head)))), body)),
    starts, jobs,
  );

  const draw = (runs) => {
    body.replaceChildren(...runs.map((run) => row(run, chosen, compare)));
    if (!runs.length) body.append(el("tr", {}, el("td", { colspan: heads.length, class: "quiet" }, "No run yet. One appears here with its first line of metrics.jsonl.")));
  };
  draw(first.runs);
  if (!first.may_start) return listen([], draw);

  const drawJobs = async () => jobs.replaceChildren(...jobList(await get("jobs"), said, drawJobs));
  const start = async (config) => {
    said.replaceChildren();
    try { await post("start", { config }); } catch (error) { said.replaceChildren(failure(error)); }
    await drawJobs();
  };
  starts.replaceChildren(...configList(await get("configs"), start));
  await drawJobs();
  const timer = setInterval(drawJobs, 3000);
  const stop = listen([], draw);
  return () => { clearInterval(timer); stop(); };
}

function row(run, chosen, compare) {
  const box = el("input", { type: "checkbox", "aria-label": `compare ${run.run}` });
  box.checked = chosen.has(run.run);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.run); else chosen.delete(run.run);
    compare.disabled = chosen.size < 2 || chosen.size > 8;
  });
  const alerts = run.alerts.length ? el("div", { class: "quiet" }, run.alerts[0].text) : null;
  return el("tr", {},
    el("td", {}, box),
    el("td", {}, el("a", { href: runLink(run.run) }, run.run), alerts),
    el("td", {}, el("span", { class: `status ${run.status}` }, run.status)),
    el("td", {}, run.method ?? "-"),
    el("td", {}, `${run.step}/${run.steps}`),
    el("td", {}, number(run.smoothed_loss)),
    el("td", {}, number(run.validation?.loss)),
    el("td", {}, run.status === "running" ? duration(run.eta_seconds) : "-"),
    el("td", {}, new Date(run.written * 1000).toLocaleString()),
  );
}

function configList(configs, start) {
  if (!configs.length) return [];
  const rows = configs.map((found) => el("tr", {},
    el("td", {}, found.config),
    el("td", {}, found.method ?? "sft"),
    el("td", {}, found.model ?? "-"),
    el("td", {}, found.output ?? "-"),
    el("td", {}, el("button", { onclick: () => start(found.config), "data-start": found.config }, "Start")),
  ));
  const heads = ["config", "method", "model", "output", ""];
  return [
    el("h2", {}, "Start a run"),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", {}, head)))), el("tbody", {}, ...rows))),
  ];
}

function jobList(jobs, said, redraw) {
  if (!jobs.length) return [];
  return [
    el("h2", {}, "Started from here"),
    ...jobs.map((job) => {
      const state = job.running ? `at work, process ${job.pid}` : `ended with exit code ${job.exit_code}`;
      const stop = async () => {
        try { await post("stop", { job: job.job }); } catch (error) { said.replaceChildren(failure(error)); }
        await redraw();
      };
      return el("div", {},
        el("div", { class: "tools" }, el("b", {}, job.what), el("span", { class: "quiet" }, state),
          job.running ? el("button", { class: "danger", onclick: stop }, "Stop") : null),
        el("pre", { class: "text" }, job.output || "nothing printed yet"));
    }),
  ];
}
