// Asking the server. Errors carry what it said.

async function answer(response) {
  if (response.ok) return response.json();
  const text = await response.text();
  let reason = text;
  try { reason = JSON.parse(text).error; } catch { /* plain text already */ }
  throw new Error(reason || `the server answered ${response.status}`);
}

export function get(path, query = []) {
  const asked = new URLSearchParams(query).toString();
  return fetch(asked ? `/api/${path}?${asked}` : `/api/${path}`).then(answer);
}

export function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }).then(answer);
}

// Changes as they come: of these runs, or of the list without any. Returns a function that ends it.
export function listen(names, onData) {
  const asked = new URLSearchParams(names.map((name) => ["run", name])).toString();
  const source = new EventSource(asked ? `/api/stream?${asked}` : "/api/stream");
  const link = document.getElementById("link");
  const shown = (text, lost) => { link.textContent = text; link.className = lost ? "lost" : ""; };
  source.addEventListener(names.length ? "run" : "runs", (event) => onData(JSON.parse(event.data)));
  source.onopen = () => shown("live", false);
  source.onerror = () => shown("no connection to longtune watch", true);
  return () => { source.close(); shown("", false); };
}

// Runs work at most once in so many milliseconds, and once more after the last call.
export function throttled(work, milliseconds) {
  let waiting = null, last = 0;
  const call = () => { waiting = null; last = Date.now(); work(); };
  const ask = () => { waiting ??= setTimeout(call, Math.max(0, last + milliseconds - Date.now())); };
  ask.cancel = () => clearTimeout(waiting);
  return ask;
}
