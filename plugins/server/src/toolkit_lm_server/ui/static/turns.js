// One turn of a conversation on the page, with what can be done with it.

import * as attachments from "./attachments.js";
import { branches } from "./branches.js";
import { cards, results } from "./calls.js";
import { copyButton, element, iconButton } from "./dom.js";
import { rendered } from "./markdown.js";
import { isFailed } from "./request.js";

/**
 * The elements of a turn: {node, paint}. `paint()` shows its text as it is now.
 * `does`: {edit(turn, text), retry(turn), goOn(turn), choose(turn), returned(turn, results)}.
 */
export function viewOf(conversation, turn, prompt, does) {
  if (turn.role === "user") return question(conversation, turn, does);
  if (turn.role === "tool") return returned(conversation, turn);
  return answer(conversation, turn, prompt, does);
}

function returned(conversation, turn) {
  const parent = conversation.turns.find((other) => other.id === turn.parent);
  const label = { class: "message tool", role: "article", "aria-label": "Results of tools" };
  const node = element("div", label, results(turn, parent?.calls ?? []));
  return { node, paint: () => {} };
}

function question(conversation, turn, does) {
  const node = element("div", { class: "message user", role: "article", "aria-label": "You" });
  const files = turn.attachments ?? [];
  const paint = () => {
    const about = element("div", { class: "about" }, switcher(conversation, turn, does));
    if (conversation.mode === "chat")
      about.append(iconButton("edit", "Edit", () => edit(node, turn, paint, does)));
    node.replaceChildren(
      ...(files.length
        ? [element("div", { class: "pictures" }, ...files.map(attachments.shown))]
        : []),
      ...(turn.text ? [element("div", { class: "text" }, turn.text)] : []),
      about,
    );
  };
  paint();
  return { node, paint };
}

/** Lets the user write a question anew. */
function edit(node, turn, paint, does) {
  const area = element("textarea", { rows: 3, "aria-label": "Edited message" });
  area.value = turn.text;
  const leave = () => {
    paint();
    node.querySelector('[aria-label="Edit"]').focus();
  };
  const form = element(
    "form",
    { class: "edit" },
    area,
    element(
      "div",
      { class: "row" },
      element("button", { type: "button", class: "ghost", onclick: leave }, "Cancel"),
      element("button", { type: "submit", class: "primary" }, "Send as a branch"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim() || turn.attachments?.length) does.edit(turn, area.value);
  });
  form.addEventListener("keydown", (event) => event.key === "Escape" && leave());
  node.replaceChildren(form);
  area.focus();
}

function answer(conversation, turn, prompt, does) {
  const text = element("div", { class: "text" });
  const about = element("div", { class: "about" });
  const node = element(
    "div",
    { class: "message assistant", role: "article", "aria-label": "Answer" },
    text,
    about,
  );
  const paint = (writing = false) => {
    node.classList.toggle("writing", writing);
    node.setAttribute("aria-busy", writing);
    if (conversation.mode === "text")
      text.replaceChildren(
        element("div", { class: "plain" }, element("span", { class: "given" }, prompt), turn.text),
      );
    else text.replaceChildren(rendered(turn.text));
    showThoughts(node, turn.thoughts);
    showCalls(node, about, conversation, turn, !writing && does);
    if (writing) about.replaceChildren();
    else finish(node, about, conversation, turn, does);
  };
  return { node, paint };
}

function showThoughts(node, thoughts) {
  if (!thoughts) return;
  let details = node.querySelector(":scope > details");
  if (!details) {
    details = element(
      "details",
      {},
      element("summary", {}, "Reasoning"),
      element("div", { class: "plain" }),
    );
    node.prepend(details);
  }
  details.lastChild.textContent = thoughts;
}

/** The calls of an answer. While nothing follows them, the user may return their results. */
function showCalls(node, about, conversation, turn, does) {
  node.querySelector(":scope > .calls")?.remove();
  if (!turn.calls?.length) return;
  const open = does && !turn.error && !branches(conversation, turn.id).length;
  about.before(cards(turn, open ? (found) => does.returned(turn, found) : null));
}

/** What stands below a whole answer. */
function finish(node, about, conversation, turn, does) {
  node.querySelector(":scope > .error")?.remove();
  if (turn.error) about.before(element("p", { class: "error" }, turn.error));
  const facts = [...(turn.facts ?? [])];
  if (turn.stopped) facts.push("stopped");
  if (isFailed(turn)) facts.push("not sent again");
  about.replaceChildren(
    ...facts.map((fact) => element("span", {}, fact)),
    switcher(conversation, turn, does),
    copyButton("Copy", () => turn.text),
    iconButton("retry", "Retry", () => does.retry(turn)),
  );
  if (turn.text && !turn.calls?.length && !turn.error)
    about.append(iconButton("more", "Continue", () => does.goOn(turn)));
}

/** ‹ 2/3 ›: the turn among those that stand in its place. */
function switcher(conversation, turn, does) {
  const all = branches(conversation, turn.parent);
  const made = element("span", { class: "branches", hidden: all.length < 2 });
  const at = all.indexOf(turn);
  const step = (name, label, to) => {
    const button = iconButton(name, label, () => does.choose(all[to]));
    button.disabled = !all[to];
    return button;
  };
  if (all.length > 1)
    made.append(
      step("left", "Previous branch", at - 1),
      `${at + 1}/${all.length}`,
      step("right", "Next branch", at + 1),
    );
  return made;
}
