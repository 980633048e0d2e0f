// A chart on a canvas: lines with a band from lowest to highest, points, levels; hover, zoom by dragging, log axis.
// Knows nothing of runs. Values come in buckets {step, mean, low?, high?}; null is a gap.

const PAD = { left: 62, right: 10, top: 8, bottom: 22 };

// Exponential moving mean, debiased as in Adam (arXiv:1412.6980, section 3). A gap stays, and changes nothing after it.
export function smooth(values, weight) {
  let total = 0, bias = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value;
    bias = weight * bias + (1 - weight);
    return total / bias;
  });
}

// Round numbers between two values, about `count` of them.
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

// Whole powers of ten, and 2 and 5 times them where there are few.
function logTicks(low, high) {
  const found = [];
  const factors = high - low > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of factors) {
      const at = power + Math.log10(factor);
      if (at >= low && at <= high) found.push(at);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

export class Plot {
  // box: the element that is filled. title: its heading. told(value): a value as text.
  // unit: what round numbers on the vertical axis are multiples of.
  // onZoom(range or null): a person chose [first, last], or all.
  constructor(box, { title, told = (value) => value.toPrecision(4), unit = 1, large = false, onZoom = () => {} }) {
    this.told = told;
    this.unit = unit;
    this.title = title;
    this.onZoom = onZoom;
    this.series = [];
    this.options = { smoothing: 0, log: false, range: null };
    box.classList.add("chart");
    box.classList.toggle("large", large);
    this.heading = document.createElement("h3");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    box.replaceChildren(this.heading, this.canvas, this.tip);
    this.box = box;
    this.hover = null;
    this.drag = null;
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => this.left());
    this.canvas.addEventListener("pointerdown", (event) => this.pressed(event));
    this.canvas.addEventListener("pointerup", (event) => this.released(event));
    this.canvas.addEventListener("dblclick", () => this.onZoom(null));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  close() {
    this.observer.disconnect();
  }

  // series: [{label, colour: 0..7, form: "line" | "points" | "level", step, mean, low, high, smoothed}]
  set(series, options) {
    this.series = series;
    Object.assign(this.options, options);
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    this.colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.drawn = this.series.map((one) => this.prepared(one));
    this.label();
    const area = { x: PAD.left, y: PAD.top, width: width - PAD.left - PAD.right, height: height - PAD.top - PAD.bottom };
    this.area = area;
    const ranges = this.ranges();
    pen.font = "11px system-ui, sans-serif";
    if (!ranges) {
      this.scaleX = null;
      pen.fillStyle = this.colour("quiet");
      pen.textAlign = "center";
      pen.fillText("nothing yet", width / 2, height / 2);
      return;
    }
    const { left, right, low, high } = ranges;
    this.scaleX = (step) => area.x + ((step - left) / (right - left)) * area.width;
    this.stepAt = (x) => left + ((x - area.x) / area.width) * (right - left);
    this.scaleY = (value) => area.y + ((high - value) / (high - low)) * area.height;
    this.axes(pen, ranges);
    pen.save();
    pen.beginPath();
    pen.rect(area.x, area.y, area.width, area.height);
    pen.clip();
    for (const one of this.drawn) this.curve(pen, one);
    this.marks(pen);
    pen.restore();
  }

  // Values as they are drawn: logarithms on a log axis, and the smoothed ones beside the plain ones.
  prepared(one) {
    const log = (value) => (value === null || !(value > 0) ? null : Math.log10(value));
    const map = (values) => (this.options.log ? values.map(log) : values);
    const mean = map(one.mean);
    const weight = one.smoothed ? this.options.smoothing : 0;
    return { ...one, plain: mean, line: weight ? smooth(mean, weight) : mean, bottom: map(one.low ?? one.mean), top: map(one.high ?? one.mean), weight };
  }

  ranges() {
    const chosen = this.options.range;
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    for (const one of this.drawn) {
      if (one.form === "level") continue;
      one.step.forEach((step, index) => {
        if (chosen && (step < chosen[0] || step > chosen[1])) return;
        const values = one.form === "points" ? [one.plain[index]] : [one.plain[index], one.line[index]];
        for (const value of values) {
          if (value === null) continue;
          left = Math.min(left, step); right = Math.max(right, step);
          low = Math.min(low, value); high = Math.max(high, value);
        }
      });
    }
    if (left > right) return null;
    for (const one of this.drawn) {
      const level = one.form === "level" ? one.plain[0] : null;
      // One that is near is worth seeing; a far one would flatten everything else.
      if (level !== null && level > low - (high - low) - Math.abs(low) && level < high + (high - low) + Math.abs(high)) {
        low = Math.min(low, level); high = Math.max(high, level);
      }
    }
    if (chosen) [left, right] = chosen;
    if (left === right) { left -= 0.5; right += 0.5; }
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return { left, right, low: low - pad, high: high + pad };
  }

  axes(pen, { left, right, low, high }) {
    const { area } = this;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const linear = () => ticks(low / this.unit, high / this.unit, Math.max(3, area.height / 40)).map((value) => value * this.unit);
    const rows = this.options.log ? logTicks(low, high) : linear();
    for (const value of rows) {
      const y = Math.round(this.scaleY(value)) + 0.5;
      pen.strokeStyle = this.colour("line");
      pen.beginPath(); pen.moveTo(area.x, y); pen.lineTo(area.x + area.width, y); pen.stroke();
      pen.fillStyle = this.colour("quiet");
      pen.fillText(this.told(this.options.log ? 10 ** value : value), area.x - 6, y);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (const step of ticks(left, right, Math.max(3, area.width / 80)).filter(Number.isInteger)) {
      pen.fillText(step.toLocaleString("en"), this.scaleX(step), area.y + area.height + 6);
    }
  }

  curve(pen, one) {
    const colour = this.colour(`c${one.colour % 8}`);
    pen.strokeStyle = pen.fillStyle = colour;
    if (one.form === "level") {
      pen.setLineDash([6, 4]);
      const y = this.scaleY(one.plain[0]);
      pen.beginPath(); pen.moveTo(this.area.x, y); pen.lineTo(this.area.x + this.area.width, y); pen.stroke();
      pen.setLineDash([]);
      return;
    }
    if (one.form === "points") {
      pen.lineWidth = 1;
      this.path(pen, one.step, one.plain);
      one.step.forEach((step, index) => {
        if (one.plain[index] === null) return;
        pen.beginPath(); pen.arc(this.scaleX(step), this.scaleY(one.plain[index]), 3.5, 0, 2 * Math.PI); pen.fill();
      });
      return;
    }
    pen.globalAlpha = 0.35;
    if (one.low) {
      pen.lineWidth = Math.max(1, Math.min(3, this.area.width / Math.max(1, one.step.length)));
      one.step.forEach((step, index) => {
        if (one.bottom[index] === null || one.top[index] === null) return;
        const x = this.scaleX(step), top = this.scaleY(one.top[index]), bottom = this.scaleY(one.bottom[index]);
        pen.beginPath(); pen.moveTo(x, Math.min(top, bottom - 1)); pen.lineTo(x, bottom); pen.stroke();
      });
    } else if (one.weight) {
      pen.lineWidth = 1;
      this.path(pen, one.step, one.plain);
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    this.path(pen, one.step, one.line);
  }

  path(pen, steps, values) {
    let drawing = false;
    pen.beginPath();
    steps.forEach((step, index) => {
      if (values[index] === null) { drawing = false; return; }
      if (drawing) pen.lineTo(this.scaleX(step), this.scaleY(values[index]));
      else pen.moveTo(this.scaleX(step), this.scaleY(values[index]));
      drawing = true;
    });
    pen.stroke();
  }

  marks(pen) {
    if (this.drag) {
      pen.fillStyle = this.colour("accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(this.drag.from, this.drag.to), this.area.y, Math.abs(this.drag.to - this.drag.from), this.area.height);
      pen.globalAlpha = 1;
    } else if (this.hover !== null) {
      pen.strokeStyle = this.colour("quiet");
      pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(this.hover, this.area.y); pen.lineTo(this.hover, this.area.y + this.area.height); pen.stroke();
    }
  }

  label() {
    const name = document.createElement("b");
    name.textContent = this.title;
    const words = [name];
    const told = [];
    for (const one of this.series) {
      const last = one.mean.findLast((value) => value !== null);
      const legend = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = `swatch c${one.colour % 8}`;
      legend.append(swatch, last === undefined ? one.label : `${one.label} ${this.told(last)}`);
      words.push(legend);
      if (last !== undefined) told.push(`${one.label} ${this.told(last)}`);
    }
    this.heading.replaceChildren(...words);
    this.canvas.setAttribute("aria-label", `${this.title}: ${told.join(", ") || "nothing yet"}`);
  }

  moved(event) {
    if (!this.scaleX) return;
    const x = event.offsetX;
    if (this.drag) this.drag.to = x;
    this.hover = x;
    const step = this.stepAt(x);
    const lines = [];
    for (const one of this.drawn) {
      if (one.form === "level" || !one.step.length) continue;
      const index = nearest(one.step, step);
      const value = one.mean[index];
      if (value === null) continue;
      const line = one.line[index] !== null && this.options.log ? 10 ** one.line[index] : one.line[index];
      const smoothed = one.weight && line !== null ? ` (smoothed ${this.told(line)})` : "";
      const spread = one.low && one.low[index] !== one.high[index] ? ` [${this.told(one.low[index])} to ${this.told(one.high[index])}]` : "";
      lines.push(`${one.label}, step ${Math.round(one.step[index]).toLocaleString("en")}: ${this.told(value)}${smoothed}${spread}`);
    }
    this.tip.textContent = lines.join("\n");
    this.tip.hidden = !lines.length;
    const right = x > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${x + 24}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - x + 24}px` : "auto";
    this.tip.style.top = "2.4rem";
    this.draw();
  }

  left() {
    this.hover = this.drag = null;
    this.tip.hidden = true;
    this.draw();
  }

  pressed(event) {
    if (!this.scaleX || event.button !== 0) return;
    this.drag = { from: event.offsetX, to: event.offsetX };
    this.canvas.setPointerCapture(event.pointerId);
  }

  released() {
    const drag = this.drag;
    this.drag = null;
    if (!drag || Math.abs(drag.to - drag.from) < 8) return;
    const [first, last] = [drag.from, drag.to].map((x) => this.stepAt(x)).sort((a, b) => a - b);
    this.onZoom([first, last]);
  }
}

// Index of the step that is nearest, by halving.
export function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - wanted) <= Math.abs(steps[high] - wanted) ? low : high;
}
