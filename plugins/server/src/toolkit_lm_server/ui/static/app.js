// The page: its stream of events, its colours, its tabs.

import * as chat from "./chat.js";
import { $, ask, count, events, failure } from "./dom.js";
import { icon } from "./icons.js";
import * as live from "./live.js";
import { states } from "./models.js";
import * as pool from "./pool.js";

const LONGEST_WAIT = 10000;

// Colours

const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = localStorage.getItem("toolkit_lm.theme");
let theme = THEMES.includes(stored) ? stored : "system";

function paint() {
  document.documentElement.dataset.theme =
    theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  $("theme").title = `Colours: ${theme}`;
  $("theme").setAttribute("aria-label", `Colours: ${theme}. Change them`);
  $("theme").replaceChildren(icon({ system: "auto", light: "light", dark: "dark" }[theme]));
  live.draw();
}

$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("toolkit_lm.theme", theme);
  paint();
});
dark.addEventListener("change", paint);
window.addEventListener("resize", live.draw);
paint();

// Tabs of a narrow window

function open(tab) {
  document.body.dataset.tab = tab;
  for (const button of document.querySelectorAll(".tabs button"))
    button.setAttribute("aria-pressed", button.dataset.tab === tab);
  live.draw();
}

for (const button of document.querySelectorAll(".tabs button"))
  button.addEventListener("click", () => open(button.dataset.tab));

// The stream

let status = "";

function show(state, reason = "") {
  if (state !== status) $("status-dot").className = `dot ${state}`;
  status = state;
  $("status-dot").title = state;
  const text =
    {
      ready: "",
      starting: "The engine starts",
      offline: reason ? "There is no live view" : "The server cannot be reached",
    }[state] ?? `The engine is ${state}`;
  $("banner").hidden = !text;
  $("banner").textContent = text && `${text}${reason ? `: ${reason}` : ""}.`.replace(/\.\.$/, ".");
  $("banner").className = ["dead", "offline", "closed"].includes(state) ? "bad" : "";
}

function describe(server) {
  live.describe(server);
  $("docs-link").hidden = !server.docs;
  const model = server.model;
  if (!model) return;
  document.title = `${model.name} · toolkit-lm`;
  $("model-name").textContent = model.name;
  const facts = [
    model.architecture,
    model.dtype,
    model.device === "auto" ? null : model.device,
    model.max_model_len ? `${count(model.max_model_len)} tokens` : null,
  ];
  $("model-facts").textContent = facts.filter(Boolean).join(" · ");
  if (server.ready) {
    const generates = model.tasks.includes("generate");
    document.body.classList.toggle("no-chat", !generates);
    if (!generates) open("engine");
    chat.serve(model);
  }
}

let abort = null;

async function watch() {
  let wait = 500;
  for (;;) {
    if (document.hidden)
      await new Promise((resolve) =>
        document.addEventListener("visibilitychange", resolve, { once: true }),
      );
    abort = new AbortController();
    try {
      const response = await ask("ui/events", { signal: abort.signal });
      if (!response.ok) throw new Error(await failure(response));
      live.clearLog();
      for await (const news of events(response)) {
        wait = 500;
        if (news.type === "view") {
          show(news.status, news.reason);
          live.update(news);
        } else if (news.type === "pool") {
          show("ready");
          pool.update(news);
          states(news.models);
        } else if (news.type === "server") describe(news);
        else if (news.type === "log") live.log(news.lines);
      }
    } catch (error) {
      if (!abort.signal.aborted) show("offline", error instanceof TypeError ? "" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, LONGEST_WAIT);
  }
}

// A page that nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => document.hidden && abort?.abort());

watch();
