// Which view the address asks for: #/ the list, #/run/NAME, #/compare/A/B.

import { showComparison } from "./compare.js";
import { el, failure, runLink } from "./dom.js";
import { showList } from "./list.js";
import { showRun } from "./run.js";

let leave = () => {};
let shown = 0;

async function route() {
  const view = document.getElementById("view");
  const mine = ++shown;
  leave();
  leave = () => {};
  let words;
  try { words = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent); } catch { words = []; }
  const [what, ...names] = words;
  document.getElementById("trail").replaceChildren(...trail(what, names));
  document.title = names.length ? `${names.join(", ")} - longtune` : "longtune";
  // A view that is still loading when another is asked for must not draw over it.
  const place = el("div");
  view.replaceChildren(place);
  try {
    let left;
    if (what === "run" && names.length === 1) left = await showRun(place, names[0]);
    else if (what === "compare" && names.length) left = await showComparison(place, names);
    else left = await showList(place);
    if (mine === shown) leave = left; else left();
  } catch (error) {
    place.replaceChildren(failure(error), el("p", {}, el("a", { href: "#/" }, "All runs")));
  }
  document.body.dataset.ready = String(mine);
}

function trail(what, names) {
  if (!names.length) return [];
  const links = names.map((name) => el("a", { href: runLink(name) }, name));
  return links.flatMap((link, index) => (index ? [", ", link] : [what === "compare" ? "compare " : "", link]));
}

addEventListener("hashchange", route);
route();
