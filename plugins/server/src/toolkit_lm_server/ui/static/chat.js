// The chat.

import { $, ask, count, duration, element, events, failure } from "./dom.js";
import { rendered } from "./markdown.js";

const MOST_IMAGE_BYTES = 8 * 2 ** 20;
const EXAMPLES = {
  tiny: ["What is the capital of France?", "Tell me a story about a dog.", "What is 7 + 5?"],
  "tiny-vision": [],
};
const SETTINGS = [
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
let model = null;
let turns = [];
let mode = "chat";
let pictures = [];
let running = null;

// Settings. What nobody has touched is not sent: the server's defaults hold.

function slider(one) {
  const output = element("output", { class: "unset" }, "default");
  const input = element("input", {
    type: "range",
    min: one.min,
    max: one.max,
    step: one.step,
    value: one.middle,
    "data-name": one.name,
  });
  input.addEventListener("input", () => {
    values[one.name] = Number(input.value);
    output.textContent = Number(input.value).toFixed(one.step < 0.1 ? 2 : 1);
    output.className = "";
  });
  output.title = "Double-click the slider for the default";
  input.addEventListener("dblclick", () => {
    delete values[one.name];
    input.value = one.middle;
    output.textContent = "default";
    output.className = "unset";
  });
  return element("label", {}, one.label, output, input);
}

function field(one) {
  const input = one.area
    ? element("textarea", { rows: 2, "data-name": one.name, placeholder: "none" })
    : element("input", {
        type: one.number ? "number" : "text",
        min: one.min,
        "data-name": one.name,
        placeholder: one.text ? "none" : "default",
      });
  input.addEventListener("input", () => {
    const text = one.text ? input.value.replaceAll("\\n", "\n") : input.value;
    if (text.trim() === "" && !(one.text && text)) delete values[one.name];
    else values[one.name] = one.number ? Number(text) : text;
  });
  return element("label", { class: one.area ? "full" : null }, one.label, input);
}

$("settings").append(
  ...SETTINGS.map((one) => (one.number || one.text || one.area ? field(one) : slider(one))),
);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings-toggle").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-toggle").setAttribute("aria-expanded", !$("settings").hidden);
});

// Modes

for (const one of ["chat", "text"]) {
  $(`mode-${one}`).addEventListener("click", () => {
    if (mode === one) return;
    mode = one;
    for (const other of ["chat", "text"])
      $(`mode-${other}`).setAttribute("aria-pressed", other === mode);
    $("input").placeholder = mode === "chat" ? "Ask something" : "Text for the model to go on with";
    clear();
  });
}

/** The model that answers. */
export function serve(served) {
  const same = model?.name === served.name;
  model = served;
  $("attach").hidden = !model.takes_images;
  if (!same) clear();
  if (waits) $("composer").requestSubmit();
}

function clear() {
  running?.abort();
  turns = [];
  pictures = [];
  showPictures();
  const examples = mode === "text" ? ["Once upon a time"] : (EXAMPLES[model?.name] ?? []);
  const buttons = examples.map((text) =>
    element("button", { type: "button", onclick: () => send(text) }, text),
  );
  const title =
    mode === "chat"
      ? `Chat with ${model?.name ?? "the model"}`
      : `${model?.name ?? "The model"} goes on with your text`;
  const note =
    mode === "chat"
      ? "Nothing is kept: the conversation ends with this tab."
      : "No chat template: the text is the prompt, as it is.";
  $("messages").replaceChildren(
    element(
      "div",
      { class: "empty" },
      element("h1", {}, title),
      element("p", {}, note),
      element("div", { class: "examples" }, ...buttons),
    ),
  );
  $("input").focus({ preventScroll: true });
}

$("new-chat").addEventListener("click", clear);

// Pictures

function addFiles(files) {
  if (!model?.takes_images) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > MOST_IMAGE_BYTES) {
      complain(`${file.name} is larger than ${MOST_IMAGE_BYTES / 2 ** 20} MiB.`);
      continue;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      pictures.push({ url: reader.result, name: file.name });
      showPictures();
    });
    reader.readAsDataURL(file);
  }
}

function showPictures() {
  $("attached").hidden = !pictures.length;
  const drop = (one) => () => {
    pictures = pictures.filter((other) => other !== one);
    showPictures();
  };
  $("attached").replaceChildren(
    ...pictures.map((one) =>
      element(
        "figure",
        {},
        element("img", { src: one.url, alt: one.name }),
        element(
          "button",
          { type: "button", "aria-label": `Remove ${one.name}`, onclick: drop(one) },
          "✕",
        ),
      ),
    ),
  );
}

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  addFiles($("file").files);
  $("file").value = "";
});
$("input").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length && model?.takes_images) {
    event.preventDefault();
    addFiles(files);
  }
});
for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  $("chat").addEventListener(kind, (event) => {
    if (!model?.takes_images) return;
    event.preventDefault();
    $("chat").classList.toggle("dropping", over);
    if (kind === "drop") addFiles(event.dataTransfer.files);
  });
}

// Writing

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}

$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
/** Whether the text was sent before the model was known: it is sent when it is. */
let waits = false;

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  waits = !model;
  if (waits) return;
  if (running) {
    running.abort();
    return;
  }
  const text = $("input").value;
  if (!text.trim() && !pictures.length) return;
  $("input").value = "";
  fit();
  send(text);
});

