// The chat: its conversation, and the answers to it.

import * as attachments from "./attachments.js";
import { addTurn, choose, newConversation, pathTo, shownPath } from "./branches.js";
import * as conversations from "./conversations.js";
import { $, announce, ask, count, duration, element, events, failure } from "./dom.js";
import { takeCalls } from "./calls.js";
import { fit as fitFormat, format } from "./format.js";
import { chosenModel, list as listModels, showContext } from "./models.js";
import { requestFor } from "./request.js";
import { settings } from "./settings.js";
import { viewOf } from "./turns.js";

const EXAMPLES = {
  tiny: ["What is the capital of France?", "Tell me a story about a dog.", "What is 7 + 5?"],
};
const LONGEST_ANNOUNCEMENT = 2000;

let model = null;
let mode = "chat";
let conversation = newConversation(mode);
let running = null;
const views = new Map();
const deleted = new WeakSet();
const touch = matchMedia("(pointer: coarse)");

// The conversation

/** The model that answers. */
export function serve(served) {
  const same = model?.name === served.name;
  model = served;
  attachments.allow({ image: model.takes_images, audio: model.takes_audio });
  if (!same) fitFormat({ reads: model.template_reads });
  listModels(model);
  fitToMode();
  if (!same && !shownPath(conversation).length) begin();
  if (waits) $("composer").requestSubmit();
}

/** Shows an empty conversation. */
function begin() {
  open(newConversation(mode));
  $("input").focus({ preventScroll: true });
}

/** Shows a conversation in place of the present one, whose answer is stopped. */
function open(other) {
  if (other.id === conversation.id) return;
  running?.abort();
  running = null;
  busy(false);
  conversation = other;
  mode = conversation.mode;
  fitToMode();
  show();
}

function fitToMode() {
  for (const name of ["chat", "text"])
    $(`mode-${name}`).setAttribute("aria-pressed", name === mode);
  $("input").placeholder = mode === "chat" ? "Ask something" : "Text for the model to go on with";
  $("attach").hidden = mode === "text" || !model;
  $("format").hidden = mode === "text";
  if (mode === "text") attachments.taken();
}

/** Shows the chosen turns, from the first to the last. */
function show() {
  views.clear();
  const path = shownPath(conversation);
  $("messages").replaceChildren(...(path.length ? [] : [welcome()]));
  for (const turn of path) append(turn);
  showContext(path.at(-1)?.tokens ?? 0);
}

/** What the next request says, or null with a complaint where a box is not as it must be. */
function setup() {
  const { system, params } = settings();
  try {
    const asked = mode === "chat" ? format() : {};
    return { model: chosenModel(), system, params: { ...params, ...asked } };
  } catch (error) {
    complain(error.message);
    return null;
  }
}

function welcome() {
  const examples = mode === "text" ? ["Once upon a time"] : (EXAMPLES[model?.name] ?? []);
  const buttons = examples.map((text) =>
    element("button", { type: "button", onclick: () => send(text) }, text),
  );
  const name = model?.name ?? "the model";
  const title = mode === "chat" ? `Chat with ${name}` : `Have ${name} go on with your text`;
  const note =
    mode === "chat"
      ? conversations.note()
      : "No chat template: the text is the prompt, as it is.";
  return element(
    "div",
    { class: "empty" },
    element("h2", {}, title),
    element("p", {}, note),
    element("div", { class: "examples" }, ...buttons),
  );
}

/** Shows a turn at the end. */
function append(turn) {
  const parent = conversation.turns.find((other) => other.id === turn.parent);
  const view = viewOf(conversation, turn, parent?.text ?? "", does);
  views.set(turn.id, view);
  view.paint(running?.turn === turn);
  // In plain text, the prompt stands before its continuation.
  if (mode === "text" && turn.role === "user") return;
  $("messages").querySelector(".empty")?.remove();
  $("messages").append(view.node);
  toEnd(true);
}

async function keep(kept = conversation) {
  if (deleted.has(kept)) return;
  kept.changed = Date.now();
  const problem = await conversations.keep(kept);
  if (problem && kept === conversation) complain(problem);
}

function complain(text) {
  const line = element("p", { class: "error", role: "alert" }, text);
  $("messages").append(element("div", { class: "message" }, line));
  toEnd(true);
}

/** Scrolls on, unless the reader has scrolled back. */
function toEnd(always) {
  const list = $("messages");
  if (always || list.scrollHeight - list.scrollTop - list.clientHeight < 120)
    list.scrollTop = list.scrollHeight;
}

/** What buttons of a turn do. While an answer is written, they do nothing. */
const does = {
  edit(turn, text) {
    if (running || !setup()) return;
    const { role, attachments: files } = turn;
    const parent = conversation.turns.find((other) => other.id === turn.parent) ?? null;
    addTurn(conversation, parent, { role, text, ...(files ? { attachments: files } : {}) });
    show();
    answer();
  },
  /** Another answer to the same question: a branch. */
  retry(turn) {
    if (running) return;
    const parent = conversation.turns.find((other) => other.id === turn.parent);
    answer(pathTo(conversation, parent));
  },
  goOn(turn) {
    if (running) return;
    if (setup()?.params.response_format)
      complain("JSON schema: an answer that follows one is not continued. Ask for another.");
    else answer(pathTo(conversation, turn), turn);
  },
  /** The user's results of a turn's calls: {id, text}. */
  returned(turn, results) {
    if (running || !setup()) return;
    addTurn(conversation, turn, { role: "tool", text: "", results });
    answer();
  },
  choose(turn) {
    if (running) return;
    choose(conversation, turn);
    show();
    keep();
  },
};

