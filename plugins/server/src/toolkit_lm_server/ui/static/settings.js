// The controls of sampling. What nobody has touched is not sent: the server's defaults hold.

import { $, element } from "./dom.js";

const DOUBLE_TAP = 400;
const CONTROLS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, middle: 1 },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.05, middle: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.05, middle: 0 },
  { name: "repetition_penalty", label: "Repeat penalty", min: 0.5, max: 2, step: 0.05, middle: 1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, middle: 0 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, middle: 0 },
  { name: "top_k", label: "Top k", number: true, min: -1 },
  { name: "max_tokens", label: "Maximum tokens", number: true, min: 1 },
  { name: "seed", label: "Seed", number: true, min: 0 },
  { name: "stop", label: "Stop at", text: true },
  { name: "system", label: "System message", area: true },
];

const values = {};

/** The fields of a request that the user has set, and the system message. */
export function settings() {
  const { system = "", ...params } = values;
  return { system, params };
}

function slider(control) {
  const output = element("output", { class: "unset" }, "default");
  const input = element("input", {
    type: "range",
    min: control.min,
    max: control.max,
    step: control.step,
    value: control.middle,
    "data-name": control.name,
    "aria-label": control.label,
    title: "A double click, a double tap or the Delete key restores the default",
  });
  const reset = () => {
    delete values[control.name];
    input.value = control.middle;
    output.textContent = "default";
    output.className = "unset";
  };
  input.addEventListener("input", () => {
    values[control.name] = Number(input.value);
    output.textContent = Number(input.value).toFixed(control.step < 0.1 ? 2 : 1);
    output.className = "";
  });
  input.addEventListener("dblclick", reset);
  input.addEventListener("keydown", (event) => event.key === "Delete" && reset());
  // Not every browser for touch turns two taps into a double click.
  let tapped = -Infinity;
  input.addEventListener("pointerup", (event) => {
    if (event.pointerType === "mouse") return;
    // The slider takes the value of the second tap first.
    if (event.timeStamp - tapped < DOUBLE_TAP) setTimeout(reset);
    tapped = event.timeStamp;
  });
  return element("label", {}, control.label, output, input);
}

function field(control) {
  const input = control.area
    ? element("textarea", { rows: 2, "data-name": control.name, placeholder: "none" })
    : element("input", {
        type: control.number ? "number" : "text",
        min: control.min,
        "data-name": control.name,
        placeholder: control.text ? "none" : "default",
      });
  input.addEventListener("input", () => {
    const text = control.text ? input.value.replaceAll("\\n", "\n") : input.value;
    if (text.trim() === "" && !(control.text && text)) delete values[control.name];
    else values[control.name] = control.number ? Number(text) : text;
  });
  return element("label", { class: control.area ? "full" : null }, control.label, input);
}

$("settings").prepend(
  ...CONTROLS.map((one) => (one.number || one.text || one.area ? field(one) : slider(one))),
);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings-toggle").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-toggle").setAttribute("aria-expanded", !$("settings").hidden);
});
