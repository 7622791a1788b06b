// The live view of the engine.

import * as charts from "./charts.js";
import { $, count, duration, element } from "./dom.js";

const SLOTS = 150;
const STEPS = 120;
const LOG_LINES = 200;
const HISTOGRAMS = {
  first_token: "Time to first token",
  inter_token: "Between tokens",
  queue: "In the queue",
  whole: "Whole request",
};
const TILES = {
  running: "running",
  waiting: "waiting",
  output: "output tokens/s",
  kv: "KV cache used",
  hits: "prefix hits",
  generated: "tokens in all",
};

const rates = { all: [], output: [] };
let steps = [];
let view = null;
let histograms = null;
let counts = null;
let first = null;
let sinceOpened = false;
let blockSize = 0;

for (const [name, label] of Object.entries(TILES))
  $("tiles").append(
    element(
      "div",
      { class: "tile" },
      element("b", { id: `tile-${name}` }, "–"),
      element("span", {}, label),
    ),
  );
for (const [name, label] of Object.entries(HISTOGRAMS)) {
  $("histograms").append(
    element(
      "div",
      {},
      element("h3", {}, label),
      element("p", { id: `latency-${name}` }, "none yet"),
      element("canvas", { id: `histogram-${name}`, height: 64, role: "img", "aria-label": label }),
    ),
  );
}
for (const [id, opened] of [["since-start", false], ["since-opened", true]]) {
  $(id).addEventListener("click", () => {
    sinceOpened = opened;
    $("since-start").setAttribute("aria-pressed", !opened);
    $("since-opened").setAttribute("aria-pressed", opened);
    drawHistograms();
  });
}

/** Shows the server's model and plugins. */
export function describe(server) {
  blockSize = server.model?.block_size ?? 0;
  const states = ["broken", "ok", "disabled"];
  const plugins = [...server.plugins].sort(
    (a, b) => states.indexOf(a.status) - states.indexOf(b.status) || a.name.localeCompare(b.name),
  );
  $("plugins").replaceChildren(
    ...plugins.map((one) =>
      element(
        "li",
        {
          class: one.status,
          title: `${one.distribution ?? "from code"} ${one.version ?? ""}, ${one.status}`,
        },
        element("span", { class: `dot ${one.status}` }),
        one.name,
      ),
    ),
  );
  const counts = states
    .map((state) => [state, plugins.filter((one) => one.status === state).length])
    .filter(([, n]) => n);
  $("plugin-counts").textContent = counts.map(([state, n]) => `${n} ${state}`).join(" · ");
}

/** Takes in a view, and draws it. */
export function update(news) {
  view = news;
  for (const [list, value] of [
    [rates.all, news.num_tokens],
    [rates.output, news.num_output_tokens],
  ]) {
    list.push(smoothed(list, value / Math.max(news.seconds, 0.05)));
    if (list.length > SLOTS) list.shift();
  }
  steps = [...steps, ...news.steps].slice(-STEPS);
  if (news.histograms) {
    histograms = news.histograms;
    first ??= news.histograms;
    counts = news.counts;
  }
  draw();
}

/** A rate, freed of the chance of how many steps ended within a view. */
function smoothed(list, value) {
  const before = list.at(-1) ?? value;
  const next = before + (value - before) * 0.6;
  return next < 0.5 ? 0 : next;
}

/** All of it, again: the window or its colours may have changed. */
export function draw() {
  if (!view || !$("engine").clientWidth) return;
  const { load, tokens } = view;
  tile("running", load ? count(load.running) : "0");
  tile(
    "waiting",
    load ? count(load.waiting) : "0",
    view.queued_tokens ? `${count(view.queued_tokens)} tokens` : "",
  );
  tile("output", count(rates.output.at(-1)));
  tile("kv", load ? percent(load.used, load.total) : "–");
  tile("hits", tokens.prompt ? percent(tokens.cached, tokens.prompt) : "–");
  tile("generated", count(tokens.output));
  charts.lines(
    $("rate"),
    [
      { values: rates.all, colour: "used", fill: true },
      { values: rates.output, colour: "second" },
    ],
    SLOTS,
    count,
  );
  legend(
    "rate-legend",
    ["", "computed", count(rates.all.at(-1))],
    ["second", "output", count(rates.output.at(-1))],
  );
  drawBlocks(load);
  const ordinary =
    steps.map((one) => one[1]).sort((a, b) => a - b)[Math.floor(steps.length / 2)] ?? 0;
  charts.bars(
    $("steps"),
    steps.map(([value, size]) => ({ value, heavy: size > 2 * ordinary + 4 })),
    STEPS,
    (ms) => duration(ms / 1000),
  );
  const last = steps.slice(-20).map((one) => one[0]);
  legend(
    "step-legend",
    ["", "mean", last.length ? duration(last.reduce((a, b) => a + b) / last.length / 1000) : "–"],
    ["second", "with prompts", ""],
  );
  drawHistograms();
  drawEngines();
  drawRequests();
}