function busy(is) {
  $("send").textContent = is ? "Stop" : "Send";
  $("send").classList.toggle("stop", is);
}

function complain(text) {
  append(element("div", { class: "message" }, element("p", { class: "error" }, text)));
}

function append(node) {
  $("messages").querySelector(".empty")?.remove();
  $("messages").append(node);
  toEnd(true);
}

/** Scrolls on, unless the reader has scrolled back. */
function toEnd(always) {
  const list = $("messages");
  if (always || list.scrollHeight - list.scrollTop - list.clientHeight < 120)
    list.scrollTop = list.scrollHeight;
}

function send(text) {
  if (running || !model) return;
  if (mode === "text") turns = [];
  const turn = { role: "user", text, pictures, node: element("div", { class: "message user" }) };
  pictures = [];
  showPictures();
  if (turn.pictures.length)
    turn.node.append(
      element(
        "div",
        { class: "pictures" },
        ...turn.pictures.map((one) => element("img", { src: one.url, alt: one.name })),
      ),
    );
  if (mode === "chat" && text) turn.node.append(element("div", { class: "text" }, text));
  if (mode === "chat") append(turn.node);
  turns.push(turn);
  answer();
}

// Answers

function body() {
  const { system, ...params } = values;
  const asked = {
    model: model.name,
    stream: true,
    stream_options: { include_usage: true },
    ...params,
  };
  if (mode === "text") return ["v1/completions", { ...asked, prompt: turns.at(-1).text }];
  const content = (turn) =>
    turn.pictures?.length
      ? [
          ...turn.pictures.map((one) => ({ type: "image_url", image_url: { url: one.url } })),
          { type: "text", text: turn.text },
        ]
      : turn.text;
  const messages = turns.map((turn) => ({ role: turn.role, content: content(turn) }));
  if (system) messages.unshift({ role: "system", content: system });
  return ["v1/chat/completions", { ...asked, messages }];
}

async function answer() {
  const text = element("div", { class: "text" });
  const about = element("div", { class: "about" });
  const node = element("div", { class: "message assistant writing" }, text, about);
  const [path, asked] = body();
  const turn = { role: "assistant", text: "", thoughts: "", node };
  append(node);
  const abort = (running = new AbortController());
  busy(true);
  const start = performance.now();
  let first = null;
  let usage = null;
  let reason = null;
  let pending = 0;
  const paint = () => {
    pending = 0;
    if (mode === "text")
      text.replaceChildren(
        element(
          "div",
          { class: "plain" },
          element("span", { class: "given" }, asked.prompt),
          turn.text,
        ),
      );
    else text.replaceChildren(rendered(turn.text));
    if (turn.thoughts) {
      const details =
        node.querySelector("details") ??
        element(
          "details",
          {},
          element("summary", {}, "Reasoning"),
          element("div", { class: "plain" }),
        );
      details.lastChild.textContent = turn.thoughts;
      if (!details.parentNode) node.prepend(details);
    }
    toEnd(false);
  };
  try {
    const response = await ask(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(asked),
      signal: abort.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const more = choice.delta?.content ?? choice.text ?? "";
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
      if (more || thought) first ??= performance.now();
      turn.text += more;
      turn.thoughts += thought;
      // A hidden window has no frames.
      if (!pending)
        pending = document.hidden ? setTimeout(paint, 100) : requestAnimationFrame(paint);
    }
  } catch (error) {
    if (abort.signal.aborted) reason = "stopped";
    else {
      reason = "error";
      node.append(
        element(
          "p",
          { class: "error" },
          error instanceof TypeError ? "The server cannot be reached." : error.message,
        ),
      );
    }
  }
  const seconds = (performance.now() - start) / 1000;
  node.classList.remove("writing");
  if (running === abort) {
    running = null;
    busy(false);
  }
  // It was asked in a conversation that is gone.
  if (!node.isConnected) return;
  paint();
  turns.push(turn);
  const facts = [];
  if (usage) {
    // All tokens of a short answer may come at once.
    const after = first === null ? 0 : (performance.now() - first) / 1000;
    const writing = after > 0.1 ? after : seconds;
    facts.push(`${count(usage.completion_tokens)} tokens`);
    for (const [name, of] of Object.entries(usage.drafters || {}))
      facts.push(`${name}: ${of.accepted_draft_tokens} of ${of.draft_tokens} drafts`);
    if (usage.completion_tokens > 1)
      facts.push(`${count((usage.completion_tokens - 1) / Math.max(writing, 0.001))} tokens/s`);
  }
  if (first !== null) facts.push(`first after ${duration((first - start) / 1000)}`);
  if (reason === "length") facts.push("cut at the maximum");
  if (reason === "stopped") facts.push("stopped");
  about.append(
    ...facts.map((fact) => element("span", {}, fact)),
    element(
      "button",
      { type: "button", onclick: () => navigator.clipboard?.writeText(turn.text) },
      "Copy",
    ),
    element("button", { type: "button", onclick: () => again(turn) }, "Retry"),
  );
  toEnd(false);
}

/** Asks anew for an answer, and forgets what came after it. */
function again(turn) {
  if (running) return;
  const index = turns.indexOf(turn);
  if (index < 0) return;
  for (const gone of turns.splice(index)) gone.node.remove();
  answer();
}
