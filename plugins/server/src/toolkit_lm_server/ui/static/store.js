// Conversations in the browser's IndexedDB, which each origin has for itself.

import { apiKey } from "./dom.js";

const NAME = "toolkit_lm";
const TABLE = "conversations";
const SWITCH = "toolkit_lm.keep";
const ROUNDS = 100000;

let opening = null;
const owners = new Map();

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () =>
      request.result.createObjectStore(TABLE, { keyPath: ["owner", "id"] });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("Another tab holds an older database."));
  });
  opening.catch(() => (opening = null));
  return opening;
}

/** Does something with the table, and waits until it is done for good. */
async function act(access, action) {
  const transaction = (await database()).transaction(TABLE, access);
  const request = action(transaction.objectStore(TABLE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser refused."));
  });
}

/**
 * Whose conversations the tab sees: those of its API key, by a digest of it, or those without one.
 * A digest is slow on purpose, so that a short key cannot be guessed from it quickly.
 */
async function owner() {
  const key = apiKey();
  if (!key) return "";
  if (!owners.has(key)) owners.set(key, await digest(key));
  return owners.get(key);
}

async function digest(key) {
  const bytes = (text) => new TextEncoder().encode(text);
  const base = await crypto.subtle.importKey("raw", bytes(key), "PBKDF2", false, ["deriveBits"]);
  const salt = bytes(`toolkit-lm conversations of ${location.origin}`);
  const how = { name: "PBKDF2", hash: "SHA-256", salt, iterations: ROUNDS };
  const bits = new Uint8Array(await crypto.subtle.deriveBits(how, base, 256));
  return Array.from(bits, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Whether the user has left the switch on. */
export function isOn() {
  return localStorage.getItem(SWITCH) !== "no";
}

/** Turns the switch on or off. What is kept already stays. */
export function turn(on) {
  if (on) localStorage.removeItem(SWITCH);
  else localStorage.setItem(SWITCH, "no");
}

/** The reason why this browser cannot keep conversations, or an empty text. */
export function obstacle() {
  if (!globalThis.indexedDB) return "This browser has no IndexedDB: nothing is kept.";
  if (apiKey() && !globalThis.crypto?.subtle)
    return "With an API key, conversations are kept over HTTPS or on localhost only.";
  return "";
}

/** Whether conversations are kept. */
export function keeps() {
  return isOn() && !obstacle();
}

/** Keeps a conversation, in place of an older state of it. Raises where the browser refuses. */
export async function put(conversation) {
  const mine = await owner();
  await act("readwrite", (table) => table.put({ ...conversation, owner: mine }));
}

/** The kept conversations of this tab's API key, the newest first. */
export async function all() {
  if (obstacle()) return [];
  const mine = await owner();
  const found = await act("readonly", (table) =>
    table.getAll(IDBKeyRange.bound([mine, ""], [mine, "\uffff"])),
  );
  for (const one of found) delete one.owner;
  return found.sort((a, b) => b.changed - a.changed);
}

/** Forgets a conversation. */
export async function remove(id) {
  const mine = await owner();
  await act("readwrite", (table) => table.delete([mine, id]));
}
