// Making elements, and values as text. All text goes in as text: nothing that a run says is ever read as markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  return String(Number(value.toPrecision(digits)));
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "-";
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function pace(seconds) {
  return seconds === null || seconds === undefined || seconds >= 60 ? duration(seconds) : `${number(seconds, 3)} s`;
}

export function runLink(name) {
  return `#/run/${encodeURIComponent(name)}`;
}

export function figure(value, name) {
  return el("div", { class: "figure" }, el("b", {}, value), el("span", {}, name));
}

export function alertLine({ level, text }, run = "") {
  return el("div", { class: `alert ${level === "error" ? "error" : ""}`, role: "alert" }, run ? `${run}: ${text}` : text);
}

export function failure(error) {
  return el("div", { class: "alert error", role: "alert" }, error.message);
}
