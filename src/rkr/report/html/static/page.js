// The page: method switches, sorting, tooltips, chart tables, downloads, light and dark mode, printing.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PRINTED = 660; // chart width in print
let printing = false;
const redraws = [];

// Light and dark mode -------------------------------------------------------------------------------------

function themes() {
  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("rkr-theme"); } catch { return null; } };
  const offer = (now) => { // the label names the mode that it switches to
    button.dataset.to = now === "dark" ? "light" : "dark";
    button.textContent = now === "dark" ? "Light mode" : "Dark mode";
  };
  const show = () => {
    const chosen = kept();
    if (chosen) document.documentElement.dataset.theme = chosen;
    offer(chosen || (system.matches ? "dark" : "light"));
  };
  button.addEventListener("click", () => {
    const next = button.dataset.to;
    try { localStorage.setItem("rkr-theme", next); } catch { /* storage may be unavailable for local files */ }
    document.documentElement.dataset.theme = next;
    offer(next);
  });
  system.addEventListener("change", show);
  show();
}

// Sorting ---------------------------------------------------------------------------------------------------

function sortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const before = header.getAttribute("aria-sort");
      const numeric = [...table.tBodies[0].rows].some((row) => row.cells[column].dataset.number !== undefined);
      const down = before ? before === "ascending" : numeric; // largest number first
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const cell = row.cells[column];
        return cell.dataset.number !== undefined ? Number(cell.dataset.number) : cell.textContent.trim();
      };
      const missing = (row) => (numeric && row.cells[column].dataset.number === undefined ? 1 : 0);
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        if (missing(a) !== missing(b)) return missing(a) - missing(b);
        const [u, v] = [value(a), value(b)];
        const order = typeof u === "number" && typeof v === "number" ? u - v : String(u).localeCompare(String(v), undefined, { numeric: true });
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

// Downloads -------------------------------------------------------------------------------------------------

function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = html("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csv({ header, rows }) {
  const cell = (value) => {
    const plain = typeof value === "object" ? (value.value === undefined ? value.text.replace("–", "") : String(value.value)) : String(value);
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };
  return [header, ...rows].map((row) => row.map(cell).join(",") + "\r\n").join("");
}

// The chart as a standalone SVG, with resolved colours and the background of the page.
function standalone(drawing) {
  const copy = drawing.cloneNode(true), here = [...drawing.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(here[i]);
    for (const name of ["fill", "stroke", "stop-color"]) if ((node.getAttribute(name) || "").includes("var(")) node.setAttribute(name, style.getPropertyValue(name));
    node.removeAttribute("class");
  });
  const background = getComputedStyle(drawing.closest("figure")).backgroundColor;
  copy.insertBefore(svg("rect", { width: "100%", height: "100%", fill: background }), copy.children[2]);
  return '<?xml version="1.0" encoding="UTF-8"?>\n' + new XMLSerializer().serializeToString(copy);
}

const fileName = (...parts) => parts.join("-").replace(/[^\w.-]+/g, "_");

// Tooltips, by pointer or with the arrow keys while a chart has the focus ------------------------------------

function tooltips(figure, current) {
  const plot = figure.querySelector(".plot"), tip = figure.querySelector(".tip"), said = figure.querySelector(".said");
  const ring = svg("circle", { r: 8, fill: "none", stroke: "var(--ink)", "stroke-width": 1.6 });
  let at = -1;
  const hide = () => { tip.hidden = true; ring.remove(); at = -1; };
  const show = (i, speak) => {
    const { hits, drawing } = current(), hit = hits[i];
    if (!hit) return hide();
    at = i;
    tip.textContent = hit.text;
    tip.hidden = false;
    const drawn = drawing.getBoundingClientRect(), around = plot.getBoundingClientRect(), scale = drawn.width / drawing.viewBox.baseVal.width;
    const x = (hit.x + (hit.w || 0) / 2) * scale + drawn.left - around.left, y = hit.y * scale + drawn.top - around.top;
    tip.style.left = `${Math.max(0, Math.min(x - tip.offsetWidth / 2, around.width - tip.offsetWidth))}px`;
    tip.style.top = `${y > tip.offsetHeight + 14 ? y - tip.offsetHeight - 12 : y + 16}px`;
    ring.setAttribute("cx", hit.x + (hit.w || 0) / 2);
    ring.setAttribute("cy", hit.w ? hit.y + Math.min(10, (hit.h || 0) / 2) : hit.y);
    drawing.append(ring);
    if (speak) said.textContent = hit.text.replaceAll("\n", ", ");
  };
  const nearest = (event) => {
    const { hits, drawing } = current(), drawn = drawing.getBoundingClientRect(), scale = drawing.viewBox.baseVal.width / drawn.width;
    const x = (event.clientX - drawn.left) * scale, y = (event.clientY - drawn.top) * scale;
    let best = -1, least = 26;
    hits.forEach((hit, i) => {
      const dx = hit.w ? Math.max(hit.x - x, 0, x - hit.x - hit.w) : hit.x - x, dy = hit.w ? Math.max(hit.y - y, 0, y - hit.y - hit.h) : hit.y - y;
      const far = Math.hypot(dx, dy);
      if (far < least) [best, least] = [i, far];
    });
    return best;
  };
  const point = (event) => { const i = nearest(event); if (i < 0) hide(); else if (i !== at) show(i, false); };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(0, true); });
  plot.addEventListener("keydown", (event) => {
    const last = current().hits.length - 1;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(last, to)), true);
  });
  return hide;
}

