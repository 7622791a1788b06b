// The description of the API, made of /openapi.json.

import { $, ask, duration, element } from "./dom.js";

const DEEPEST = 5;
const IDLE = "It has no effect.";
const MOST_SHOWN = 200000;
const EXAMPLES = {
  "/v1/chat/completions": {
    messages: [{ role: "user", content: "What is the capital of France?" }],
    max_tokens: 32,
  },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 32 },
  "/v1/embeddings": { input: "Once upon a time" },
  "/v1/responses": { input: "What is the capital of France?" },
  "/tokenize": { prompt: "Once upon a time" },
  "/detokenize": { tokens: [5, 6, 7] },
};
const dark = matchMedia("(prefers-color-scheme: dark)");
let document_ = {};

function paint() {
  const theme = localStorage.getItem("toolkit_lm.theme") ?? "system";
  document.documentElement.dataset.theme =
    theme === "system" ? (dark.matches ? "dark" : "light") : theme;
}

dark.addEventListener("change", paint);
paint();

/** A schema, where it is only named. */
function resolved(schema) {
  for (let i = 0; schema?.$ref && i < 20; i++)
    schema = document_.components.schemas[schema.$ref.split("/").pop()];
  return schema ?? {};
}

/** The alternatives of a schema, but for null. */
function variants(schema) {
  const all = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  return all ? all.filter((one) => one.type !== "null") : [schema];
}

/** A type in a few words: "list of string". */
function named(schema, depth = 0) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf || schema.oneOf || schema.allOf)
    return depth > 2
      ? "…"
      : [...new Set(variants(schema).map((one) => named(one, depth + 1)))].join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.type === "array")
    return `list of ${depth > 2 || !schema.items ? "anything" : named(schema.items, depth + 1)}`;
  if (Array.isArray(schema.type)) return schema.type.filter((one) => one !== "null").join(" | ");
  return schema.type ?? "anything";
}

function limits(schema) {
  const found = [];
  for (const one of variants(schema)) {
    for (const [key, sign] of [
      ["minimum", "≥"],
      ["exclusiveMinimum", ">"],
      ["maximum", "≤"],
      ["exclusiveMaximum", "<"],
      ["maxLength", "length ≤"],
      ["maxItems", "items ≤"],
    ]) {
      if (one[key] !== undefined) found.push(`${sign} ${one[key]}`);
    }
  }
  return [...new Set(found)].join(", ");
}

/** Schemas with fields that stand in another one. */
function inner(schema) {
  return variants(schema).flatMap((one) => {
    if (one.$ref) return [resolved(one)];
    if (one.type === "array" && one.items) return inner(one.items);
    return one.properties ? [one] : [];
  }).filter((one) => one.properties);
}

/** The fields of an object, those that it must have first, with those of objects in it. */
function fields(schema, depth = 0) {
  const required = new Set(schema.required ?? []);
  const all = Object.entries(schema.properties ?? {});
  const idle = all.filter(([, one]) => one.description === IDLE).map(([name]) => name);
  const shown = all
    .filter(([name]) => !idle.includes(name))
    .sort(([a], [b]) => required.has(b) - required.has(a));
  const rows = shown.map(([name, one]) => {
    const given =
      one.default !== undefined && one.default !== null
        ? `default ${JSON.stringify(one.default)}`
        : "";
    const notes = [required.has(name) ? "required" : given, limits(one)]
      .filter(Boolean)
      .join(" · ");
    const objects = depth < DEEPEST ? inner(one) : [];
    const text =
      one.description ??
      variants(one)
        .map((other) => resolved(other).description)
        .find(Boolean);
    return element(
      "li",
      {},
      element(
        "div",
        { class: "field" },
        element("code", {}, name),
        element("span", { class: "type" }, named(one)),
        element("span", { class: required.has(name) ? "required" : "faint" }, notes),
      ),
      text ? element("p", {}, text) : null,
      ...objects.map((other) =>
        folded(`fields of ${other.title ?? name}`, () => fields(other, depth + 1)),
      ),
    );
  });
  if (idle.length)
    rows.push(
      element(
        "li",
        { class: "faint" },
        `Taken without effect, where they ask for nothing: ${idle.join(", ")}`,
      ),
    );
  return element("ul", { class: "fields" }, ...rows);
}

/** Something that is made when it is unfolded. */
function folded(title, make) {
  const details = element("details", {}, element("summary", {}, title));
  details.addEventListener(
    "toggle",
    () => details.open && details.children.length === 1 && details.append(make()),
  );
  return details;
}

function example(path, schema) {
  if (EXAMPLES[path]) return EXAMPLES[path];
  const made = {};
  for (const name of schema.required ?? []) {
    const first = resolved(variants(schema.properties?.[name] ?? {})[0]);
    made[name] =
      { string: "text", integer: 1, number: 1, boolean: false, array: ["text"] }[first.type] ?? {};
  }
  return made;
}

