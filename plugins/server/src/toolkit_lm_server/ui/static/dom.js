// Small helpers: elements, numbers, the clipboard, and requests to this server.

import { icon } from "./icons.js";

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children. Text becomes a text node, never markup. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** A button with an icon. Its label is for screen readers, and shown when it is pointed at. */
export function iconButton(name, label, onclick) {
  return element(
    "button",
    { type: "button", class: "ghost icon-button", "aria-label": label, title: label, onclick },
    icon(name),
  );
}

/**
 * Copies a text. Returns whether it is on the clipboard.
 * Over plain HTTP a browser has no clipboard API; the old command works there.
 */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const area = element("textarea", { class: "away", readonly: true, "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus?.({ preventScroll: true });
    return copied;
  }
}

/** A button that copies `text()`, and says whether that worked. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const said = (await copy(text())) ? "Copied" : "The browser refused";
    button.classList.add("said");
    button.dataset.said = said;
    announce(said);
    setTimeout(() => button.classList.remove("said"), 1500);
  });
  return button;
}

/** Has screen readers say something. */
export function announce(text) {
  $("announcer").textContent = text;
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A count in few characters: 950, 12.3k, 4.1M. */
export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return plain.format(value);
}

/** Seconds in few characters: 0.4 ms, 12 ms, 1.3 s, 2 min. */
export function duration(seconds) {
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return `${(seconds / 60).toFixed(0)} min`;
}

const KEY = "toolkit_lm.key";
let asking = null;

/** The API key of this tab, or null. */
export const apiKey = () => sessionStorage.getItem(KEY) || null;

/** Asks for the API key, once for all who wait for it. */
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-error").hidden = !wrong;
    $("key").value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      sessionStorage.setItem(KEY, $("key").value.trim());
      $("key").value = "";
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

/** fetch with the API key, which is asked for where the server wants one. */
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, credentials: "omit" });
    if (response.status !== 401) return response;
    await response.text();
    // Another request may have asked meanwhile.
    if (sessionStorage.getItem(KEY) === key) await askKey(Boolean(key));
    options.signal?.throwIfAborted();
  }
}

/** The objects of a stream of server-sent events, until it ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        for (const line of part.split("\n")) {
          if (!line.startsWith("data: ")) continue;
          if (line === "data: [DONE]") return;
          yield JSON.parse(line.slice(6));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The message of an error response. */
export async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
