// The list of kept conversations: find, open, rename, export, import and delete them.

import { titleOf } from "./branches.js";
import { $, element, iconButton } from "./dom.js";
import { exported, imported } from "./exchange.js";
import * as store from "./store.js";

const LONGEST_TITLE = 200;
let chat = null;

/**
 * Takes what the list does in the chat: `opened(conversation)`, `isShown(id)`,
 * `renamed(id, title)` and `removed(id)`.
 */
export function connect(does) {
  chat = does;
}

/** Keeps a conversation if the switch is on. Returns why it could not be kept, or an empty text. */
export async function keep(conversation) {
  if (!store.keeps() || !conversation.turns.length) return "";
  try {
    await store.put(conversation);
  } catch (error) {
    return `This conversation could not be kept: ${error.message}`;
  }
  if (!$("shelf").hidden) await show();
  return "";
}

/** A line that says whether conversations are kept. */
export function note() {
  if (store.obstacle()) return store.obstacle();
  return store.isOn()
    ? "Conversations are kept in this browser only."
    : "Nothing is kept: the conversation ends with this tab.";
}

function say(text, bad = false) {
  $("shelf-note").textContent = text;
  $("shelf-note").classList.toggle("error", bad);
}

/** Does something, and shows the reason where that fails. */
async function attempt(action) {
  try {
    await action();
  } catch (error) {
    say(error.message, true);
  }
}

const searched = () => $("shelf-search").value.toLowerCase().split(/\s+/).filter(Boolean);

function contains(conversation, words) {
  const whole = [
    titleOf(conversation),
    ...conversation.turns.map((turn) => turn.text),
  ].join("\n").toLowerCase();
  return words.every((word) => whole.includes(word));
}

async function show() {
  const words = searched();
  const kept = await store.all();
  const found = kept.filter((one) => contains(one, words));
  $("shelf-keep").checked = store.isOn();
  $("shelf-keep").disabled = Boolean(store.obstacle());
  $("shelf-export").disabled = !found.length;
  $("shelf-clear").disabled = !kept.length;
  $("shelf-list").replaceChildren(...found.map(entry));
  $("shelf-none").hidden = Boolean(found.length);
  $("shelf-none").textContent = kept.length ? "No conversation has these words." : "None yet.";
}

function entry(conversation) {
  const title = titleOf(conversation);
  const row = element("li", { class: chat.isShown(conversation.id) ? "open" : null });
  const opener = element(
    "button",
    {
      type: "button",
      class: "title",
      "aria-current": chat.isShown(conversation.id) ? "true" : null,
      onclick: () => {
        chat.opened(conversation);
        close();
      },
    },
    title,
    element("time", {}, new Date(conversation.changed).toLocaleString("en", { hour12: false })),
  );
  row.append(
    opener,
    iconButton("edit", `Rename ${title}`, () => rename(conversation, row)),
    iconButton("export", `Export ${title}`, () => save([conversation])),
    deleter(`Delete ${title}`, () => drop(conversation)),
  );
  return row;
}

function rename(conversation, row) {
  const input = element("input", {
    value: titleOf(conversation),
    maxlength: LONGEST_TITLE,
    "aria-label": "Title",
  });
  const form = element("form", {}, input);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(async () => {
      conversation.title = input.value.trim().slice(0, LONGEST_TITLE);
      chat.renamed(conversation.id, conversation.title);
      await store.put(conversation);
      await show();
    });
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    attempt(show);
  });
  row.replaceChildren(form);
  input.select();
}

/** A button that deletes when it is pressed a second time. */
function deleter(label, action, text = "") {
  const asked = element("span", {}, text);
  const reset = () => {
    button.classList.remove("sure");
    asked.textContent = text;
    button.setAttribute("aria-label", label);
  };
  const button = iconButton("remove", label, () => {
    if (button.classList.contains("sure")) return attempt(action).then(reset);
    button.classList.add("sure");
    asked.textContent = "Delete?";
    button.setAttribute("aria-label", `${label}: press again to delete`);
  });
  button.append(asked);
  button.addEventListener("blur", reset);
  return button;
}

async function drop(...gone) {
  for (const one of gone) {
    await store.remove(one.id);
    chat.removed(one.id);
  }
  await show();
  $("shelf-search").focus();
}

/** Has the browser save a file. */
function save(conversations) {
  const blob = new Blob([exported(conversations)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(blob), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

async function load(file) {
  const found = await imported(file);
  for (const one of found) await store.put(one);
  await show();
  say(`${found.length} imported.`);
}

function close() {
  if ($("shelf").hidden) return;
  $("shelf").hidden = true;
  $("shelf-toggle").setAttribute("aria-expanded", "false");
  $("shelf-toggle").focus();
}

$("shelf-toggle").addEventListener("click", () => {
  if (!$("shelf").hidden) return close();
  $("shelf").hidden = false;
  $("shelf-toggle").setAttribute("aria-expanded", "true");
  $("shelf-search").value = "";
  say(note());
  attempt(show);
  $("shelf-search").focus();
});
$("shelf").addEventListener("keydown", (event) => event.key === "Escape" && close());
$("shelf-search").addEventListener("input", () => attempt(show));
$("shelf-keep").addEventListener("change", () => {
  store.turn($("shelf-keep").checked);
  say(note());
});
$("shelf-export").addEventListener("click", () =>
  attempt(async () => {
    const words = searched();
    save((await store.all()).filter((one) => contains(one, words)));
  }),
);
$("shelf-import").addEventListener("click", () => $("shelf-file").click());
$("shelf-file").addEventListener("change", () => {
  const [file] = $("shelf-file").files;
  if (file) attempt(() => load(file));
  $("shelf-file").value = "";
});
const clear = deleter("Delete all", async () => drop(...(await store.all())), "Delete all");
clear.id = "shelf-clear";
$("shelf-clear").replaceWith(clear);
