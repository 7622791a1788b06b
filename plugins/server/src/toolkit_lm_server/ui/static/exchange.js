// The file of exported conversations: its form, and the check of one that is imported.

const FORMAT = "toolkit-lm-conversations";
const VERSION = 1;
const MOST_FILE_BYTES = 64 * 2 ** 20;
const MOST = { conversations: 5000, turns: 10000, attachments: 64, calls: 128, facts: 16 };
const LONGEST = { title: 200, name: 200, text: 2 ** 20, data: 24 * 2 ** 20, fact: 200 };
const ROLES = ["user", "assistant", "tool"];
const ID = /^[0-9a-f]{32}$/;
const PICTURE = /^data:image\/[a-z0-9.+-]{1,40};base64,/;
const NO_BASE64 = /[^A-Za-z0-9+/=]/;

/** The text of a file with these conversations. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** The conversations of an exported file. Raises an error that names what is wrong in it. */
export async function imported(file) {
  if (file.size > MOST_FILE_BYTES)
    throw new Error(`${file.name} is larger than ${MOST_FILE_BYTES / 2 ** 20} MiB.`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  return checked(found);
}

/** The conversations of a parsed file. Fields that nobody reads are left out. */
export function checked(found) {
  if (found?.format !== FORMAT)
    throw new Error(`The file's "format" is not ${JSON.stringify(FORMAT)}.`);
  if (found.version !== VERSION) throw new Error(`The file's "version" is not ${VERSION}.`);
  return list(found.conversations, "conversations", MOST.conversations).map((one, i) =>
    conversation(one, `conversations[${i}]`),
  );
}

function conversation(one, at) {
  const known = new Map();
  const turns = list(record(one, at).turns, `${at}.turns`, MOST.turns).map((each, i) => {
    const made = turn(each, `${at}.turns[${i}]`);
    if (known.has(made.id)) throw new Error(`${at}.turns[${i}].id is there twice.`);
    if (made.parent !== null && !known.has(made.parent))
      throw new Error(`${at}.turns[${i}].parent is no earlier turn.`);
    known.set(made.id, made);
    return made;
  });
  const chosen = {};
  for (const id of Object.values(record(one.chosen ?? {}, `${at}.chosen`))) {
    const child = known.get(id);
    if (!child) throw new Error(`${at}.chosen names a turn that is not there.`);
    chosen[child.parent ?? "root"] = id;
  }
  return {
    id: id(one.id, `${at}.id`),
    title: text(one.title ?? "", `${at}.title`, LONGEST.title),
    mode: among(one.mode, `${at}.mode`, ["chat", "text"]),
    created: time(one.created, `${at}.created`),
    changed: time(one.changed, `${at}.changed`),
    turns,
    chosen,
  };
}

function turn(one, at) {
  const made = {
    id: id(record(one, at).id, `${at}.id`),
    parent: one.parent == null ? null : id(one.parent, `${at}.parent`),
    role: among(one.role, `${at}.role`, ROLES),
    text: text(one.text ?? "", `${at}.text`),
  };
  for (const name of ["thoughts", "error", "model"])
    if (one[name]) made[name] = text(one[name], `${at}.${name}`);
  if (one.stopped) made.stopped = true;
  if (Number.isSafeInteger(one.tokens)) made.tokens = one.tokens;
  const lists = { attachments: attachment, calls: call, results: result, facts: fact };
  for (const [name, check] of Object.entries(lists)) {
    if (one[name] == null) continue;
    const most = MOST[name] ?? MOST.calls;
    made[name] = list(one[name], `${at}.${name}`, most).map((each, i) =>
      check(each, `${at}.${name}[${i}]`),
    );
  }
  return made;
}

function attachment(one, at) {
  const kind = among(record(one, at).kind, `${at}.kind`, ["image", "audio", "text"]);
  const made = { kind, name: text(one.name, `${at}.name`, LONGEST.name) };
  made.data = text(one.data, `${at}.data`, LONGEST.data);
  if (kind === "image" && !PICTURE.test(made.data))
    throw new Error(`${at}.data is not the data: URL of a picture.`);
  if (kind !== "text" && NO_BASE64.test(made.data.replace(PICTURE, "")))
    throw new Error(`${at}.data is not base64.`);
  if (kind === "audio")
    made.format = among(one.format, `${at}.format`, ["wav", "mp3", "flac", "ogg"]);
  return made;
}

function call(one, at) {
  return {
    id: text(record(one, at).id, `${at}.id`, LONGEST.name),
    name: text(one.name, `${at}.name`, LONGEST.name),
    arguments: text(one.arguments, `${at}.arguments`),
  };
}

function result(one, at) {
  return {
    id: text(record(one, at).id, `${at}.id`, LONGEST.name),
    text: text(one.text, `${at}.text`),
  };
}

const fact = (one, at) => text(one, at, LONGEST.fact);

function record(value, at) {
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw new Error(`${at} is not an object.`);
  return value;
}

function list(value, at, most) {
  if (!Array.isArray(value)) throw new Error(`${at} is not a list.`);
  if (value.length > most)
    throw new Error(`${at} has ${value.length} entries, of at most ${most}.`);
  return value;
}

function text(value, at, most = LONGEST.text) {
  if (typeof value !== "string") throw new Error(`${at} is not a text.`);
  if (value.length > most)
    throw new Error(`${at} has ${value.length} characters, of at most ${most}.`);
  return value;
}

function among(value, at, names) {
  if (!names.includes(value)) throw new Error(`${at} is not one of ${names.join(", ")}.`);
  return value;
}

function id(value, at) {
  if (typeof value !== "string" || !ID.test(value))
    throw new Error(`${at} is not 32 hexadecimal digits.`);
  return value;
}

function time(value, at) {
  if (!Number.isFinite(value) || Math.abs(value) > 8.64e15)
    throw new Error(`${at} is not a time in milliseconds.`);
  return value;
}