/** A row for each of several engines. */
function drawEngines() {
  const { engines } = view;
  $("engines-panel").hidden = !engines.length;
  const rows = engines.map((one) => {
    const state = element(
      "span",
      { class: `state ${one.status === "ready" ? "running" : "waiting"}`, title: one.reason ?? "" },
      one.status,
    );
    const its = one.load
      ? [count(one.load.running), count(one.load.waiting), percent(one.load.used, one.load.total)]
      : ["0", "0", "–"];
    const cells = [
      count(one.requests_in_flight),
      count(one.tokens_in_flight),
      ...its,
      count(one.restarts),
    ];
    return element(
      "tr",
      {},
      element("td", {}, String(one.engine)),
      element("td", {}, state),
      ...cells.map((text) => element("td", { class: "num" }, text)),
    );
  });
  $("engines").replaceChildren(...rows);
}

function tile(name, value, note = "") {
  $(`tile-${name}`).replaceChildren(value, ...(note ? [" ", element("small", {}, note)] : []));
}

function percent(part, whole) {
  const value = (100 * part) / Math.max(whole, 1);
  return `${value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0)}%`;
}

function legend(id, ...entries) {
  $(id).replaceChildren(
    ...entries.map(([kind, name, value]) =>
      element("span", {}, element("i", { class: kind }), value === "" ? name : `${name} ${value}`),
    ),
  );
}

function drawBlocks(load) {
  if (!load?.total) {
    $("kv-note").textContent = load
      ? "This model keeps no KV cache."
      : "Nothing has been computed yet.";
    charts.blocks($("kv"), { used: 0, cached: 0, total: 64 });
    return;
  }
  const each = charts.blocks($("kv"), load);
  legend(
    "kv-legend",
    ["", "in use", count(load.used)],
    ["cached", "cached", count(load.cached)],
    ["free", "empty", count(load.total - load.used - load.cached)],
  );
  const host = load.host_total
    ? ` On the host: ${count(load.host_used)} of ${count(load.host_total)} blocks.`
    : "";
  $("kv-note").textContent =
    `A square is ${each === 1 ? "a block" : `${each} blocks`} of ${blockSize} tokens; ` +
    `room for ${count(load.total * blockSize)} tokens.${host}`;
}

function drawHistograms() {
  if (!histograms) return;
  for (const name of Object.keys(HISTOGRAMS)) {
    const { bounds, counts, sum } = histograms[name];
    const base = sinceOpened ? first[name] : { counts: counts.map(() => 0), sum: 0 };
    const upTo = counts.map((value, i) => value - base.counts[i]);
    const each = upTo.map((value, i) => value - (i ? upTo[i - 1] : 0));
    const total = upTo.at(-1);
    const from = Math.max(0, each.findIndex((value) => value) - 1);
    const to = each.length - [...each].reverse().findIndex((value) => value);
    const shown = total
      ? each.slice(Math.min(from, each.length - 8), Math.max(to + 1, from + 8))
      : each.slice(0, 8);
    const start = total ? Math.min(from, each.length - 8) : 0;
    const label = (i) =>
      i < 0 ? "0" : i < bounds.length ? duration(bounds[i]) : `> ${duration(bounds.at(-1))}`;
    charts.histogram($(`histogram-${name}`), shown, [
      label(start - 1),
      label(start + shown.length - 1),
    ]);
    const quantile = (share) => label(upTo.findIndex((value) => value >= share * total));
    const mean = element("b", {}, duration((sum - base.sum) / total));
    $(`latency-${name}`).replaceChildren(
      ...(total
        ? [mean, ` mean of ${count(total)}`, element("br"), `95% within ${quantile(0.95)}`]
        : ["none yet"]),
    );
  }
}

function drawRequests() {
  const { requests } = view;
  $("requests-panel").hidden = requests === null;
  if (counts)
    $("request-counts").textContent = ["finished", "aborted", "refused", "preempted"]
      .filter((name) => counts[name] || name === "finished")
      .map((name) => `${count(counts[name])} ${name}`)
      .join(" · ");
  if (!requests) return;
  const unseen = view.load ? view.load.running + view.load.waiting : 0;
  const rows = requests.map((one) => {
    const state = element("span", { class: `state ${one.state}` }, one.state);
    const cells = [
      count(one.num_prompt_tokens),
      count(one.num_cached_tokens),
      count(one.num_sequences),
      one.first_token == null ? "–" : duration(one.first_token),
      duration(one.age),
    ];
    return element(
      "tr",
      {},
      element("td", {}, one.id),
      element("td", {}, state),
      ...cells.map((text) => element("td", { class: "num" }, text)),
    );
  });
  const nothing = unseen
    ? "Those that run began before this page was opened."
    : "No request is under way.";
  $("requests").replaceChildren(
    ...(rows.length
      ? rows
      : [element("tr", {}, element("td", { colspan: 7, class: "none" }, nothing))]),
  );
}

/** Appends lines of the log. */
export function log(lines) {
  const list = $("log");
  const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
  for (const line of lines) {
    const time = new Date(line.time * 1000).toLocaleTimeString("en", { hour12: false });
    list.append(
      element(
        "li",
        { class: line.level },
        element("time", {}, time),
        element("b", {}, line.level),
        element("span", {}, line.text),
      ),
    );
  }
  while (list.children.length > LOG_LINES) list.firstChild.remove();
  if (follows) list.scrollTop = list.scrollHeight;
}

/** The log, from its beginning again. */
export function clearLog() {
  $("log").replaceChildren();
}
