// The charts. Each function takes {recipe, methods, paper, width, run, title, kind} and returns {drawing, hits, table}:
// the SVG, the positions and tooltips of its values, and the values as a table. `methods` are those switched on.
// `kind` is the key of the chart. To add a chart, add its title and caption to CHARTS in page.py, and its function to CHARTS
// at the end; a chart with the key of a metric needs no function.

const named = (recipe, i) => (recipe.tasks ? `${i + 1} ${recipe.tasks[i]}` : `${i + 1}`);
const measureOf = (recipe) => (recipe.measure === "accuracy" ? "accuracy (%)" : `${recipe.measure} (%)`);
const whole = (n) => Array.from({ length: n }, (_, i) => i + 1);
const number = (value, shown) => (value === null || value === undefined ? { text: "–" } : { text: shown(value), value });
const percent2 = (value) => number(value, (v) => fixed(v, 2));
const percent1 = (value) => number(value, (v) => fixed(v, 1));

function ofMethod(recipe, methods, wanted) {
  const on = new Set(methods.map((method) => method.name));
  return recipe.runs.filter((run) => on.has(run.method) && wanted(run));
}

// Lines over tasks. Series are {name, look, open, banded, values: [[y, half]], text(i)}.
function lines(box, scales, series, hits) {
  const parts = [];
  for (const one of series) {
    const colour = ink(one.look[0]), at = (i) => [scales.x(i + 1), scales.y(one.values[i][0])];
    const path = (places) => places.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
    if (one.banded && one.values.some(([, half]) => half)) {
      const clip = (v) => Math.max(scales.low, Math.min(scales.high, v));
      const edge = (sign) => one.values.map(([v, half], i) => [scales.x(i + 1), scales.y(clip(v + sign * (half || 0)))]);
      parts.push(svg("path", { d: `M${path(edge(1))}L${path(edge(-1).reverse())}Z`, fill: colour, "fill-opacity": 0.14, class: "band" }));
    }
    parts.push(svg("path", {
      d: `M${path(one.values.map((_, i) => at(i)))}`, fill: "none", stroke: colour, "stroke-width": one.open ? 0.9 : 1.8,
      "stroke-dasharray": one.look[2] || null, class: "line",
    }));
  }
  for (const one of series)
    one.values.forEach(([value], i) => {
      const [x, y] = [scales.x(i + 1), scales.y(value)];
      parts.push(mark(one.look, x, y, 3.6, one.open));
      hits.push({ x, y, text: one.text(i) });
    });
  return parts;
}

const keys = (series) =>
  series.map((one) => ({
    name: one.name,
    draw: (x, y) => [
      line(x - 12, y, x + 12, y, { stroke: ink(one.look[0]), "stroke-width": one.open ? 0.9 : 1.8, "stroke-dasharray": one.look[2] || null }),
      mark(one.look, x, y, 3.6, one.open),
    ],
  }));

function overTasks({ recipe, methods, width, title }) {
  const series = [];
  const label = (name, values) => (i) => `${name}\nafter task ${named(recipe, i)}\n${plusMinus(...values[i])} %`;
  for (const method of methods)
    if (method.running.length)
      series.push({
        name: method.label, look: method.look, banded: method.banded, values: method.running,
        text: label(method.label, method.running),
      });
  for (const run of ofMethod(recipe, methods, (one) => !one.finished && one.done)) {
    const values = run.matrix.map((row) => [row.reduce((a, b) => a + b, 0) / row.length, null]);
    const name = `${run.method} ${run.label}, unfinished`;
    const look = recipe.methods.find((method) => method.name === run.method).look;
    series.push({ name, look, open: true, values, text: label(name, values) });
  }
  const all = series.flatMap((one) => one.values.flatMap(([v, half]) => (one.banded ? [v - (half || 0), v + (half || 0)] : [v])));
  const [low, high] = all.length ? percents(all.map((v) => Math.max(0, Math.min(100, v)))) : [0, 100];
  const box = { left: 46, top: 26, right: width - 14, bottom: 330 };
  const x = linear(0.7, recipe.n + 0.3, box.left, box.right), y = linear(low, high, box.bottom, box.top);
  const hits = [], ranked = [...series].sort((a, b) => b.values.at(-1)[0] - a.values.at(-1)[0]);
  const names = legend(keys(ranked), 10, box.bottom + 46, width - 20);
  const drawing = canvas(
    width, box.bottom + 46 + names.height, title,
    `${series.length} lines; ${series.map((one) => `${one.name} ends at ${fixed(one.values.at(-1)[0], 2)} %`).join(", ")}.`,
    axes(box, { scale: x, ticks: whole(recipe.n), label: "tasks learned" }, { scale: y, ticks: y.ticks(6), label: `mean ${measureOf(recipe)} on tasks learned` }),
    lines(box, { x, y, low, high }, series, hits),
    names.group,
  );
  const rows = series.flatMap((one) => one.values.map(([v, half], i) => [one.name, named(recipe, i), percent2(v), percent2(half)]));
  return { drawing, hits, table: { header: ["method", "after task", "mean in %", "± 95 %"], rows } };
}

