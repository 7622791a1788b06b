// Several models of one server: their states, the memory that they share, and buttons that load and
// unload them.

import { $, announce, ask, count, element, failure } from "./dom.js";

const rows = new Map();
const BUSY = ["loading", "unloading"];
const LOADED = ["ready", "asleep"];
let manages = false;

/** Takes in the models, and shows them. A row stays the same element: it keeps the focus. */
export function update(news) {
  manages = news.manages;
  document.body.classList.add("several");
  $("models-panel").hidden = false;
  const names = news.models.map((model) => model.name);
  for (const name of [...rows.keys()]) if (!names.includes(name)) rows.delete(name);
  for (const model of news.models) {
    if (!rows.has(model.name)) rows.set(model.name, rowOf(model.name));
    fill(rows.get(model.name), model);
  }
  const nodes = names.map((name) => rows.get(name).node);
  const shown = [...$("models").children];
  if (shown.length !== nodes.length || nodes.some((node, i) => shown[i] !== node))
    $("models").replaceChildren(...nodes);
  drawMemory(news);
}

function drawMemory({ models, budget, used }) {
  const loaded = models.filter((model) => model.holds);
  const parts = loaded.map((model, i) => {
    const text = `${model.name}: ${size(model.holds)}`;
    const part = element("span", { title: text, class: i % 2 ? "other" : "" });
    part.style.width = `${(100 * model.holds) / Math.max(budget, used, 1)}%`;
    return part;
  });
  const whole = `${size(used)} of ${size(budget)}`;
  const shown = loaded.map((model) => `${model.name} ${size(model.holds)}`);
  const text = [`${whole} are taken`, ...shown].join(" · ");
  if ($("memory-text").textContent === text) return;
  $("memory").replaceChildren(...parts);
  $("memory").setAttribute("aria-label", `Memory of the loaded models: ${whole}`);
  $("memory-text").textContent = text;
}

function rowOf(name) {
  const state = element("span", { class: "state" });
  const cells = [0, 1, 2, 3].map(() => element("td", { class: "num" }));
  const button = element("button", { type: "button", onclick: () => change(name) }, "Load");
  const node = element(
    "tr",
    {},
    element("td", {}, name),
    element("td", {}, state),
    ...cells,
    element("td", {}, button),
  );
  return { node, state, cells, button, does: "load" };
}

function fill(row, model) {
  const progress = model.progress == null ? "" : ` ${model.progress}%`;
  set(row.state, model.state + progress);
  row.state.className = `state ${model.state}`;
  row.state.title = model.reason ?? "";
  const figures = [
    model.bytes ? size(model.bytes) : "–",
    count(model.in_flight),
    count(model.waiting),
    count(model.loads),
  ];
  row.cells.forEach((cell, i) => set(cell, figures[i]));
  row.does = LOADED.includes(model.state) ? "unload" : "load";
  row.button.hidden = !manages || (model.pinned && row.does === "unload");
  row.button.disabled = BUSY.includes(model.state);
  const label = row.does === "load" ? "Load" : "Unload";
  set(row.button, label);
  row.button.setAttribute("aria-label", `${label} ${model.name}`);
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Loads or unloads a model. What the server answers is told where it is an error. */
async function change(name) {
  const { does, button } = rows.get(name);
  button.disabled = true;
  $("models-error").hidden = true;
  try {
    const response = await ask(`models/${does}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: name }),
    });
    if (!response.ok) throw new Error(await failure(response));
    announce(does === "load" ? `${name} is loaded.` : `${name} is unloaded.`);
  } catch (error) {
    $("models-error").textContent =
      error instanceof TypeError ? "The server cannot be reached." : error.message;
    $("models-error").hidden = false;
    button.disabled = false;
  }
}

/** Bytes in few characters: 512 MiB, 1.2 GiB. */
function size(bytes) {
  const mib = bytes / 2 ** 20;
  return mib < 1024 ? `${mib.toFixed(0)} MiB` : `${(mib / 1024).toFixed(1)} GiB`;
}
