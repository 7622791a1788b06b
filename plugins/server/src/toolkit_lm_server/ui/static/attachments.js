// What goes along with a question: pictures, sound, and text files.

import { $, element } from "./dom.js";
import { icon } from "./icons.js";

const MOST_FILES = 16;
const MOST_BYTES = { image: 8 * 2 ** 20, audio: 16 * 2 ** 20, text: 256 * 2 ** 10 };
const SOUNDS = {
  wav: "wav", "x-wav": "wav", wave: "wav", "vnd.wave": "wav", mpeg: "mp3", mp3: "mp3",
  flac: "flac", "x-flac": "flac", ogg: "ogg",
};

let takes = { image: false, audio: false };
let attached = [];
let complain = () => {};

/** Takes what shows an error. */
export function connect(said) {
  complain = said;
}

/** Says which kinds the model takes: {image, audio}. Text files are text to every model. */
export function allow(kinds) {
  takes = kinds;
}

/** The attachments of the next question, which has none then. */
export function taken() {
  const all = attached;
  attached = [];
  show();
  return all;
}

/** How many attachments wait for the next question. */
export const waiting = () => attached.length;

/** Attaches files. What cannot be sent is refused by its name. */
export async function attach(files) {
  for (const file of files) {
    try {
      if (attached.length >= MOST_FILES)
        throw new Error(`${file.name}: at most ${MOST_FILES} files go with a question.`);
      attached.push(await read(file));
      show();
    } catch (error) {
      complain(error.message);
    }
  }
}

/** {kind, name, data}, and the format of sound. Raises an error that names the file. */
async function read(file) {
  const [group, type] = file.type.split("/");
  if (group === "image") {
    check(file, "image");
    return { kind: "image", name: file.name, data: await dataUrl(file) };
  }
  if (group === "audio") {
    check(file, "audio");
    const format = SOUNDS[type];
    if (!format)
      throw new Error(`${file.name} is ${file.type}: WAV, MP3, FLAC and Ogg can be sent.`);
    const data = (await dataUrl(file)).split(",")[1];
    return { kind: "audio", name: file.name, data, format };
  }
  if (group === "video") throw new Error(`${file.name} is a video: this page sends none.`);
  if (type === "pdf")
    throw new Error(`${file.name} is a PDF: attach its text, or pictures of its pages.`);
  check(file, "text");
  const data = utf8(await file.arrayBuffer());
  if (data === null) throw new Error(`${file.name} is neither a picture, nor sound, nor text.`);
  return { kind: "text", name: file.name, data };
}

function check(file, kind) {
  const verbs = { image: "sees no pictures", audio: "hears no sound" };
  if (verbs[kind] && !takes[kind]) throw new Error(`${file.name}: this model ${verbs[kind]}.`);
  const most = MOST_BYTES[kind];
  if (file.size <= most) return;
  const bound = most < 2 ** 20 ? `${most / 2 ** 10} KiB` : `${most / 2 ** 20} MiB`;
  throw new Error(`${file.name} is larger than ${bound}.`);
}

/** The text of bytes, or null where they are none. */
function utf8(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** An attachment as an element: a picture, or an icon with the name. */
export function shown(one) {
  if (one.kind === "image") return element("img", { src: one.data, alt: one.name });
  const drawing = icon(one.kind === "audio" ? "sound" : "file");
  return element("span", { class: "file" }, drawing, one.name);
}

function show() {
  $("attached").hidden = !attached.length;
  const drop = (one) => () => {
    attached = attached.filter((other) => other !== one);
    show();
    $("input").focus();
  };
  $("attached").replaceChildren(
    ...attached.map((one) =>
      element(
        "figure",
        {},
        shown(one),
        element(
          "button",
          { type: "button", "aria-label": `Remove ${one.name}`, onclick: drop(one) },
          icon("close"),
        ),
      ),
    ),
  );
}

$("attach").append(icon("attach"));
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  attach([...$("file").files]);
  $("file").value = "";
});
const mayAttach = () => !$("attach").hidden;
$("input").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || !mayAttach()) return;
  event.preventDefault();
  attach(files);
});
for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  $("chat").addEventListener(kind, (event) => {
    if (!mayAttach()) return;
    event.preventDefault();
    $("chat").classList.toggle("dropping", over);
    if (kind === "drop") attach([...event.dataTransfer.files]);
  });
}