function tradeOff({ recipe, methods, paper, width, title }) {
  const own = methods.filter((method) => method.summary).map((method) => ({
    name: method.label, short: method.label, look: method.look, x: method.summary.capacity, to: method.summary.toLearn,
    y: method.summary.accuracy[0], half: method.summary.accuracy[1], n: method.summary.accuracy[3], hollow: false,
  }));
  const printed = !paper ? [] : recipe.paper.filter((one) => one.capacity !== null).map((one) => ({
    name: `${one.method} (paper)`, short: one.method, look: one.look, x: one.capacity, y: one.value, half: one.half, hollow: true,
  }));
  const dots = [...printed, ...own];
  const box = { left: 46, top: 26, right: width - 16, bottom: 360 };
  const [low, high] = dots.length ? percents(dots.flatMap((d) => [d.y, Math.max(0, d.y - (d.half || 0)), Math.min(100, d.y + (d.half || 0))])) : [0, 100];
  const x = capacityScale(Math.min(100, ...dots.map((d) => d.x)), Math.max(101, ...dots.map((d) => d.to || d.x)), box.left, box.right);
  const y = linear(low, high, box.bottom, box.top);
  const hits = [], bars = [], marks = [], labels = [];
  const taken = dots.flatMap((d) => [
    [x(d.x) - 6, y(d.y) - 6, x(d.x) + 6, y(d.y) + 6, 1],
    ...(d.half ? [[x(d.x) - 3, y(d.y + d.half), x(d.x) + 3, y(d.y - d.half), 0.4]] : []),
  ]);
  for (const d of [...own, ...printed]) labels.push(placed(shorten(d.short, 26), x(d.x), y(d.y), box, taken, d.hollow));
  for (const d of dots) {
    const [px, py] = [x(d.x), y(d.y)];
    if (d.half) bars.push(...errorBar(px, y(Math.max(low, d.y - d.half)), y(Math.min(high, d.y + d.half)), d.look[0]));
    if (d.to > d.x) bars.push(line(px, py, x(d.to), py, { stroke: ink(d.look[0]), "stroke-width": 1 }), line(x(d.to), py - 4, x(d.to), py + 4, { stroke: ink(d.look[0]), "stroke-width": 1.4 }));
    marks.push(mark(d.look, px, py, d.hollow ? 4.6 : 5, d.hollow));
    hits.push({ x: px, y: py, text: `${d.name}\n${plusMinus(d.y, d.half)} %\ncapacity ${fixed(d.x, 1)} %${d.to == null ? "" : `, to go on learning ${fixed(d.to, 1)} %`}` });
  }
  const names = legend(
    [
      ...(own.length ? [{ name: "measured", draw: (a, b) => mark(["#000000", "o"], a, b, 4.6) }] : []),
      ...(printed.length ? [{ name: "paper's value", draw: (a, b) => mark(["#000000", "o"], a, b, 4.6, true) }] : []),
    ],
    10, box.bottom + 46, width - 20,
  );
  const drawing = canvas(
    width, box.bottom + 46 + names.height, title,
    dots.map((d) => `${d.name}: ${fixed(d.y, 2)} % at ${fixed(d.x, 1)} % capacity${d.to == null ? "" : ` (${fixed(d.to, 1)} % to go on learning)`}`).join("; ") + ".",
    axes(box, { scale: x, ticks: x.ticks(width < 480 ? 4 : 7), label: width < 480 ? `capacity (%${x.log ? ", log scale" : ""})` : `capacity (% of the original network${x.log ? ", log scale" : ""})` },
      { scale: y, ticks: y.ticks(6), label: `final ${measureOf(recipe)}` }),
    bars, marks, labels, names.group,
  );
  const rows = [...own, ...printed].map((d) => [d.name, { text: fixed(d.x, 1), value: d.x }, number(d.to ?? null, (v) => fixed(v, 1)), percent2(d.y), percent2(d.half)]);
  return { drawing, hits, table: { header: ["method", "capacity in %", "capacity to learn in %", `${recipe.measure} in %`, "± 95 %"], rows } };
}

