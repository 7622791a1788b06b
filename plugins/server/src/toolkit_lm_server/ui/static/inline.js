// Markdown within a line: emphasis, code, links, formulas.

import { element } from "./dom.js";
import { formula } from "./math.js";

const DEEPEST = 6;
const LONGEST_ADDRESS = 2000;
const MARKS = [
  ["***", ["strong", "em"]],
  ["___", ["strong", "em"]],
  ["**", ["strong"]],
  ["__", ["strong"]],
  ["~~", ["s"]],
  ["*", ["em"]],
  ["_", ["em"]],
];
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const BARE = /^https?:\/\/[^\s<>"`]+/i;
const LABEL = /^\[((?:[^[\]\\]|\\.|\[[^[\]]*\]){0,500})\]\(\s*/;
const TARGET = /^<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?\s*(?:"[^"\n]*"|'[^'\n]*')?\s*\)/;

/** Nodes of a text: strings and elements. */
export function inline(text, depth = 0) {
  const found = [];
  // Marks that nothing closes any more: without them, many of these would cost their square.
  const open = new Set();
  let plain = "";
  const put = (node) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const [node, next] = nodeAt(text, at, depth, open);
    if (node) put(node);
    else plain += text.slice(at, next).replace(/^\\(?=.)/, "");
    at = next;
  }
  if (plain) found.push(plain);
  return found;
}

/** The element that begins at a place, or null, and the place after it. */
function nodeAt(text, at, depth, open) {
  const here = text[at];
  if (here === "`") return code(text, at, open);
  if (here === "$" || (here === "\\" && text[at + 1] === "(")) return math(text, at, open);
  if (here === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) return [null, at + 2];
  if (here === "\\") return [text[at], at + 1];
  if (here === "[" || here === "!") return link(text, at, depth);
  if (here === "<" || here === "h" || here === "H") return bare(text, at);
  if ("*_~".includes(here)) return emphasis(text, at, depth, open);
  const next = text.slice(at + 1).search(/[`$\\[!<hH*_~]/);
  return [null, next < 0 ? text.length : at + 1 + next];
}

function code(text, at, open) {
  let from = at;
  while (text[from] === "`") from++;
  const run = text.slice(at, from);
  if (open.has(run)) return [null, from];
  for (let end = from; (end = text.indexOf(run, end)) >= 0; ) {
    let after = end;
    while (text[after] === "`") after++;
    if (after - end === run.length) {
      const inner = text.slice(from, end).replaceAll("\n", " ");
      const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
      return [element("code", {}, padded ? inner.slice(1, -1) : inner), after];
    }
    end = after;
  }
  open.add(run);
  return [null, from];
}

/** A formula between $ and $, or \( and \). Amounts of money are none: "$5 and $6". */
function math(text, at, open) {
  const closers = { $$: "$$", "\\(": "\\)" };
  const two = text.slice(at, at + 2);
  const opening = Object.hasOwn(closers, two) ? two : "$";
  const closer = closers[opening] ?? "$";
  const from = at + opening.length;
  const end = open.has(opening) ? -1 : text.indexOf(closer, from);
  if (end < 0) {
    open.add(opening);
    return [opening, from];
  }
  const inner = text.slice(from, end);
  const money = opening === "$" && (/^\s|\s$/.test(inner) || /\d/.test(text[end + 1] ?? ""));
  if (!inner.trim() || money) return [opening, from];
  return [formula(inner, opening === "$$"), end + closer.length];
}

/** The address of a link, or null where it is not of HTTP. */
function address(text) {
  if (text.length > LONGEST_ADDRESS || !/^https?:\/\//i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

function anchor(href, ...contents) {
  const rel = "noopener noreferrer nofollow ugc";
  return element("a", { href, rel, target: "_blank", title: href }, ...contents);
}

/** [text](address), as a link; ![text](address), too: a picture would be a request elsewhere. */
function link(text, at, depth) {
  const start = text[at] === "!" ? at + 1 : at;
  const stay = [text[at], at + 1];
  const label = depth < DEEPEST && LABEL.exec(text.slice(start, start + 1200));
  if (!label) return stay;
  const from = start + label[0].length;
  const target = TARGET.exec(text.slice(from, from + LONGEST_ADDRESS + 600));
  const href = target && address(target[1]);
  if (!href) return stay;
  return [anchor(href, ...inline(label[1] || target[1], DEEPEST)), from + target[0].length];
}

/** An address that stands in the text as it is, with or without <> around it. */
function bare(text, at) {
  const enclosed = text[at] === "<";
  if (!enclosed && at > 0 && WORD.test(text[at - 1])) return [text[at], at + 1];
  const found = BARE.exec(text.slice(at + enclosed, at + LONGEST_ADDRESS + 1));
  if (!found) return [text[at], at + 1];
  let shown = found[0];
  if (enclosed && text[at + 1 + shown.length] !== ">") return ["<", at + 1];
  if (!enclosed) {
    shown = shown.replace(/[.,;:!?'"*_~]+$/, "");
    if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
  }
  const href = address(shown);
  if (!href) return [text[at], at + 1];
  return [anchor(href, shown), at + shown.length + (enclosed ? 2 : 0)];
}

function emphasis(text, at, depth, open) {
  const [mark, tags] = MARKS.find(([one]) => text.startsWith(one, at)) ?? [];
  const stay = [text[at], at + 1];
  if (!mark || depth >= DEEPEST) return stay;
  const inWord = mark[0] === "_" && WORD.test(text[at - 1] ?? " ");
  const first = text[at + mark.length] ?? " ";
  if (inWord || /\s/.test(first)) return [mark, at + mark.length];
  const end = open.has(mark) ? -1 : closing(text, at + mark.length, mark);
  if (end < 0) {
    open.add(mark);
    return [mark, at + mark.length];
  }
  const inner = inline(text.slice(at + mark.length, end), depth + 1);
  const node = tags.reduceRight((contents, tag) => [element(tag, {}, ...contents)], inner)[0];
  return [node, end + mark.length];
}

/** Where emphasis ends: not after a blank, not in code, not within a longer mark. */
function closing(text, from, mark) {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end)) {
    let run = end;
    while (text[run] === mark[0]) run++;
    const fits = run - end === mark.length || (run - end > mark.length && run - end !== 2);
    const after = text[run] ?? " ";
    const inside = mark[0] === "_" && WORD.test(after);
    if (end > from && fits && !/\s/.test(text[end - 1]) && !inside) return run - mark.length;
    end = run;
  }
  return -1;
}
