// A conversation as a tree of turns. An edited question, or another answer, is a branch beside it.

const ROOT = "root";

/** 32 random hexadecimal digits. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * An empty conversation.
 * `mode`: "chat", or "text" for prompts without a chat template.
 * `chosen`: the id of the shown child, by the id of its parent.
 */
export function newConversation(mode) {
  const now = Date.now();
  return { id: newId(), title: "", mode, created: now, changed: now, turns: [], chosen: {} };
}

/** Adds a turn after `parent` (null: at the beginning), and shows it. */
export function addTurn(conversation, parent, turn) {
  const added = { id: newId(), parent: parent?.id ?? null, ...turn };
  conversation.turns.push(added);
  choose(conversation, added);
  return added;
}

/** The turns that may follow one, the oldest first. */
export function branches(conversation, parent) {
  return conversation.turns.filter((turn) => turn.parent === parent);
}

/** Shows a turn in place of its siblings. */
export function choose(conversation, turn) {
  conversation.chosen[turn.parent ?? ROOT] = turn.id;
}

/** The shown turns, from the first to the last. */
export function shownPath(conversation) {
  const path = [];
  for (let parent = null; ; parent = path.at(-1).id) {
    const all = branches(conversation, parent);
    if (!all.length) return path;
    path.push(all.find((turn) => turn.id === conversation.chosen[parent ?? ROOT]) ?? all.at(-1));
  }
}

/** The shown turns up to one, which is the last. */
export function pathTo(conversation, turn) {
  const path = shownPath(conversation);
  return path.slice(0, path.findIndex((other) => other.id === turn.id) + 1);
}

/** A title of a conversation: the one that it was given, or its first words. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = shownPath(conversation)[0];
  const words = first?.text.trim().replace(/\s+/g, " ") || first?.attachments?.[0]?.name || "";
  return words.length > 60 ? `${words.slice(0, 59)}…` : words || "Empty";
}