// A label next to its point, where it covers the fewest others. Distant labels get a line to their point.
function placed(name, x, y, box, taken, pale) {
  const wide = widthOf(name, 11.5) + 2, places = [];
  for (const far of [9, 20, 32, 46, 62])
    for (let turn = 0; turn < 16; turn++) {
      const [dx, dy] = [Math.cos((turn * Math.PI) / 8), Math.sin((turn * Math.PI) / 8)];
      places.push([x + far * dx + (wide / 2) * (Math.sign(Math.round(2 * dx)) - 1), y + far * dy - 6 + 6 * Math.round(dy), far]);
    }
  const cost = ([left, top, far]) => {
    const outside = left < box.left || left + wide > box.right + 10 || top < box.top - 8 || top + 12 > box.bottom ? 4 : 0;
    const hidden = taken.filter((t) => left < t[2] && left + wide > t[0] && top < t[3] && top + 12 > t[1]);
    return outside + far / 100 + hidden.reduce((sum, t) => sum + t[4], 0);
  };
  const [left, top, far] = places.reduce((a, b) => (cost(b) < cost(a) ? b : a));
  taken.push([left, top, left + wide, top + 12, 2]);
  const near = (v, from, to) => Math.max(from, Math.min(to, v));
  return [
    far > 20 ? line(x, y, near(x, left, left + wide), near(y, top, top + 12), { stroke: "var(--muted)", "stroke-width": 0.7 }) : null,
    text(name, left, top + 10, { "font-size": 11.5, fill: pale ? "var(--muted)" : "var(--ink)" }),
  ];
}

const PALE = { "fill-opacity": 0.22 };

function duringAfter({ recipe, methods, width, title }) {
  const shown = methods.filter((method) => method.during.length);
  const columns = Math.max(1, Math.min(shown.length, Math.floor(width / Math.max(240, 22 * recipe.n + 60)), 3));
  const wide = width / columns, tall = 168, top = 34, hits = [], parts = [];
  shown.forEach((method, i) => {
    const left = (i % columns) * wide, up = top + Math.floor(i / columns) * tall;
    const box = { left: left + 36, top: up + 22, right: left + wide - 12, bottom: up + tall - 30 };
    const x = linear(0.5, recipe.n + 0.5, box.left, box.right), y = linear(0, 100, box.bottom, box.top);
    const bar = (x(2) - x(1)) * 0.38, colour = ink(method.look[0]);
    parts.push(axes(box, { scale: x, ticks: whole(recipe.n) }, { scale: y, ticks: [0, 50, 100] }));
    parts.push(mark(method.look, box.left - 22, up + 4, 4), text(shorten(method.name, 34), box.left - 12, up + 8, { "font-weight": 600 }));
    for (const [key, shift, what] of [["during", -bar, "right after learning"], ["after", 0, "after all tasks"]])
      method[key].forEach(([value, half], j) => {
        const px = x(j + 1) + shift, py = y(value);
        parts.push(svg("rect", {
          x: px.toFixed(1), y: py.toFixed(1), width: (bar - 0.8).toFixed(1), height: Math.max(0, box.bottom - py).toFixed(1), fill: colour,
          stroke: colour, "stroke-width": 0.8, class: "bar", ...(key === "during" ? PALE : {}),
        }));
        hits.push({ x: px, y: py, w: bar, h: box.bottom - py, text: `${method.name}, task ${named(recipe, j)}\n${what}: ${plusMinus(value, half)} %` });
      });
  });
  const box = (look) => (x, y) => svg("rect", { x: x - 6, y: y - 6, width: 12, height: 12, fill: "var(--ink)", stroke: "var(--ink)", ...look });
  const names = legend([{ name: "right after learning", draw: box(PALE) }, { name: "after all tasks", draw: box({}) }], 4, 0, width);
  const drawing = canvas(
    width, top + Math.ceil(shown.length / columns) * tall + 14, title,
    `${measureOf(recipe)} on each task right after learning it and after all tasks, for ${shown.length} methods.`,
    names.group, parts, text(`task, in learning order; ${measureOf(recipe)}`, width / 2, top + Math.ceil(shown.length / columns) * tall + 4, { "text-anchor": "middle" }),
  );
  const rows = shown.flatMap((method) => method.during.map(([value, half], i) => [
    method.name, named(recipe, i), percent2(value), percent2(half), percent2(method.after[i][0]), percent2(method.after[i][1]),
  ]));
  return { drawing, hits, table: { header: ["method", "task", "right after learning in %", "± 95 %", "after all tasks in %", "± 95 %"], rows } };
}

