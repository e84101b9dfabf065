// Line charts, drawn by uPlot. Around it: a legend, values under the pointer or by the arrow keys, and a spoken value.

import { make, write } from "./words.js";

const DASHES = [null, [7, 4], [2, 4], [9, 3, 2, 3]];
const AXIS_FONT = "11px system-ui, sans-serif", AXIS_PX = 64, PX_PER_LABEL = 90;
// Distances of marks: whole seconds, whole steps.
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
const WHOLE = Array.from({ length: 12 }, (_, i) => [1, 2, 5].map((m) => m * 10 ** i)).flat();
const COLOURS = matchMedia("(prefers-color-scheme: dark)");

export const hasCharts = () => typeof globalThis.uPlot === "function";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// All lines over one axis: [xs, ys of line 0, …], undefined where a line has no point.
function align(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns = lines.map((line) => { const ys = new Array(xs.length); for (const [x, y] of line.points) ys[place.get(x)] = y; return ys; });
  return [xs, ...columns];
}

// The point of a column that is closest to a place on the axis; a line that ended is read at its end.
function nearest(xs, ys, at) {
  let low = at, high = at;
  while (low >= 0 && ys[low] === undefined) low -= 1;
  while (high < xs.length && ys[high] === undefined) high += 1;
  if (low < 0 || high >= xs.length) return low < 0 ? high : low;
  return xs[at] - xs[low] <= xs[high] - xs[at] ? low : high;
}

export class Chart {
  // writeX, writeY: how a value is written. The lines come with draw().
  constructor(place, { label, writeX, writeY, height = 220, zero = false, isTime = () => false }) {
    Object.assign(this, { label, writeX, writeY, height, zero, isTime, lines: [], at: null, plot: null, made: "" });
    this.area = make("div", { class: "plot", role: "img", tabindex: 0, "aria-label": label });
    this.nothing = make("p", { class: "empty" }, "nothing to show yet");
    this.tip = make("div", { class: "tip", hidden: true });
    this.voice = make("p", { class: "unseen", "aria-live": "polite" });
    this.legend = make("ul", { class: "legend" });
    this.box = make("div", { class: "chart", hidden: !hasCharts() }, this.area, this.nothing, this.tip, this.voice);
    place.append(this.box, this.legend);
    this.area.addEventListener("blur", () => this.point(null));
    this.area.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.fit()).observe(this.box);
    COLOURS.addEventListener("change", () => { this.made = ""; this.show(); });
  }

  // lines: [{name, look, dash, thick, points: [[x, y], …]}]; those that are thick lie above the others
  draw(lines) {
    this.lines = lines.filter((line) => line.points.length).sort((a, b) => Boolean(a.thick) - Boolean(b.thick));
    if (hasCharts()) this.show();
  }

  show() {
    const lines = this.lines;
    this.nothing.hidden = lines.length > 0;
    this.area.hidden = !lines.length;
    const shown = this.told();
    this.legend.replaceChildren(...shown.map((line) => make("li", {}, make("span", { class: `swatch ${line.look}` }), line.name)));
    if (!lines.length) return;
    const data = align(lines), made = JSON.stringify([this.isTime(), lines.map((line) => [line.look, line.dash, line.thick])]);
    if (made === this.made) this.plot.setData(data);
    else {
      this.made = made;
      this.plot?.destroy();
      this.plot = new globalThis.uPlot(this.options(), data, this.area);
    }
    const newest = shown.slice(0, 8).map((line) => `${line.name} ${this.writeY(line.points[line.points.length - 1][1])}`).join(", ");
    const points = lines.reduce((sum, line) => sum + line.points.length, 0);
    this.area.setAttribute("aria-label", `${this.label}: ${lines.length} lines, ${points} points. Newest: ${newest}. Arrow keys read values.`);
    if (this.at !== null) this.mark(this.at);
  }

  // In the order in which a reader is told of them.
  told() { return [...this.lines.filter((line) => line.thick), ...this.lines.filter((line) => !line.thick)]; }

  options() {
    const axis = { stroke: colour("soft"), font: AXIS_FONT, ticks: { show: false } }, { writeX, writeY } = this;
    const dot = (look, thick) => ({ show: true, size: thick ? 8 : 6, width: 0, fill: colour(look), filter: (u, i) => [u.data[i].findLastIndex((y) => y !== undefined)] });
    return {
      width: this.width(),
      height: this.height,
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 7, width: 1 },
        dataIdx: (u, i, at) => (i ? nearest(u.data[0], u.data[i], at) : at),
      },
      scales: { x: { time: this.isTime() }, y: { range: (u, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 28, space: PX_PER_LABEL, grid: { show: false }, incrs: this.isTime() ? SECONDS : WHOLE, values: (u, marks) => marks.map(writeX) },
        { ...axis, size: AXIS_PX, grid: { stroke: colour("rule"), width: 1 }, values: (u, marks) => marks.map(writeY) },
      ],
      series: [{}, ...this.lines.map(({ look, dash, thick }) => ({
        stroke: colour(look), width: thick ? 3 : 1.6, alpha: thick ? 1 : 0.8, dash: dash || undefined, spanGaps: true, points: dot(look, thick),
      }))],
      hooks: { setCursor: [(u) => this.tell(u)] },
    };
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (this.zero) low = Math.min(low, 0);
    if (low === high) { high += Math.abs(high) * 0.1 || 1; low -= this.zero ? 0 : Math.abs(low) * 0.1; }
    const room = (high - low) * 0.06;
    return [this.zero && low >= 0 ? low : low - room, high + room];
  }

  width() { return Math.max(this.box.clientWidth, 120); }

  fit() {
    if (this.plot && this.box.clientWidth && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: this.height });
  }

  // Values at a place of the axis; null: none.
  point(place) {
    this.at = place;
    if (place === null) this.plot?.setCursor({ left: -10, top: -10 });
    else this.mark(place);
  }

  mark(x) { this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 0 }); }

  key(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") { this.point(null); return; }
    if (!way || !this.plot) return;
    event.preventDefault();
    const xs = this.plot.data[0], before = this.at === null ? -1 : xs.findIndex((x) => x >= this.at);
    const now = this.at === null ? (way > 0 ? 0 : xs.length - 1) : before < 0 ? xs.length - 1 : before + way;
    this.point(xs[Math.min(Math.max(now, 0), xs.length - 1)]);
    write(this.voice, [...this.tip.children].map((each) => each.textContent).join(", "));
  }

  tell(plot) {
    const at = plot.cursor.idx, left = plot.cursor.left;
    this.tip.hidden = at === null || at === undefined || left < 0;
    if (this.tip.hidden) return;
    const [xs, ...columns] = plot.data;
    const rows = this.told().slice(0, 10).map((line) => {
      const ys = columns[this.lines.indexOf(line)];
      return make("p", {}, make("span", { class: `swatch ${line.look}` }), `${line.name} ${this.writeY(ys[nearest(xs, ys, at)])}`);
    });
    this.tip.replaceChildren(make("p", { class: "soft" }, this.writeX(xs[at])), ...rows);
    const here = plot.over.offsetLeft + left + 12, room = this.tip.offsetWidth;
    this.tip.style.left = `${here + room > this.width() ? Math.max(0, here - room - 24) : here}px`;
  }
}

// Each name keeps its look for as long as the page is open.
export class Looks {
  constructor() { this.of = new Map(); }
  find(name) {
    if (!this.of.has(name)) this.of.set(name, this.of.size);
    const place = this.of.get(name);
    return { look: `c${place % 8}`, dash: DASHES[Math.floor(place / 8) % DASHES.length] };
  }
}
