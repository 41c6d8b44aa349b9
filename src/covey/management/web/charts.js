// Line chart over time as SVG, in pixels, without smoothing. The axis starts at zero if the values are close to it.

import { h, number, plural, put, svg, time } from "/console/dom.js";

const EDGE = { left: 44, right: 10, top: 8, bottom: 18 };

export class Chart {
  /** `fromZero`: the axis always starts at zero. */
  constructor(title, unit, fromZero = false) {
    this.title = title;
    this.unit = unit;
    this.fromZero = fromZero;
    this.value = h("span", { class: "mono" });
    this.hint = h("span", { class: "quiet mono" });
    this.picture = svg("svg", { role: "img", height: 132 });
    this.grid = svg("g", { class: "grid" });
    this.marks = svg("g", { class: "faults" });
    this.area = svg("path", { class: "area" });
    this.path = svg("path", { class: "curve" });
    this.cursor = svg("line", { class: "cursor", y1: EDGE.top });
    this.picture.append(this.grid, this.marks, this.area, this.path, this.cursor);
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("span", { text: title }), this.hint, this.value), this.picture);
    this.points = [];
    this.picture.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.picture.addEventListener("pointerleave", () => this.point(null));
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.draw(this.points, this.faults ?? []);
    }).observe(this.element);
  }

  draw(points, faults) {
    this.points = points;
    this.faults = faults;
    const last = points.at(-1);
    put(this.value, last ? `${number(last.value)}${this.unit}` : "–");
    this.picture.setAttribute("aria-label", last ? `${this.title}: ${number(last.value)}${this.unit} now, ${this.spread()}` : `${this.title}: no data yet`);
    if (!this.width) return;
    const shown = thin(points, this.width);
    const height = 132;
    this.picture.setAttribute("width", this.width);
    const [low, high] = bounds(shown, this.fromZero);
    const from = shown[0]?.at ?? 0;
    const until = Math.max(shown.at(-1)?.at ?? 1, from + 1);
    const x = (at) => EDGE.left + ((at - from) / (until - from)) * (this.width - EDGE.left - EDGE.right);
    const y = (value) => height - EDGE.bottom - ((value - low) / (high - low)) * (height - EDGE.top - EDGE.bottom);
    this.x = x;
    this.grid.replaceChildren(...axis(low, high, from, until, this.width, height, x, y, shown.length > 0));
    this.marks.replaceChildren(
      ...faults.filter((at) => at >= from && at <= until).map((at) => svg("line", { x1: x(at), x2: x(at), y1: EDGE.top, y2: height - EDGE.bottom })),
    );
    const line = shown.map((p, place) => `${place ? "L" : "M"}${x(p.at).toFixed(1)} ${y(p.value).toFixed(1)}`).join("");
    this.path.setAttribute("d", line);
    const floor = height - EDGE.bottom;
    this.area.setAttribute("d", shown.length ? `${line}L${x(shown.at(-1).at).toFixed(1)} ${floor}L${x(from).toFixed(1)} ${floor}Z` : "");
    this.cursor.setAttribute("y2", floor);
  }

  /** Text description of the curve for screen readers. */
  spread() {
    let [low, high] = [Infinity, -Infinity];
    for (const { value } of this.points) [low, high] = [Math.min(low, value), Math.max(high, value)];
    return `between ${number(low)} and ${number(high)} since ${time(this.points[0].at)}, ${plural(this.faults.length, "fault")}`;
  }

  point(offset) {
    if (offset === null || !this.points.length || !this.x) {
      this.cursor.classList.remove("on");
      put(this.hint, "");
      return;
    }
    const near = this.points.reduce((best, p) => (Math.abs(this.x(p.at) - offset) < Math.abs(this.x(best.at) - offset) ? p : best));
    this.cursor.setAttribute("x1", this.x(near.at));
    this.cursor.setAttribute("x2", this.x(near.at));
    this.cursor.classList.add("on");
    put(this.hint, `${time(near.at)}  ${number(near.value)}${this.unit}`);
  }
}

/** Return at most one point per two pixels: minimum and maximum of each interval, so that no peak is lost. */
function thin(points, width) {
  const size = Math.ceil((points.length * 4) / Math.max(width, 1));
  if (size <= 2) return points;
  const selected = [];
  for (let place = 0; place < points.length; place += size) {
    const part = points.slice(place, place + size);
    const low = part.reduce((a, b) => (b.value < a.value ? b : a));
    const high = part.reduce((a, b) => (b.value > a.value ? b : a));
    selected.push(...(low.at < high.at ? [low, high] : low === high ? [low] : [high, low]));
  }
  return selected;
}

function bounds(points, fromZero) {
  let low = fromZero ? 0 : Infinity;
  let high = -Infinity;
  for (const { value } of points) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!points.length) return [0, 1];
  if (low > 0 && low < high * 0.6) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low === 0 ? 0 : low - room, high + room];
}

function axis(low, high, from, until, width, height, x, y, any) {
  const made = [];
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low);
    made.push(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }));
    if (any) made.push(label(EDGE.left - 6, y(value) + 3.5, number(value, high - low < Math.abs(high) / 50 ? 4 : 2), "end"));
  }
  if (any) {
    made.push(label(EDGE.left, height - 4, time(from), "start"));
    made.push(label(width - EDGE.right, height - 4, time(until), "end"));
  }
  return made;
}

function label(x, y, text, anchor) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}
