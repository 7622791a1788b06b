// Markdown, as elements: headings, lists, tables, quotations, code. Nothing is made of markup in
// the text, and no element has an attribute that the text chose, but a link its checked address.

import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import { inline } from "./inline.js";
import { formula } from "./math.js";

const LONG = 60000;
const DEEPEST = 8;
const MOST_COLUMNS = 64;

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+•]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITER = /^:?-+:?$/;

/** The text as a fragment. Long texts stay plain. */
export function rendered(text) {
  const made = document.createDocumentFragment();
  if (text.length > LONG) made.append(element("div", { class: "plain" }, text));
  else made.append(...blocks(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0));
  return made;
}

/** The blocks of lines. What is nested too deeply stays a paragraph. */
function blocks(lines, depth) {
  const made = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length)
      made.push(element("p", { class: "plain" }, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const [block, next] = blockAt(lines, at, depth, paragraph.length > 0);
    if (next > at) {
      flush();
      if (block) made.push(block);
      at = next;
    } else paragraph.push(lines[at++]);
  }
  flush();
  return made;
}

/** The block that begins at a line, and the line after it; the same line where none begins. */
function blockAt(lines, at, depth, inParagraph) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 6);
    const words = heading[2].trimEnd().replace(/ #+$/, "");
    return [element(`h${level}`, {}, ...inline(words)), at + 1];
  }
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (/^\s*(\$\$|\\\[)/.test(line)) return displayed(lines, at);
  const asTable = line.includes("|") && table(lines, at);
  if (asTable) return asTable;
  if (depth >= DEEPEST) return [null, at];
  if (QUOTE.test(line)) return quotation(lines, at, depth);
  const item = ITEM.exec(line);
  // A number within a paragraph begins a list only where it is 1.
  if (item && (!inParagraph || !/^\d/.test(item[2]) || parseInt(item[2]) === 1))
    return list(lines, at, depth);
  return [null, at];
}

/** A block of code. While it is written, its end may not be there. */
function fence(lines, at) {
  const [, indent, mark, about] = FENCE.exec(lines[at]);
  const [language] = about.trim().split(/\s/);
  const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  const code = [];
  for (at++; at < lines.length && !end.test(lines[at]); at++)
    code.push(lines[at].slice(Math.min(indent.length, indentOf(lines[at]))));
  return [codeBlock(code.join("\n"), language), at + 1];
}

const indentOf = (line) => line.length - line.trimStart().length;

/** A formula in lines of its own, between $$ and $$ or \[ and \]. */
function displayed(lines, at) {
  const closing = lines[at].trimStart().startsWith("$$") ? "$$" : "\\]";
  let text = lines[at].trimStart().slice(2);
  let next = at + 1;
  while (!text.includes(closing) && next < lines.length) text += `\n${lines[next++]}`;
  const end = text.indexOf(closing);
  if (end < 0 || text.slice(end + 2).trim()) return [null, at];
  return [element("p", { class: "formula" }, formula(text.slice(0, end), true)), next];
}

function quotation(lines, at, depth) {
  const inner = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at++) inner.push(lines[at].replace(QUOTE, ""));
  return [element("blockquote", {}, ...blocks(inner, depth + 1)), at];
}

/** A list with what is indented below its items. */
function list(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const base = ITEM.exec(lines[at])[1].length;
  const made = element(ordered ? "ol" : "ul", ordered ? { start: parseInt(first) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || RULE.test(lines[at])) break;
    if (/\d/.test(item[2]) !== ordered || item[1].length < base || item[1].length > base + 3) break;
    const width = item[3] ? item[0].length : item[0].length + 1;
    const inner = [lines[at].slice(item[0].length)];
    for (at++; at < lines.length; at++) {
      const indent = lines[at].search(/\S/);
      const outside = indent >= 0 && indent <= base + 1;
      if (outside && (ITEM.test(lines[at]) || !inner.at(-1).trim())) break;
      if (indent >= 0 && indent < width && begins(lines[at])) break;
      inner.push(indent < 0 ? "" : lines[at].slice(Math.min(indent, width)));
    }
    const contents = blocks(inner, depth + 1);
    // An item of one paragraph has no distance to the next.
    const [only, ...others] = contents;
    const tight = only?.tagName === "P" && others.every((other) => /^[UO]L$/.test(other.tagName));
    made.append(element("li", {}, ...(tight ? [...only.childNodes, ...others] : contents)));
  }
  return [made, at];
}

/** Whether a line begins a block other than a list, even within a paragraph. */
function begins(line) {
  return [FENCE, HEADING, RULE, QUOTE].some((form) => form.test(line));
}

/** A table, or null where no line of delimiters fits its head. */
function table(lines, at) {
  const delimiters = cells(lines[at + 1] ?? "");
  if (!delimiters.every((cell) => DELIMITER.test(cell))) return null;
  const head = cells(lines[at]);
  const sides = delimiters.map((cell) => {
    const right = cell.endsWith(":");
    if (right) return cell.startsWith(":") ? "center" : "right";
    return "left";
  });
  if (head.length !== sides.length || head.length > MOST_COLUMNS) return null;
  const row = (tag, texts) =>
    element(
      "tr",
      {},
      ...sides.map((side, i) => element(tag, { class: side }, ...inline(texts[i] ?? ""))),
    );
  const body = element("tbody");
  let next = at + 2;
  for (; next < lines.length && lines[next].trim() && lines[next].includes("|"); next++)
    body.append(row("td", cells(lines[next])));
  const made = element("table", {}, element("thead", {}, row("th", head)), body);
  const around = { class: "table", tabindex: 0, role: "group", "aria-label": "Table" };
  return [element("div", around, made), next];
}

/** The cells of a row. A bar in code, or after a backslash, parts none. */
function cells(line) {
  const found = [""];
  let code = false;
  for (let i = 0; i < line.length; i++) {
    if (line[i] === "\\" && line[i + 1] === "|") found[found.length - 1] += line[++i];
    else if (line[i] === "|" && !code) found.push("");
    else {
      if (line[i] === "`") code = !code;
      found[found.length - 1] += line[i];
    }
  }
  const trimmed = found.map((cell) => cell.trim());
  if (!trimmed[0]) trimmed.shift();
  if (trimmed.length > 1 && !trimmed.at(-1)) trimmed.pop();
  return trimmed;
}
