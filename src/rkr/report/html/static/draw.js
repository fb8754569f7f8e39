// Drawing: elements, numbers, scales, axes, markers. Strings are inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

// Format like Python: ties round to even.
function fixed(x, digits) {
  const text = Math.abs(x).toFixed(digits);
  const scaled = Math.abs(x) * 2 ** (digits + 1);
  const tie = Number.isInteger(scaled) && scaled % 2 === 1;
  const last = Number(text[text.length - 1]);
  const rounded = tie && last % 2 === 1 ? (Number(text) - 10 ** -digits).toFixed(digits) : text;
  return (x < 0 ? "-" : "") + rounded;
}

// Format a difference with its sign. Values that round to zero have no sign.
function points(x) {
  const text = fixed(x, 2);
  return Number(text) === 0 ? "0.00" : (x > 0 ? "+" : "") + text;
}

function size(n, digits = 3) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) [n, unit] = [n / 1000, unit + 1];
  return `${Number(n.toPrecision(digits))} ${units[unit]}`;
}

const plusMinus = (mean, half) => fixed(mean, 2) + (half === null || half === undefined ? "" : ` ± ${fixed(half, 2)}`);
const shorten = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);
const ink = (colour) => (colour === "#000000" ? "var(--ink)" : colour);
const widthOf = (text, px) => text.length * px * 0.56;

// Scales ------------------------------------------------------------------------------------------------

function linear(from, to, start, end) {
  const scale = (value) => start + ((value - from) / (to - from || 1)) * (end - start);
  scale.ticks = (about) => {
    const raw = (to - from || 1) / about;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const ticks = [];
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };
  return scale;
}

function logarithmic(from, to, start, end) {
  const scale = (value) => start + (Math.log(value / from) / Math.log(to / from || 2)) * (end - start);
  scale.ticks = () => {
    const ticks = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++)
      for (const m of [1, 2, 5]) if (m * 10 ** power >= from * 0.999 && m * 10 ** power <= to * 1.001) ticks.push(m * 10 ** power);
    return ticks;
  };
  return scale;
}

// Capacity: 100 % is the original network. The scale separates values just above 100 % and still shows large multiples.
function capacityScale(low, high, start, end) {
  if (high / low < 1.5) {
    const spare = Math.max(0.5, (high - low) * 0.07);
    return linear(low - spare, high + spare, start, end);
  }
  const above = (value) => Math.sign(value - 100) * Math.log10(1 + Math.abs(value - 100));
  const spare = (above(high) - above(low)) * 0.06;
  const inner = linear(above(low) - spare, above(high) + spare, start, end);
  const scale = (value) => inner(above(value));
  scale.log = true;
  scale.ticks = () => [50, 90, 100, 101, 102, 105, 110, 120, 150, 200, 500, 1000, 2000, 5000, 10000].filter((v) => v >= low * 0.999 && v <= high * 1.001);
  return scale;
}

// The range of an accuracy axis: multiples of 10 around the values, within 0 to 100.
function percents(values) {
  const low = Math.max(0, 10 * Math.floor((Math.min(...values) - 1) / 10));
  return [low, Math.max(low + 10, Math.min(100, 10 * Math.ceil((Math.max(...values) + 1) / 10)))];
}

// Marks -------------------------------------------------------------------------------------------------

function polygon(corners, inner, turn, r) {
  const steps = inner ? corners * 2 : corners;
  return Array.from({ length: steps }, (_, i) => {
    const radius = inner && i % 2 ? r * inner : r;
    const angle = -Math.PI / 2 + turn + (2 * Math.PI * i) / steps;
    return `${(radius * Math.cos(angle)).toFixed(2)},${(radius * Math.sin(angle)).toFixed(2)}`;
  }).join("L");
}

const SHAPES = {
  o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  s: (r) => `M${polygon(4, 0, Math.PI / 4, r * 1.25)}Z`,
  D: (r) => `M${polygon(4, 0, 0, r * 1.25)}Z`,
  "^": (r) => `M${polygon(3, 0, 0, r * 1.3)}Z`,
  v: (r) => `M${polygon(3, 0, Math.PI, r * 1.3)}Z`,
  P: (r) => plus(r * 1.2, r * 0.42),
  X: (r) => plus(r * 1.2, r * 0.42),
  "*": (r) => `M${polygon(5, 0.42, 0, r * 1.5)}Z`,
  p: (r) => `M${polygon(5, 0, 0, r * 1.2)}Z`,
};