const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"].map((hex) =>
  [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function viridis(share) {
  const at = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1), i = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return `rgb(${VIRIDIS[i].map((c, k) => Math.round(c + (VIRIDIS[i + 1][k] - c) * (at - i))).join(",")})`;
}

function matrix({ recipe, run, width, title }) {
  const rows = run ? run.matrix : [], n = rows.length, tasks = run ? run.tasks : null;
  const task = (i) => (tasks ? `${i + 1} ${tasks[i]}` : named(recipe, i));
  const left = 46, top = 32, cell = Math.max(6, Math.min(46, (width - left - 12) / Math.max(n, 1))), hits = [], parts = [];
  const all = rows.flat(), low = n ? 10 * Math.floor(Math.min(...all) / 10) : 0;
  const high = Math.max(low + 10, n ? 10 * Math.ceil(Math.max(...all) / 10) : 100);
  rows.forEach((row, i) => {
    row.forEach((value, j) => {
      const x = left + j * cell, y = top + i * cell, share = (value - low) / (high - low);
      parts.push(svg("rect", { x: x + 0.5, y: y + 0.5, width: cell - 1, height: cell - 1, rx: cell > 20 ? 3 : 0, fill: viridis(share), class: "cell" }));
      if (cell >= 22) parts.push(text(fixed(value, 0), x + cell / 2, y + cell / 2 + 4, { "text-anchor": "middle", fill: share < 0.6 ? "#fff" : "#000" }));
      hits.push({ x, y, w: cell, h: cell, text: `task ${task(j)}\nafter learning task ${task(i)}\n${fixed(value, 1)} %` });
    });
    const every = cell >= 14 || i % 5 === 4;
    if (every) parts.push(text(i + 1, left - 6, top + (i + 0.5) * cell + 4, { "text-anchor": "end", fill: "var(--muted)" }));
    if (every) parts.push(text(i + 1, left + (i + 0.5) * cell, top + n * cell + 16, { "text-anchor": "middle", fill: "var(--muted)" }));
  });
  const bottom = top + n * cell, bar = Math.min(160, width - left - 150), id = `g${Math.random().toString(36).slice(2)}`;
  const stops = whole(11).map((i) => svg("stop", { offset: `${(i - 1) * 10}%`, "stop-color": viridis((i - 1) / 10) }));
  const drawing = canvas(
    width, bottom + 72, title, n ? `Accuracy on ${n} tasks after each task, from ${fixed(Math.min(...all), 1)} to ${fixed(Math.max(...all), 1)} %.` : "No run is selected.",
    svg("defs", {}, svg("linearGradient", { id }, stops)), parts,
    text("after learning task (rows)", 4, 18), text("tested on task (columns)", left, bottom + 34),
    text(low, left, bottom + 62, { fill: "var(--muted)" }),
    svg("rect", { x: left + 24, y: bottom + 52, width: bar, height: 11, fill: `url(#${id})` }),
    text(`${high}  ${measureOf(recipe)}`, left + 30 + bar, bottom + 62, { fill: "var(--muted)" }),
  );
  const mean = (row) => row.reduce((a, b) => a + b, 0) / row.length;
  const table = rows.map((row, i) => [task(i), ...whole(n).map((_, j) => (j <= i ? percent1(row[j]) : { text: "" })), percent1(mean(row))]);
  return { drawing, hits, table: { header: ["after learning", ...whole(n).map(String), "mean"], rows: table } };
}

