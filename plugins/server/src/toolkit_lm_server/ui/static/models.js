// Which model or adapter is asked, and how full its context is.

import { $, ask, count, element } from "./dom.js";

let served = null;
let entries = [];
let pooled = new Map();

/** The name that requests state. */
export const chosenModel = () => $("model-pick").value || served?.name;

/** Reads which models and adapters there are. Without a second one, nothing is to be chosen. */
export async function list(model) {
  served = model;
  try {
    const response = await ask("v1/models");
    const data = response.ok ? (await response.json()).data : [];
    entries = data.filter((entry) => ofPool(entry)?.generates !== false);
  } catch {
    entries = [];
  }
  const before = $("model-pick").value;
  const known = entries.some((entry) => entry.id === before);
  $("model-pick").replaceChildren(
    ...entries.map((entry) => element("option", { value: entry.id }, nameOf(entry))),
  );
  $("model-pick").value = known ? before : served.name;
  $("model-pick").hidden = entries.length < 2;
}

/** Takes in the states of the models, where there are several. */
export function states(models) {
  pooled = new Map(models.map((model) => [model.name, model]));
  for (const option of $("model-pick").options) {
    const entry = entries.find((one) => one.id === option.value);
    if (!entry) continue;
    const text = nameOf({ ...entry, state: ofPool(entry)?.state ?? entry.state });
    if (option.textContent !== text) option.textContent = text;
  }
}

const ofPool = (entry) => pooled.get(entry.parent ?? entry.id);

/** A name with what else is known: the model that another name is for, and a state. */
function nameOf({ id, parent, aliases, state }) {
  const kind = aliases?.includes(id) ? "alias" : "adapter";
  const notes = [parent && `${kind} of ${parent}`, typeof state === "string" && state];
  const said = notes.filter(Boolean).join(", ");
  return said ? `${id} (${said})` : id;
}

/** Shows how many tokens of the model's context a conversation takes; 0: not known yet. */
export function showContext(tokens) {
  const entry = entries.find((one) => one.id === chosenModel());
  const most = entry?.max_model_len ?? served?.max_model_len;
  $("context").hidden = !tokens || !most;
  if (!tokens || !most) return;
  $("context-meter").max = most;
  $("context-meter").high = 0.9 * most;
  $("context-meter").value = Math.min(tokens, most);
  $("context-text").textContent = `${count(tokens)} of ${count(most)} tokens`;
}

$("model-pick").addEventListener("focus", () => served && list(served));
