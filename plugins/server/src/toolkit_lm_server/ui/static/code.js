// Blocks of code: with a button that copies them, and with light highlighting.

import { copyButton, element } from "./dom.js";

const LONG = 10000;
const MOST_PARTS = 4000;

const WORDS = {
  c: `
    auto break case catch class const continue default delete do double else enum extern false
    float for if inline int long namespace new nullptr private public return short signed sizeof
    static struct switch template this throw true try typedef union unsigned using void while`,
  css: `
    important`,
  go: `
    break case chan const continue default defer else fallthrough false for func go if import
    interface map nil package range return select struct switch true type var`,
  java: `
    abstract boolean break case catch class const continue default do double else enum extends
    false final finally float for if implements import int interface long new null package
    private protected public return static super switch this throw throws true try void while`,
  js: `
    as async await break case catch class const continue default delete do else export extends
    false finally for from function if import in instanceof interface let new null of return
    static super switch this throw true try type typeof undefined var void while yield`,
  json: `
    true false null`,
  python: `
    and as assert async await break class continue def del elif else except False finally for
    from global if import in is lambda match None nonlocal not or pass raise return self True
    try while with yield`,
  rust: `
    as async await break const continue crate else enum false fn for if impl in let loop match
    mod move mut pub ref return self Self static struct super trait true type unsafe use where
    while`,
  shell: `
    case do done elif else esac exit export fi for function if in local return then until while`,
  sql: `
    and as asc between by case create delete desc distinct drop else end exists from group
    having in inner insert into is join left like limit not null on or order outer primary
    select set table then union unique update values when where with`,
  yaml: `
    true false null`,
};
const SAME = {
  bash: "shell", "c++": "c", cpp: "c", cs: "java", cuda: "c", golang: "go", h: "c",
  javascript: "js", jsx: "js", kotlin: "java", py: "python", rs: "rust", sh: "shell",
  toml: "yaml", ts: "js", tsx: "js", typescript: "js", yml: "yaml", zsh: "shell",
};
const HASH = new Set(["python", "shell", "yaml"]);
const SLASHES = new Set(["c", "go", "java", "js", "rust"]);

/** Code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const code = element("code", {}, ...highlighted(text, language.toLowerCase()));
  const head = element(
    "div",
    { class: "code-head" },
    element("span", {}, language.slice(0, 30)),
    copyButton("Copy code", () => text),
  );
  const label = language ? `Code: ${language.slice(0, 30)}` : "Code";
  const block = element("pre", { tabindex: 0, role: "group", "aria-label": label }, code);
  return element("div", { class: "code" }, head, block);
}

/** Strings and spans of code. A language that is not known stays plain, as does long code. */
function highlighted(text, name) {
  const language = Object.hasOwn(SAME, name) ? SAME[name] : name;
  if (!Object.hasOwn(WORDS, language) || text.length > LONG) return [text];
  const words = new Set(WORDS[language].trim().split(/\s+/));
  const ignoresCase = language === "sql";
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(tokens(language))) {
    const [whole] = found;
    const kind = kindOf(found.groups, words.has(ignoresCase ? whole.toLowerCase() : whole));
    if (!kind) continue;
    if (parts.length > MOST_PARTS) break;
    parts.push(text.slice(from, found.index), element("span", { class: kind }, whole));
    from = found.index + whole.length;
  }
  return [...parts, text.slice(from)].filter((part) => part !== "");
}

function kindOf({ note, text, number }, isWord) {
  if (note) return "note";
  if (text) return "string";
  if (number) return "number";
  return isWord ? "word" : "";
}

function tokens(language) {
  const notes = [];
  if (HASH.has(language)) notes.push("(?<![^\\s])#[^\\n]*");
  if (SLASHES.has(language)) notes.push("\\/\\/[^\\n]*");
  if (SLASHES.has(language) || language === "css") notes.push("\\/\\*[^]*?(?:\\*\\/|$)");
  if (language === "sql") notes.push("--[^\\n]*");
  const texts = [`"(?:[^"\\\\\\n]|\\\\.)*"`, `'(?:[^'\\\\\\n]|\\\\.)*'`];
  if (language === "python") texts.unshift(`"""[^]*?(?:"""|$)`, `'''[^]*?(?:'''|$)`);
  if (language === "js" || language === "go") texts.push("`(?:[^`\\\\]|\\\\.)*`");
  const note = notes.length ? notes.join("|") : "(?!)";
  const number = "\\b(?:0x[\\da-fA-F]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";
  const text = texts.join("|");
  return new RegExp(`(?<note>${note})|(?<text>${text})|(?<number>${number})|[A-Za-z_]\\w*`, "g");
}