// Horizontal bars from 0, one row per method. Entries are {name, look, value, half, text}.
function rowsOfBars(entries, width, title, label, description, shown = points) {
  const left = Math.min(150, width * 0.36), tall = 28, top = 14, bottom = top + entries.length * tall;
  const ends = entries.flatMap((e) => [e.value, e.value - (e.half || 0), e.value + (e.half || 0)]);
  const low = Math.min(0, ...ends), high = Math.max(low < 0 ? 0 : 1, ...ends), spare = (high - low) * 0.04;
  const box = { left, top, right: width - 62, bottom }, hits = [];
  const x = linear(low - (low < 0 ? spare : 0), high + spare, box.left, box.right);
  const parts = x.ticks(width < 480 ? 3 : 6).map((tick) => [line(x(tick), top, x(tick), bottom), text(tick, x(tick), bottom + 16, { "text-anchor": "middle", fill: "var(--muted)" })]);
  entries.forEach((e, i) => {
    const y = top + (i + 0.5) * tall, from = Math.min(x(0), x(e.value)), long = Math.abs(x(e.value) - x(0));
    parts.push(mark(e.look, 10, y, 4.2), text(shorten(e.name, Math.floor(left / 7.4)), 22, y + 4));
    parts.push(svg("rect", { x: from.toFixed(1), y: y - 8, width: Math.max(1, long).toFixed(1), height: 16, fill: ink(e.look[0]), class: "bar" }));
    if (e.half) {
      const look = { stroke: "var(--ink)", "stroke-width": 1.3 };
      parts.push(line(x(e.value - e.half), y, x(e.value + e.half), y, look));
      for (const end of [e.value - e.half, e.value + e.half]) parts.push(line(x(end), y - 4, x(end), y + 4, look));
    }
    parts.push(text(shown(e.value), box.right + 56, y + 4, { "text-anchor": "end", "font-variant-numeric": "tabular-nums" }));
    hits.push({ x: 0, y: y - tall / 2, w: width, h: tall, text: e.text });
  });
  parts.push(line(x(0), top, x(0), bottom, { stroke: "var(--muted)" }), text(label, (box.left + box.right) / 2, bottom + 34, { "text-anchor": "middle" }));
  return { drawing: canvas(width, bottom + 44, title, description, parts), hits };
}

function forgetting({ recipe, methods, width, title }) {
  const known = methods.filter((method) => method.summary && method.summary.forgetting[0] !== null);
  const entries = known.map((method) => {
    const [value, half] = method.summary.forgetting;
    return { name: method.name, look: method.look, value, half, text: `${method.name}\nforgetting ${plusMinus(value, half)} points` };
  });
  const said = entries.map((e) => `${e.name} ${points(e.value)}`).join(", ");
  const rows = known.map(({ name, summary: s }) => [
    name, number(s.forgetting[0], points), percent2(s.forgetting[1]), number(s.backward_transfer[0], points), percent2(s.backward_transfer[1]), { text: String(s.forgetting[3]), value: s.forgetting[3] },
  ]);
  const header = ["method", "forgetting, points", "± 95 %", "backward transfer, points", "± 95 %", "runs"];
  return { ...rowsOfBars(entries, width, title, width < 480 ? "drop in points" : "drop from the best accuracy, in points", `Forgetting in points: ${said}.`), table: { header, rows } };
}

