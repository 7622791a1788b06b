// What a chat request says besides sampling: a JSON schema, tools, and options of the template.

import { $, element } from "./dom.js";

const EFFORTS = ["none", "minimal", "low", "medium", "high"];
const SWITCHES = ["enable_thinking", "thinking"];
const OWN_BOXES = ["tools", "reasoning_effort", ...SWITCHES];
const LONGEST = 256 * 2 ** 10;

/** By the name of a box: its value where it is filled in well, and its fault where not. */
const boxes = new Map();
let chosen = { effort: "", switches: {} };

/**
 * The fields of a chat request. Raises an error that names the box which is not as it must be:
 * the request would be another one without it.
 */
export function format() {
  for (const [name, { fault }] of boxes) if (fault) throw new Error(`${name}: ${fault}`);
  const fields = {};
  const schema = boxes.get("JSON schema")?.value;
  const tools = boxes.get("Tools")?.value;
  const options = { ...boxes.get("Template options")?.value, ...chosen.switches };
  if (schema)
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools?.length) fields.tools = tools;
  if (chosen.effort) fields.reasoning_effort = chosen.effort;
  if (Object.keys(options).length) fields.chat_template_kwargs = options;
  return fields;
}

/** Shows the controls that the model's chat template has: {reads}, the names that it reads. */
export function fit({ reads }) {
  boxes.clear();
  chosen = { effort: "", switches: {} };
  const made = [box("JSON schema", '{"type": "object", …}', schemaOf)];
  if (reads === null || reads.includes("tools"))
    made.push(box("Tools", '[{"name": "weather", "parameters": {…}}]', toolsOf));
  if (reads?.includes("reasoning_effort"))
    made.unshift(pick("Reasoning effort", EFFORTS, (value) => (chosen.effort = value)));
  for (const name of SWITCHES.filter((one) => reads?.includes(one)))
    made.unshift(
      pick(name, ["true", "false"], (value) => {
        delete chosen.switches[name];
        if (value) chosen.switches[name] = value === "true";
      }),
    );
  const others = (reads ?? []).filter((one) => !OWN_BOXES.includes(one));
  if (others.length)
    made.push(box("Template options", others.map((one) => `"${one}": …`).join(", "), recordOf));
  $("format").replaceChildren(...made);
}

function pick(name, values, take) {
  const select = element(
    "select",
    { "data-name": name },
    element("option", { value: "" }, "default"),
    ...values.map((value) => element("option", { value }, value)),
  );
  select.addEventListener("change", () => take(select.value));
  return element("label", {}, name, select);
}

/** A box for JSON. `check(value)` returns what is sent, or raises an error with what is wrong. */
function box(name, placeholder, check) {
  const fault = element("p", { class: "error", role: "status", hidden: true });
  const area = element("textarea", {
    rows: 2,
    placeholder,
    spellcheck: "false",
    maxlength: LONGEST,
    "data-name": name,
  });
  area.addEventListener("input", () => {
    const state = { value: null, fault: "" };
    try {
      if (area.value.trim()) state.value = check(parsed(area.value));
    } catch (error) {
      state.fault = error.message;
    }
    boxes.set(name, state);
    area.setAttribute("aria-invalid", Boolean(state.fault));
    fault.hidden = !state.fault;
    fault.textContent = state.fault;
  });
  return element("div", { class: "full" }, element("label", {}, name, area), fault);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`this is not JSON (${error.message}).`);
  }
}

function recordOf(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw new Error("an object is expected: {…}.");
  return value;
}

const TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"];

/** A JSON schema whose types exist. The server checks the rest. */
function schemaOf(value) {
  const types = [recordOf(value).type ?? []].flat();
  const wrong = types.find((one) => !TYPES.includes(one));
  if (wrong !== undefined)
    throw new Error(`the type ${JSON.stringify(wrong)} is none of ${TYPES.join(", ")}.`);
  const inner = [...Object.values(recordOf(value.properties ?? {})), value.items ?? []].flat();
  inner.filter((one) => typeof one !== "boolean").forEach(schemaOf);
  return value;
}

/** Tools as in OpenAI's API. A bare function is wrapped. */
function toolsOf(value) {
  if (!Array.isArray(value)) throw new Error("a list is expected: [{…}, …].");
  return value.map((one, i) => {
    const tool = recordOf(one).function ? one : { type: "function", function: one };
    if (typeof tool.function.name !== "string" || !/^[\w.-]{1,64}$/.test(tool.function.name))
      throw new Error(`tool ${i + 1} has no "name" of letters, digits, "_", "." and "-".`);
    if (tool.function.parameters !== undefined) schemaOf(tool.function.parameters);
    return tool;
  });
}
