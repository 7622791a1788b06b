// Which model or adapter is asked, and how full its context is.

import { $, ask, count, element } from "./dom.js";

let served = null;
let entries = [];

/** The name that requests state. */
export const chosenModel = () => $("model-pick").value || served?.name;

/** Reads which models and adapters there are. Without a second one, nothing is to be chosen. */
export async function list(model) {
  served = model;
  try {
    const response = await ask("v1/models");
    entries = response.ok ? (await response.json()).data : [];
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

/** A name with what else is known: the model that an adapter is for, and a state. */
function nameOf({ id, parent, state }) {
  const notes = [parent && `adapter of ${parent}`, typeof state === "string" && state];
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