function cost({ recipe, methods, width, title }) {
  const shown = methods.filter((method) => method.cost.length), hits = [], parts = [];
  const columns = width >= 560 ? 2 : 1, wide = width / columns, tall = 250;
  [[0, "capacity (%)", (v) => `${fixed(v, 1)} %`], [1, "bytes", size]].forEach(([k, label, shownAs], panel) => {
    const left = (panel % columns) * wide, top = (columns === 1 ? panel : 0) * tall;
    const box = { left: left + 56, top: top + 28, right: left + wide - 14, bottom: top + tall - 40 };
    const values = shown.flatMap((method) => method.cost.map((c) => c[k]));
    const low = Math.min(...values, k ? Infinity : 100), high = Math.max(...values, k ? 1 : 101), log = k === 1 && high / low > 5;
    const spare = (high - low || high) * 0.08;
    const y = k === 0 ? capacityScale(low, high, box.bottom, box.top)
      : log ? logarithmic(low / 1.1, high * 1.1, box.bottom, box.top)
      : linear(values.length ? low - spare : 0, high + spare, box.bottom, box.top);
    const x = linear(0.7, recipe.n + 0.3, box.left, box.right);
    const series = shown.map((method) => ({
      name: method.name, look: method.look, values: method.cost.map((c) => [c[k], null]),
      text: (i) => `${method.name}\nafter task ${named(recipe, i)}\n${shownAs(method.cost[i][k])}`,
    }));
    parts.push(axes(box, { scale: x, ticks: whole(recipe.n), label: "tasks learned" },
      { scale: y, ticks: y.ticks(5), label: label + (log || y.log ? ", log scale" : ""), format: k ? sizes(y.ticks(5)) : (v) => String(Number(v.toPrecision(4))) }));
    parts.push(lines(box, { x, y }, series, hits));
  });
  const height = columns === 1 ? 2 * tall : tall;
  const names = legend(keys(shown), 10, height, width - 20);
  const rows = shown.flatMap((method) => method.cost.map(([p, b], i) => [
    method.name, named(recipe, i), percent2(p), number(i ? p - method.cost[i - 1][0] : null, points), { text: size(b), value: b },
    number(i ? b - method.cost[i - 1][1] : null, (v) => (v < 0 ? "-" : "+") + size(Math.abs(v))),
  ]));
  const said = shown.map((method) => `${method.name} ${fixed(method.cost.at(-1)[0], 1)} %, ${size(method.cost.at(-1)[1])}`).join("; ");
  return {
    drawing: canvas(width, height + names.height, title, `After the last task: ${said}.`, parts, names.group), hits,
    table: { header: ["method", "after task", "capacity in %", "added", "bytes", "bytes added"], rows },
  };
}

function orders({ recipe, methods, width, title }) {
  const shown = methods.filter((method) => method.summary), hits = [], parts = [];
  const left = Math.min(150, width * 0.36), tall = 30, top = 14, bottom = top + shown.length * tall;
  const all = shown.flatMap((method) => method.summary.byRun.map(([, a]) => a));
  const low = Math.min(...all), high = Math.max(...all), spare = Math.max(0.5, (high - low) * 0.06);
  const x = all.length ? linear(low - spare, high + spare, left, width - 16) : linear(0, 1, left, width - 16);
  for (const tick of x.ticks(width < 480 ? 4 : 6)) parts.push(line(x(tick), top, x(tick), bottom), text(tick, x(tick), bottom + 16, { "text-anchor": "middle", fill: "var(--muted)" }));
  shown.forEach((method, i) => {
    const y = top + (i + 0.5) * tall, runs = method.summary.byRun, values = runs.map(([, a]) => a);
    parts.push(mark(method.look, 10, y, 4.2), text(shorten(method.name, Math.floor(left / 7.4)), 22, y + 4));
    parts.push(line(x(Math.min(...values)), y, x(Math.max(...values)), y, { stroke: ink(method.look[0]), "stroke-width": 2.4, "stroke-opacity": 0.45 }));
    for (const [run, value] of runs) {
      parts.push(mark(method.look, x(value), y, 4.2));
      hits.push({ x: x(value), y, text: `${method.name}, order ${run}\n${fixed(value, 2)} %` });
    }
  });
  parts.push(text(`final mean ${measureOf(recipe)}${width < 480 ? "" : ", one marker per run"}`, (left + width) / 2, bottom + 34, { "text-anchor": "middle" }));
  const rows = shown.flatMap(({ name, summary: s }) => s.byRun.map(([run, value], i) => [name, run, percent2(value), ...(i ? [{ text: "" }, { text: "" }] : [percent2(s.aopd), percent2(s.mopd)])]));
  const said = shown.map(({ name, summary: s }) => `${name}: ${s.byRun.length} runs from ${fixed(Math.min(...s.byRun.map((r) => r[1])), 2)} to ${fixed(Math.max(...s.byRun.map((r) => r[1])), 2)} %`);
  return { drawing: canvas(width, bottom + 44, title, said.join("; ") + ".", parts), hits, table: { header: ["method", "order", `${recipe.measure} in %`, "AOPD, points", "MOPD, points"], rows } };
}