conversations.connect({
  opened: (other) => {
    open(other);
    $("input").focus({ preventScroll: true });
  },
  isShown: (id) => id === conversation.id,
  renamed: (id, title) => {
    if (id === conversation.id) conversation.title = title;
  },
  removed: (id) => {
    if (id !== conversation.id) return;
    deleted.add(conversation);
    begin();
  },
});
attachments.connect(complain);
$("new-chat").addEventListener("click", begin);
for (const name of ["chat", "text"])
  $(`mode-${name}`).addEventListener("click", () => {
    if (mode === name) return;
    mode = name;
    begin();
  });

// Writing

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}

function hint() {
  $("hint-keys").textContent = touch.matches
    ? "Enter begins a line."
    : "Enter sends, Shift + Enter begins a line.";
}

touch.addEventListener("change", hint);
hint();
$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", (event) => {
  // A keyboard on the screen has no Shift + Enter.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
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
  if (!text.trim() && !attachments.waiting()) return;
  const last = shownPath(conversation).at(-1);
  if (last?.calls?.length && !last.error) {
    complain("The model waits for its tools: send their results, or ask for another answer.");
    return;
  }
  if (!setup()) return;
  $("input").value = "";
  fit();
  send(text);
});

function send(text) {
  if (running || !model) return;
  const files = attachments.taken();
  const turn = { role: "user", text, ...(files.length ? { attachments: files } : {}) };
  append(addTurn(conversation, shownPath(conversation).at(-1) ?? null, turn));
  answer();
}

// Answers

/** Whether an answer is being written, which `Stop` ends. */
function busy(is) {
  $("send").textContent = is ? "Stop" : "Send";
  $("send").classList.toggle("stop", is);
}

/** Has the model answer the last turn of a path, or go on with it where `begun` is that turn. */
async function answer(path = shownPath(conversation), begun = null) {
  const stated = setup();
  if (!stated) return;
  const asked = requestFor(conversation, path, begun !== null, stated);
  const turn =
    begun ?? addTurn(conversation, path.at(-1), { role: "assistant", text: "", thoughts: "" });
  const mine = conversation;
  const abort = new AbortController();
  running = { turn, abort: () => abort.abort() };
  delete turn.stopped;
  busy(true);
  show();
  announce("The answer is being written.");
  keep();
  const figures = await read(asked, turn, abort);
  if (running?.turn === turn) {
    running = null;
    busy(false);
  }
  // The answer that was to go on stays a good one.
  if (figures.error && begun) complain(figures.error);
  else if (figures.error) turn.error = figures.error;
  turn.facts = factsOf(figures);
  if (stated.params.response_format && !turn.error)
    turn.facts.push(isJson(turn.text) ? "JSON" : "not whole JSON");
  const { usage } = figures;
  if (usage) turn.tokens = usage.prompt_tokens + usage.completion_tokens;
  if (mine === conversation) {
    views.get(turn.id)?.paint();
    showContext(turn.tokens ?? 0);
    announce(turn.error ?? turn.text.slice(0, LONGEST_ANNOUNCEMENT));
    toEnd(false);
  }
  keep(mine);
}

/** Reads an answer into its turn. Returns {start, first, usage, reason, error}, times in ms. */
async function read([path, body], turn, abort) {
  const figures = { start: performance.now(), first: null, usage: null, reason: null };
  let pending = 0;
  let pause = 0;
  const paint = () => {
    const began = performance.now();
    pending = 0;
    if (running?.turn !== turn) return;
    views.get(turn.id)?.paint(true);
    toEnd(false);
    // A long answer does not keep the page busy.
    pause = 4 * (performance.now() - began);
  };
  try {
    const response = await ask(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: abort.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      figures.usage = chunk.usage ?? figures.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      figures.reason = choice.finish_reason ?? figures.reason;
      if (take(choice, turn)) figures.first ??= performance.now();
      if (!pending) pending = setTimeout(paint, Math.max(16, pause));
    }
  } catch (error) {
    if (abort.signal.aborted) turn.stopped = true;
    else
      figures.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
  return figures;
}

/** Takes in a part of an answer. Returns whether there was anything in it. */
function take(choice, turn) {
  const more = choice.delta?.content ?? choice.text ?? "";
  const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
  turn.text += more;
  turn.thoughts = (turn.thoughts ?? "") + thought;
  const calls = choice.delta?.tool_calls;
  if (calls) takeCalls(turn, calls);
  return Boolean(more || thought || calls);
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** What is said below an answer. */
function factsOf({ start, first, usage, reason }) {
  const facts = [];
  const now = performance.now();
  if (usage) {
    // All tokens of a short answer may come at once.
    const after = first === null ? 0 : (now - first) / 1000;
    const writing = after > 0.1 ? after : (now - start) / 1000;
    facts.push(`${count(usage.completion_tokens)} tokens`);
    for (const [name, of] of Object.entries(usage.drafters || {}))
      facts.push(`${name}: ${of.accepted_draft_tokens} of ${of.draft_tokens} drafts`);
    if (usage.completion_tokens > 1)
      facts.push(`${count((usage.completion_tokens - 1) / Math.max(writing, 0.001))} tokens/s`);
  }
  if (first !== null) facts.push(`first after ${duration((first - start) / 1000)}`);
  if (reason === "length") facts.push("cut at the maximum");
  return facts;
}