// A recipe --------------------------------------------------------------------------------------------------

function tableOf({ header, rows }, caption) {
  const cell = (value) => html("td", { class: typeof value === "object" ? "number" : null }, typeof value === "object" ? value.text : String(value));
  return html("table", {}, html("caption", {}, caption),
    html("thead", {}, html("tr", {}, header.map((name, i) => html("th", { scope: "col", class: i ? "number" : null }, name)))),
    html("tbody", {}, rows.map((row) => html("tr", {}, html("th", { scope: "row" }, String(row[0])), row.slice(1).map(cell)))));
}

function options(select, entries) {
  const before = select.value;
  select.replaceChildren(...entries.map(([value, name]) => html("option", { value }, name)));
  if (entries.some(([value]) => value === before)) select.value = before;
}

// Selects a method and one of its runs. `mean` adds the mean over finished runs.
function chooser(scope, recipe, mean, changed) {
  const [method, run] = scope.querySelectorAll("select");
  const runs = () => {
    const own = recipe.runs.map((one, i) => [String(i), one]).filter(([, one]) => one.method === method.value && one.done);
    const entries = own.map(([i, one]) => [i, `order ${one.label}${one.finished ? "" : ` (${one.done} of ${recipe.n} tasks)`}`]);
    const several = (recipe.methods.find((one) => one.name === method.value) || { finished: 0 }).finished;
    if (mean && several > 1) entries.unshift(["mean", `mean of ${several} runs`]);
    options(run, entries);
  };
  method.addEventListener("change", () => { runs(); changed(); });
  run.addEventListener("change", changed);
  return {
    refresh(methods) {
      const guarantees = (one) => Number(recipe.runs.some((r) => r.method === one.name && r.guaranteed));
      const begun = methods.filter((one) => recipe.runs.some((r) => r.method === one.name && r.done));
      if (!mean) begun.sort((a, b) => guarantees(b) - guarantees(a));
      options(method, begun.map((one) => [one.name, one.name]));
      runs();
    },
    chosen() {
      if (run.value !== "mean") return recipe.runs[Number(run.value)] && run.value !== "" ? recipe.runs[Number(run.value)] : null;
      const means = recipe.methods.find((one) => one.name === method.value).matrix;
      return { matrix: means.map((row) => row.map(([value]) => value)), tasks: recipe.tasks, method: method.value, label: "mean" };
    },
  };
}

function chart(figure, recipe, state) {
  const kind = figure.dataset.chart, title = figure.querySelector("h3").textContent.trim(), plot = figure.querySelector(".plot");
  const table = figure.querySelector("details .scroll");
  let now = null;
  const pick = kind === "matrix" ? chooser(figure, recipe, true, () => draw()) : null;
  const hide = tooltips(figure, () => now);
  function draw() {
    const methods = recipe.methods.filter((method) => !state.off.has(method.name));
    const width = printing ? PRINTED : Math.max(260, Math.floor(plot.clientWidth));
    const run = pick ? pick.chosen() : null;
    hide();
    now = (CHARTS[kind] || bars)({ recipe, methods, paper: state.paper, width, run, kind, title: `${title}: ${recipe.name}` });
    plot.querySelector("svg")?.remove();
    plot.prepend(now.drawing);
    table.replaceChildren(tableOf(now.table, `${title}: ${recipe.name}`));
  }
  const file = () => { const run = pick && pick.chosen(); return fileName(recipe.name, kind, ...(run ? [run.method, run.label] : [])); };
  figure.querySelector("[data-save=svg]").addEventListener("click", () => save(`${file()}.svg`, "image/svg+xml", standalone(now.drawing)));
  figure.querySelector("[data-save=csv]").addEventListener("click", () => save(`${file()}.csv`, "text/csv", "\ufeff" + csv(now.table)));
  redraws.push(draw);
  return () => { if (pick) pick.refresh(recipe.methods.filter((method) => !state.off.has(method.name))); draw(); };
}

