// Calls of tools: cards with their arguments, and a form in which the user answers them.

import { element } from "./dom.js";

/** Takes in parts of calls from a stream: {index, id, function: {name, arguments}}. */
export function takeCalls(turn, parts) {
  turn.calls ??= [];
  for (const { index = 0, id, function: part } of parts) {
    const call = (turn.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id = id || call.id;
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
}

/** The calls of a turn. `answer(results)`: takes the user's answers, where it may. */
export function cards(turn, answer) {
  const fields = turn.calls.map((call) =>
    element("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, required: true }),
  );
  const all = turn.calls.map((call, i) =>
    element(
      "div",
      { class: "call", role: "group", "aria-label": `Call of ${call.name}` },
      element("strong", {}, call.name),
      element("pre", { tabindex: 0 }, element("code", {}, laidOut(call.arguments))),
      answer ? fields[i] : null,
    ),
  );
  if (!answer) return element("div", { class: "calls" }, ...all);
  const send = element("button", { type: "submit", class: "primary" }, "Send results");
  const form = element("form", { class: "calls" }, ...all, element("div", { class: "row" }, send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer(turn.calls.map((call, i) => ({ id: call.id, text: fields[i].value })));
  });
  return form;
}

/** The user's answers to calls. */
export function results(turn, calls) {
  const nameOf = (id) => calls.find((call) => call.id === id)?.name ?? id;
  return element(
    "div",
    { class: "calls" },
    ...turn.results.map(({ id, text }) =>
      element(
        "div",
        { class: "call", role: "group", "aria-label": `Result of ${nameOf(id)}` },
        element("strong", {}, `${nameOf(id)} returned`),
        element("pre", { tabindex: 0 }, element("code", {}, laidOut(text))),
      ),
    ),
  );
}

/** JSON in lines; any other text as it is. */
function laidOut(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