function zeroShot({ recipe, methods, paper, width, title }) {
  const shown = methods.filter((method) => Object.keys(method.zero).length), hits = [], parts = [];
  const cells = shown.length ? Object.keys(shown[0].zero) : [], sets = [...new Set(cells.map((key) => key.slice(0, key.lastIndexOf(" "))))];
  const measures = ["U", "S", "H"], columns = Math.max(1, Math.min(sets.length, Math.floor(width / Math.max(250, shown.length * 34 + 60)), 2));
  const wide = width / columns, tall = 210, top = 34, id = `h${Math.random().toString(36).slice(2)}`;
  const looks = { U: PALE, S: { hatch: true }, H: {} };
  const hatch = (colour, key) => svg("pattern", { id: id + key, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 5, height: 5, fill: colour, "fill-opacity": 0.25 }), line(0, 0, 0, 5, { stroke: colour, "stroke-width": 3 }));
  const fillOf = (measure, colour, key) => (looks[measure].hatch ? { fill: `url(#${id}${key})` } : { fill: colour, ...looks[measure] });
  const defs = svg("defs", {}, hatch("var(--ink)", "key"), shown.map((method, i) => hatch(ink(method.look[0]), i)));
  sets.forEach((set, s) => {
    const left = (s % columns) * wide, up = top + Math.floor(s / columns) * tall;
    const box = { left: left + 36, top: up + 22, right: left + wide - 12, bottom: up + tall - 34 };
    const x = linear(0, Math.max(1, shown.length), box.left, box.right), y = linear(0, 100, box.bottom, box.top), bar = (x(1) - x(0)) * 0.27;
    parts.push(axes(box, { scale: x, ticks: [] }, { scale: y, ticks: [0, 50, 100] }), text(set, box.left - 30, up + 8, { "font-weight": 600 }));
    shown.forEach((method, i) => {
      parts.push(mark(method.look, x(i + 0.5), box.bottom + 13, 4));
      measures.forEach((measure, m) => {
        const [value, half] = method.zero[`${set} ${measure}`] || [0, null], colour = ink(method.look[0]);
        const px = x(i) + (x(1) - x(0)) * 0.095 + m * bar, py = y(value);
        parts.push(svg("rect", { x: px.toFixed(1), y: py.toFixed(1), width: (bar - 0.8).toFixed(1), height: (box.bottom - py).toFixed(1), stroke: colour, "stroke-width": 0.8, class: "bar", ...fillOf(measure, colour, i) }));
        hits.push({ x: px, y: py, w: bar, h: box.bottom - py, text: `${method.name}, ${set}\n${measure} ${plusMinus(value, half)} %` });
      });
    });
  });
  const bottom = top + Math.ceil(sets.length / columns) * tall;
  const box = (measure) => (x, y) => svg("rect", { x: x - 6, y: y - 6, width: 12, height: 12, stroke: "var(--ink)", ...fillOf(measure, "var(--ink)", "key") });
  const kinds = legend([["U", "U: unseen classes"], ["S", "S: seen classes"], ["H", "H: harmonic mean"]].map(([m, name]) => ({ name, draw: box(m) })), 4, 0, width);
  const names = legend(shown.map((method) => ({ name: method.name, draw: (x, y) => mark(method.look, x, y, 4) })), 10, bottom, width - 20);
  const rows = shown.map((method) => [method.name, ...cells.map((key) => number(method.zero[key][0], () => plusMinus(...method.zero[key].slice(0, 2))))]);
  if (paper) for (const [method, printed] of Object.entries(recipe.paperZero)) rows.push([`${method} (paper)`, ...cells.map((key) => percent2(printed[key]))]);
  return {
    drawing: canvas(width, bottom + names.height + 6, title, shown.map((method) => `${method.name}: ${cells.map((key) => `${key} ${fixed(method.zero[key][0], 1)}`).join(", ")}`).join("; ") + ".", defs, kinds.group, parts, names.group),
    hits, table: { header: ["method", ...cells], rows },
  };
}