function trial(method, path, schema) {
  const parameters = [...path.matchAll(/\{([^}:]+)(?::[^}]+)?\}/g)].map((one) => one[1]);
  const inputs = parameters.map((name) =>
    element("input", { placeholder: name, "aria-label": name }),
  );
  const body = schema && element("textarea", { spellcheck: "false", "aria-label": "Body" });
  if (body) {
    body.value = JSON.stringify(example(path, schema), null, 2);
    body.rows = Math.min(16, body.value.split("\n").length);
  }
  const status = element("span", { class: "faint" });
  const answer = element("pre", { hidden: true });
  const button = element("button", { type: "button", class: "primary" }, "Send");
  button.addEventListener("click", async () => {
    button.disabled = true;
    answer.hidden = false;
    answer.textContent = "";
    const start = performance.now();
    try {
      const at = parameters
        .reduce(
          (text, name, i) =>
            text.replace(new RegExp(`\\{${name}(:[^}]+)?\\}`), () =>
              encodeURIComponent(inputs[i].value),
            ),
          path,
        )
        .slice(1);
      const response = await ask(at, {
        method,
        ...(body ? { headers: { "content-type": "application/json" }, body: body.value } : {}),
      });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        text += part.value;
        answer.textContent = text.slice(0, MOST_SHOWN);
      }
      if (response.headers.get("content-type")?.includes("json"))
        answer.textContent = JSON.stringify(JSON.parse(text), null, 2).slice(0, MOST_SHOWN);
      status.textContent =
        `${response.status} after ${duration((performance.now() - start) / 1000)}`;
    } catch (error) {
      status.textContent = error.message;
    }
    button.disabled = false;
  });
  return element(
    "div",
    { class: "trial" },
    ...inputs,
    body,
    element("div", { class: "row" }, button, status),
    answer,
  );
}

function operation(path, method, one) {
  const content = one.requestBody?.content ?? {};
  const schema = content["application/json"] && resolved(content["application/json"].schema);
  const form = content["multipart/form-data"] && resolved(content["multipart/form-data"].schema);
  const answers = Object.entries(one.responses ?? {}).map(([status, answer]) => {
    const kinds = Object.entries(answer.content ?? {}).map(([kind, { schema: shape }]) => [
      kind,
      resolved(shape),
    ]);
    const bodies = kinds
      .filter(([, shape]) => shape.properties)
      .map(([kind, shape]) => folded(`${shape.title ?? "fields"} · ${kind}`, () => fields(shape)));
    return element(
      "li",
      {},
      element(
        "div",
        { class: "field" },
        element("code", { class: status.startsWith("2") ? "good" : "" }, status),
        element("span", {}, answer.description ?? ""),
      ),
      ...bodies,
    );
  });
  const known = schema ?? form;
  return element(
    "section",
    { id: `${method}-${path}` },
    element(
      "h2",
      {},
      element("span", { class: `method ${method}` }, method.toUpperCase()),
      element("code", {}, path),
    ),
    one.description ? element("p", {}, one.description) : element("p", {}, one.summary ?? ""),
    known?.properties
      ? element("h3", {}, form && !schema ? "Fields of the form" : "Fields of the body")
      : null,
    known?.properties ? fields(known) : null,
    form && !schema ? null : folded("Try it", () => trial(method.toUpperCase(), path, schema)),
    answers.length ? folded("Answers", () => element("ul", { class: "fields" }, ...answers)) : null,
  );
}

async function show() {
  const response = await fetch("openapi.json", { credentials: "omit" });
  document_ = await response.json();
  $("about").textContent = `${document_.info.title} ${document_.info.version}`;
  const all = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => ({ path, method, one })),
  );
  const draw = () => {
    const words = $("filter").value.toLowerCase();
    const shown = all.filter(({ path, method }) =>
      `${method} ${path}`.toLowerCase().includes(words),
    );
    $("routes").replaceChildren(
      ...shown.map(({ path, method }) =>
        element(
          "li",
          {},
          element(
            "a",
            { href: `#${method}-${path}` },
            element("span", { class: `method ${method}` }, method.toUpperCase()),
            path,
          ),
        ),
      ),
    );
    $("operations").replaceChildren(
      ...(shown.length
        ? shown.map(({ path, method, one }) => operation(path, method, one))
        : [element("p", { class: "faint" }, "No route has such a name.")]),
    );
  };
  $("filter").addEventListener("input", draw);
  draw();
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

show().catch((error) =>
  $("operations").replaceChildren(element("p", { class: "error" }, error.message)),
);
