// A little Markdown, as elements: paragraphs, headings, lists, code, emphasis.
// Nothing is made of markup in the text.

import { element } from "./dom.js";

const LONG = 30000;

/** The text as a fragment. Long texts stay plain. */
export function rendered(text) {
  const made = document.createDocumentFragment();
  if (text.length > LONG) {
    made.append(element("div", { class: "plain" }, text));
    return made;
  }
  let list = null;
  let paragraph = [];
  const flush = () => {
    if (paragraph.length)
      made.append(element("p", { class: "plain" }, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    if (line.startsWith("```")) {
      flush();
      list = null;
      const code = [];
      for (i++; i < lines.length && !lines[i].startsWith("```"); i++) code.push(lines[i]);
      made.append(element("pre", {}, element("code", {}, code.join("\n"))));
      continue;
    }
    const [kind, content] = item(line);
    if (kind === "ul" || kind === "ol") {
      flush();
      if (list?.tagName.toLowerCase() !== kind) made.append((list = element(kind)));
      list.append(element("li", {}, ...inline(content)));
      continue;
    }
    list = line.trim() ? null : list;
    if (kind) {
      flush();
      made.append(element(kind, {}, ...inline(content)));
    } else if (line.trim()) paragraph.push(line);
    else flush();
  }
  flush();
  return made;
}

/** Kind of block that a line begins: a heading, an item of a list, or none. */
function item(line) {
  const heading = /^(#{1,4}) (.*)$/.exec(line);
  if (heading) return [heading[1].length < 3 ? "h3" : "h4", heading[2]];
  const entry = /^ {0,3}(?:([-*•])|(\d{1,3})[.)]) (.*)$/.exec(line);
  return entry ? [entry[1] ? "ul" : "ol", entry[3]] : [null, line];
}

/** Code and emphasis within a line. */
function inline(text) {
  const found = [];
  let plain = "";
  const put = (tag, content) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(element(tag, {}, content));
  };
  for (let i = 0; i < text.length; ) {
    const [mark, tag] =
      text[i] === "`" ? ["`", "code"] : text.startsWith("**", i) ? ["**", "strong"] : ["", ""];
    const end = mark ? text.indexOf(mark, i + mark.length) : -1;
    if (end > i + mark.length) {
      put(tag, text.slice(i + mark.length, end));
      i = end + mark.length;
    } else plain += text[i++];
  }
  if (plain) found.push(plain);
  return found;
}
