// Requests: what the server is sent for the shown turns of a conversation.

/** Whether an answer came to nothing. It is not sent again, nor is its question. */
export function isFailed(turn) {
  if (turn.role !== "assistant") return false;
  return Boolean(turn.error) || (turn.stopped && !turn.text && !turn.calls?.length);
}

/**
 * Path and body of the request for what follows the last turn.
 * `goesOn`: the last turn is an answer, and the model continues it.
 * `setup`: {model, system, params}.
 */
export function requestFor(conversation, path, goesOn, { model, system, params }) {
  const asked = { model, stream: true, stream_options: { include_usage: true }, ...params };
  if (conversation.mode === "text") {
    const [prompt, begun] = path.slice(goesOn ? -2 : -1);
    return ["v1/completions", { ...asked, prompt: prompt.text + (begun?.text ?? "") }];
  }
  const messages = messagesOf(path);
  if (system) messages.unshift({ role: "system", content: system });
  const flags = goesOn ? { continue_final_message: true, add_generation_prompt: false } : {};
  return ["v1/chat/completions", { ...asked, ...flags, messages }];
}

function messagesOf(path) {
  const sent = [];
  for (const turn of path) {
    if (isFailed(turn)) {
      while (sent.length && sent.pop().role !== "user");
      continue;
    }
    if (turn.role === "tool")
      for (const { id, text } of turn.results)
        sent.push({ role: "tool", tool_call_id: id, content: text });
    else if (turn.role === "user") sent.push({ role: "user", content: contentOf(turn) });
    else sent.push(answerOf(turn));
  }
  return sent;
}

function answerOf(turn) {
  const message = { role: "assistant", content: turn.text };
  if (turn.calls?.length)
    message.tool_calls = turn.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  return message;
}

function contentOf(turn) {
  const all = turn.attachments ?? [];
  const files = all.filter((one) => one.kind === "text").map(fenced);
  const text = [turn.text, ...files].filter(Boolean).join("\n\n");
  const parts = all.filter((one) => one.kind !== "text").map(partOf);
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}

function partOf({ kind, data, format }) {
  return kind === "image"
    ? { type: "image_url", image_url: { url: data } }
    : { type: "input_audio", input_audio: { data, format } };
}

/** A text file as a block of code, whose fence is longer than any in the file. */
function fenced({ name, data }) {
  const runs = data.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${name}:\n${fence}\n${data.replace(/\n$/, "")}\n${fence}`;
}