function plus(a, b) {
  return `M${-b},${-a}H${b}V${-b}H${a}V${b}H${b}V${a}H${-b}V${b}H${-a}V${-b}H${-b}Z`;
}

function mark([colour, shape], x, y, r = 4, hollow = false) {
  const turned = shape === "X" ? " rotate(45)" : "";
  return svg("path", {
    d: SHAPES[shape](r),
    transform: `translate(${x.toFixed(2)},${y.toFixed(2)})${turned}`,
    fill: hollow ? "var(--card)" : ink(colour),
    stroke: hollow ? ink(colour) : "var(--card)",
    "stroke-width": hollow ? 1.6 : 0.8,
    class: "mark",
  });
}

function text(content, x, y, attributes) {
  return svg("text", { x: x.toFixed(1), y: y.toFixed(1), fill: "var(--ink)", "font-size": 12, ...attributes }, String(content));
}

const line = (x1, y1, x2, y2, attributes) =>
  svg("line", { x1: x1.toFixed(1), y1: y1.toFixed(1), x2: x2.toFixed(1), y2: y2.toFixed(1), stroke: "var(--grid)", ...attributes });

function errorBar(x, low, high, colour) {
  const look = { stroke: ink(colour), "stroke-width": 1.4 };
  return [line(x, low, x, high, look), line(x - 3, low, x + 3, low, look), line(x - 3, high, x + 3, high, look)];
}

// Format ticks with as few digits as keep them distinct.
function sizes(ticks) {
  const digits = [3, 4, 5, 6].find((d) => new Set(ticks.map((tick) => size(tick, d))).size === ticks.length) || 7;
  return (tick) => size(tick, digits);
}

// Axes --------------------------------------------------------------------------------------------------

// box: {left, top, right, bottom}; x and y: {scale, ticks, label, format}.
function axes(box, x, y) {
  const format = (axis, value) => (axis.format ? axis.format(value) : String(value));
  const muted = { fill: "var(--muted)" };
  const parts = y.ticks.map((tick) => [
    line(box.left, y.scale(tick), box.right, y.scale(tick)),
    text(format(y, tick), box.left - 6, y.scale(tick) + 4, { "text-anchor": "end", ...muted }),
  ]);
  parts.push(line(box.left, box.bottom, box.right, box.bottom, { stroke: "var(--muted)" }));
  let edge = -Infinity;
  for (const tick of x.ticks) {
    const label = format(x, tick), at = x.scale(tick), half = widthOf(label, 12) / 2;
    if (at - half < edge + 4) continue;
    edge = at + half;
    parts.push(text(label, at, box.bottom + 16, { "text-anchor": "middle", ...muted }));
  }
  if (x.label) parts.push(text(x.label, (box.left + box.right) / 2, box.bottom + 34, { "text-anchor": "middle" }));
  if (y.label) parts.push(text(y.label, box.left - 40, box.top - 10, { "text-anchor": "start" }));
  return svg("g", {}, parts);
}

// A legend, wrapped into rows. Entries are {name, draw(x, y)}.
function legend(entries, left, top, width) {
  const group = svg("g", {});
  let x = left, y = top + 10;
  for (const entry of entries) {
    const name = shorten(entry.name, 36), wide = 30 + widthOf(name, 12) + 12;
    if (x > left && x + wide > left + width) [x, y] = [left, y + 20];
    group.append(...[entry.draw(x + 12, y)].flat(), text(name, x + 29, y + 4));
    x += wide;
  }
  return { group, height: entries.length ? y - top + 14 : 0 };
}

function canvas(width, height, title, description, ...children) {
  const id = `c${(canvas.count = (canvas.count || 0) + 1)}`;
  return svg(
    "svg",
    {
      xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-labelledby": `${id}t ${id}d`, "font-family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
    },
    svg("title", { id: `${id}t` }, title),
    svg("desc", { id: `${id}d` }, description),
    ...children,
  );
}
