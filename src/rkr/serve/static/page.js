const $ = (id) => document.getElementById(id);
const PICTURES = /\.(jpe?g|jpe|png|webp|bmp|gif|tiff?|p[pgb]m|jfif)$/i;
let changes = false, chosen = [], token = sessionStorage.getItem("rkr-token");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key in made ? (made[key] = value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function tell(text) {
  $("message").textContent = text;
  $("message").hidden = !text;
}
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const place = (name) => `/v1/tasks/${encodeURIComponent(name)}`;

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server does not answer.");
  }
  if (reply.status === 401) {
    $("login").hidden = false;
    if (document.activeElement !== $("token")) $("token").focus();
  }
  const data = reply.status === 204 ? {} : await reply.json();
  if (!reply.ok) throw new Error(data.error);
  return data;
}

// Answers

async function predict(files) {
  tell("");
  const pictures = [...files].filter((file) => file.type.startsWith("image/") || PICTURES.test(file.name));
  if (!pictures.length) return tell("These are no pictures.");
  $("answers").replaceChildren();
  for (const file of pictures) {
    const url = URL.createObjectURL(file), body = element("div", {}, "…");
    const image = element("img", { src: url, alt: "", onload: () => URL.revokeObjectURL(url) });
    $("answers").append(element("article", { ariaLabel: file.name }, element("h3", {}, file.name), image, body));
    const form = new FormData();
    form.append("pictures", file, file.name);
    if ($("task").value) form.append("task", $("task").value);
    form.append("top", $("top").value);
    try {
      const { predictions } = await ask("/v1/predict", { method: "POST", body: form });
      show(body, predictions[0]);
    } catch (error) {
      body.replaceChildren(element("p", { className: "error" }, error.message));
    }
  }
}
function show(body, found) {
  const rows = found.answers.map(({ class: name, probability }) =>
    element("div", { className: "answer" },
      element("span", { className: "class" }, name),
      element("span", { className: "share" }, percent(probability)),
      element("meter", { min: 0, max: 1, value: probability, ariaLabel: `${name}: ${percent(probability)}` })));
  const sure = found.task_probability === undefined ? "" : `, ${percent(found.task_probability)}`;
  const said = found.task === null ? "None of the tasks" : `Task: ${found.task}${sure}`;
  body.replaceChildren(element("p", { className: "task" }, said), ...rows);
  body.dataset.probabilities = JSON.stringify(found.answers);
}
function takes(zone, take) {
  zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => { event.preventDefault(); zone.classList.remove("over"); take(event.dataTransfer); });
}
takes($("drop"), (data) => predict(data.files));
$("files").addEventListener("change", (event) => predict(event.target.files));

// Tasks

async function refresh() {
  const found = await ask("/v1/tasks");
  changes = found.changes;
  $("network").textContent = `${found.network}, ${found.tasks.length} tasks`;
  $("learn").hidden = !changes;
  $("login").hidden = true;
  const rows = found.tasks.map((task) => {
    const name = element("th", { scope: "row", title: task.classes.join(", ") }, task.name);
    if (task.damaged) name.append(element("div", { className: "error" }, task.damaged));
    const drop = element("button", { type: "button", ariaLabel: `Drop ${task.name}`, onclick: () => dropTask(task.name) }, "Drop");
    return element("tr", {}, name, element("td", {}, `${task.classes.length}`),
      element("td", {}, task.accuracy === null ? "–" : percent(task.accuracy)),
      element("td", {}, `${(task.bytes / 1e6).toFixed(2)} MB`), element("td", {}, ...(changes ? [drop] : [])));
  });
  const text = JSON.stringify([found.tasks, changes]), body = $("tasks").tBodies[0];
  if (body.dataset.text === text) return;
  body.dataset.text = text;
  body.replaceChildren(...rows);
  const before = $("task").value, names = found.tasks.map((task) => task.name);
  $("task").replaceChildren(element("option", { value: "auto" }, "auto: infer it"), ...names.map((name) => element("option", { value: name }, name)));
  $("task").value = names.includes(before) ? before : "auto";
}
async function dropTask(name) {
  if (!confirm(`Drop the task "${name}"? Its file is removed.`)) return;
  try {
    await ask(place(name), { method: "DELETE" });
    await refresh();
  } catch (error) {
    tell(error.message);
  }
}