// The hashes of a run: for each task, the hash when it was learned and whether it changed after each later task.
function proof(part, recipe, state) {
  const into = part.querySelector("[data-hashes]");
  const pick = chooser(part, recipe, false, () => draw());
  function draw() {
    const run = pick.chosen();
    if (!run) return into.replaceChildren();
    const after = (hash) => (hash === 1 ? html("td", { class: "same" }, "✓ same") : html("td", { class: hash ? "other" : null }, hash ? `✗ ${hash}` : "–"));
    const empty = (n) => Array.from({ length: n }, () => html("td", {}));
    const rows = run.proof.map(([learned, ...later], j) => html("tr", {}, html("th", { scope: "row" }, `${j + 1} ${run.tasks[j]}`),
      html("td", {}, html("code", {}, learned === null ? "–" : learned)), empty(j), later.map(after)));
    const header = ["task", "when learned", ...Array.from({ length: Math.max(0, run.done - 1) }, (_, i) => `after ${i + 2}`)];
    into.replaceChildren(html("table", {}, html("caption", {}, `${run.method}, order ${run.label}: ${run.pairs[0]} of ${run.pairs[1]} pairs identical`),
      html("thead", {}, html("tr", {}, header.map((name) => html("th", { scope: "col" }, name)))), html("tbody", {}, rows)));
  }
  return () => { pick.refresh(recipe.methods.filter((method) => !state.off.has(method.name) && recipe.runs.some((run) => run.method === method.name && run.pairs[1]))); draw(); };
}

function section(recipe, index) {
  const part = document.getElementById(`recipe-${index}`), state = { off: new Set(), paper: true };
  const updates = [...part.querySelectorAll("figure[data-chart]")].map((figure) => chart(figure, recipe, state));
  for (const one of part.querySelectorAll("[data-proof]")) updates.push(proof(one, recipe, state));
  const buttons = [...part.querySelectorAll("button[data-switch]")];
  const update = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(!state.off.has(recipe.methods[button.dataset.switch].name)));
    for (const row of part.querySelectorAll("[data-method]")) row.hidden = state.off.has(recipe.methods[row.dataset.method].name);
    for (const one of updates) one();
  };
  for (const button of buttons) {
    const { name, look } = recipe.methods[button.dataset.switch];
    button.prepend(svg("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16", "aria-hidden": "true" }, mark(look, 0, 0, 5)));
    button.addEventListener("click", () => { if (!state.off.delete(name)) state.off.add(name); update(); });
  }
  const all = part.querySelector("[data-all]"), none = part.querySelector("[data-none]"), paper = part.querySelector("[data-paper]");
  all?.addEventListener("click", () => { state.off.clear(); update(); });
  none?.addEventListener("click", () => { for (const method of recipe.methods) state.off.add(method.name); update(); });
  paper?.addEventListener("click", () => { state.paper = !state.paper; paper.setAttribute("aria-pressed", String(state.paper)); update(); });
  update();
}

themes();
for (const table of document.querySelectorAll("table.sortable")) sortable(table);
DATA.recipes.forEach(section);

let width = innerWidth, timer = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(timer);
  timer = setTimeout(() => redraws.forEach((draw) => draw()), 120);
});
addEventListener("beforeprint", () => {
  printing = true;
  for (const details of document.querySelectorAll("details:not([open])")) { details.open = true; details.dataset.opened = ""; }
  redraws.forEach((draw) => draw());
});
addEventListener("afterprint", () => {
  printing = false;
  for (const details of document.querySelectorAll("details[data-opened]")) { details.open = false; delete details.dataset.opened; }
  redraws.forEach((draw) => draw());
});
document.documentElement.dataset.ready = "";