// The mean of a metric over the runs of each method.
function bars({ methods, width, title, kind }) {
  const known = methods.filter((method) => method.summary && method.summary[kind][0] !== null);
  const entries = known.map((method) => {
    const [value, half] = method.summary[kind];
    return { name: method.name, look: method.look, value, half, text: `${method.name}\n${plusMinus(value, half)}` };
  });
  const rows = known.map(({ name, summary: s }) => [name, percent2(s[kind][0]), percent2(s[kind][1]), { text: String(s[kind][3]), value: s[kind][3] }]);
  const said = entries.map((e) => `${e.name} ${points(e.value)}`).join(", ");
  const label = title.split(":")[0];
  return { ...rowsOfBars(entries, width, title, label, `${label}: ${said}.`), table: { header: ["method", label, "± 95 %", "runs"], rows } };
}

// The results of trials in the order of a search, and the best so far.
function searchHistory({ recipe, width, title }) {
  const found = recipe.searches, hits = [], parts = [];
  const all = found.flatMap((search) => search.trials.map((t) => t.value ?? t.last));
  const [low, high] = percents(all), last = Math.max(...found.flatMap((search) => search.trials.map((t) => t.number)));
  const box = { left: 46, top: 26, right: width - 14, bottom: 330 };
  const x = linear(0.5, last + 0.5, box.left, box.right), y = linear(low, high, box.bottom, box.top);
  const bests = found.map((search) => {
    let best = -Infinity;
    const colour = ink(search.look[0]), steps = [];
    for (const trial of search.trials) {
      const done = trial.value !== null, value = done ? trial.value : trial.last, [px, py] = [x(trial.number), y(value)];
      if (done) {
        best = Math.max(best, value);
        steps.push(steps.length ? `H${px.toFixed(1)}V${y(best).toFixed(1)}` : `M${px.toFixed(1)},${y(best).toFixed(1)}`);
      }
      hits.push({ x: px, y: py, text: `${search.name}\ntrial ${trial.number}: ${trial.options}\n${fixed(value, 2)} %${done ? "" : ", stopped early"}` });
    }
    parts.push(svg("path", { d: steps.join(""), fill: "none", stroke: colour, "stroke-width": 1.4, "stroke-opacity": 0.6, "stroke-dasharray": search.look[2] || null, class: "line" }));
    return best;
  });
  for (const search of found) for (const t of search.trials) parts.push(mark(search.look, x(t.number), y(t.value ?? t.last), 3.8, t.value === null));
  const names = legend(found.map((search) => ({ name: search.name, draw: (px, py) => mark(search.look, px, py, 3.8) })), 10, box.bottom + 46, width - 20);
  const drawing = canvas(
    width, box.bottom + 46 + names.height, title,
    found.map((search, i) => `${search.name}: ${search.trials.length} trials, the best ${fixed(bests[i], 2)} %`).join("; ") + ".",
    axes(box, { scale: x, ticks: x.ticks(6).filter(Number.isInteger), label: "trial" }, { scale: y, ticks: y.ticks(6), label: `validation ${measureOf(recipe)}` }),
    parts, names.group,
  );
  const rows = found.flatMap((search) => search.trials.map((t) => [search.name, { text: String(t.number), value: t.number }, t.options, percent2(t.value), percent2(t.last)]));
  return { drawing, hits, table: { header: ["search", "trial", "options", "result in %", "after the last task learned in %"], rows } };
}

function searchImportance({ recipe, width, title }) {
  const found = recipe.searches.filter((search) => Object.keys(search.importance).length);
  const percent = (value) => `${fixed(value, 1)} %`;
  const entries = found.flatMap((search) => Object.entries(search.importance).sort((a, b) => b[1] - a[1]).map(([option, value]) => (
    { name: option, look: search.look, value, text: `${search.name}\n${option}: ${percent(value)}`, search: search.name }
  )));
  const rows = entries.map((e) => [e.search, e.name, percent1(e.value)]);
  const said = entries.map((e) => `${e.name} ${percent(e.value)}`).join(", ");
  return { ...rowsOfBars(entries, width, title, "importance (%)", `Importance: ${said}.`, percent), table: { header: ["search", "option", "importance in %"], rows } };
}

const CHARTS = { over: overTasks, tradeoff: tradeOff, during: duringAfter, matrix, forgetting, cost, orders, zero: zeroShot, search: searchHistory, importance: searchImportance };