// Learning

async function walk(entry, path = "") {
  if (entry.isFile) {
    const file = await new Promise((done, failed) => entry.file(done, failed));
    return PICTURES.test(file.name) ? [{ path: path + file.name, file }] : [];
  }
  const reader = entry.createReader(), found = [];
  for (;;) {
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) break;
    for (const inner of some) found.push(...(await walk(inner, `${path}${entry.name}/`)));
  }
  return found;
}
function choose(files) {
  const tops = new Set(files.map(({ path }) => path.split("/")[0]));
  const deep = tops.size === 1 && files.every(({ path }) => path.split("/").length > 2);
  chosen = deep ? files.map(({ path, file }) => ({ path: path.slice(path.indexOf("/") + 1), file })) : files;
  chosen = chosen.filter(({ path }) => path.includes("/"));
  const classes = new Set(chosen.map(({ path }) => path.split("/")[0]));
  if (deep && !$("name").value) $("name").value = [...tops][0];
  $("chosen").textContent = `${chosen.length} pictures in ${classes.size} classes: ${[...classes].join(", ")}`;
  ready();
}
const ready = () => { $("start").disabled = !chosen.length || !$("name").value.trim(); };
takes($("drop-folders"), async (data) => {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  choose((await Promise.all(entries.map((entry) => walk(entry)))).flat());
});
$("folder").addEventListener("change", (event) => choose([...event.target.files]
  .filter((file) => PICTURES.test(file.name)).map((file) => ({ path: file.webkitRelativePath || file.name, file }))));
$("name").addEventListener("input", ready);
$("start").addEventListener("click", async () => {
  $("start").disabled = true;
  tell("");
  try {
    const body = await zipped(chosen);
    await ask(`${place($("name").value.trim())}/learn`, { method: "POST", body, headers: { "content-type": "application/zip" } });
    chosen = [];
    $("name").value = $("chosen").textContent = $("folder").value = "";
    await jobs();
  } catch (error) {
    tell(error.message);
    ready();
  }
});
async function jobs() {
  const found = changes ? (await ask("/v1/learning")).jobs.slice(0, 5) : [];
  const text = JSON.stringify(found);
  if ($("jobs").dataset.text === text) return;
  $("jobs").dataset.text = text;
  $("jobs").replaceChildren(...found.map((job) => {
    const busy = job.state === "waiting" || job.state === "learning";
    const said = job.error || (busy ? job.doing : job.state) + (job.accuracy === null ? "" : `, accuracy ${percent(job.accuracy)}`);
    const row = element("li", {}, element("strong", {}, job.task), ` ${said} `);
    row.dataset.state = job.state;
    if (busy) {
      row.append(element("button", { type: "button", ariaLabel: `Stop learning ${job.task}`, onclick: () => ask(`${place(job.task)}/learn`, { method: "DELETE" }).then(jobs, (error) => tell(error.message)) }, "Stop"));
      row.append(element("progress", { max: 1, value: job.done, ariaLabel: `Learning ${job.task}` }));
    }
    return row;
  }));
}

// Live

const past = [];
async function live() {
  const found = await ask("/v1/live");
  for (const cell of document.querySelectorAll("[data-live]")) cell.textContent = found[cell.dataset.live] ?? "–";
  past.push(found.pictures_per_second);
  if (past.length > 60) past.shift();
  const most = Math.max(1, ...past);
  $("chart").firstElementChild.setAttribute("points", past.map((value, n) => `${n * 5},${58 - (56 * value) / most}`).join(" "));
}
let silent = false;
async function tick() {
  try {
    await refresh();
    await jobs();
    await live();
    if (silent) tell("");
    silent = false;
  } catch (error) {
    silent = true;
    tell(error.message);
  }
  document.documentElement.dataset.ready = "yes";
  setTimeout(tick, document.hidden ? 5000 : 1000);
}
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("rkr-token", token);
  $("token").value = "";
  $("login").hidden = true;
});
tick();
