// The requests that grow a conversation.

import { ApiError, api, changed, connect, events, state, withConnection } from "./api.js";
import { add, path, running, save } from "./chats.js";
import { content } from "./files.js";
import { offered, parsedJson, toldOf } from "./settings.js";

const SAVE_SECONDS = 1, STATE_SECONDS = 2;

const wrapped = (tool) => (tool?.function ? tool : { type: "function", function: tool });

async function requestBody(chat, before) {
  const given = chat.settings;
  // An answer that failed or was stopped before its first word is none.
  const said = before.filter((node) => node.role !== "assistant" || node.content || node.calls.length);
  const messages = await Promise.all(said.map(message));
  const body = { messages, stream: true, stream_options: { include_usage: true, include_progress: true } };
  if (given.system?.trim()) body.messages.unshift({ role: "system", content: given.system });
  body.mtp = { trace: true };
  if (state.states) body.model = state.model;
  for (const setting of offered()) {
    const text = given[setting.name];
    if (setting.name === "drafts" && text && text in setting.choices) body.mtp.num_draft_tokens = Number(text);
    if (setting.parse && text !== undefined && text !== "") body[setting.name] = setting.parse(text);
    if (setting.kind !== "json") continue;
    const value = parsedJson(setting, text);
    if (value && setting.name === "tools") body.tools = value.map(wrapped);
    if (value && setting.name === "schema") {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: value } };
    }
  }
  if (given.thinking) body.chat_template_kwargs = { enable_thinking: given.thinking === "on" };
  return body;
}

/** A message as a request has it. */
export async function message(node) {
  const found = { role: node.role, content: await content(node) };
  if (node.role === "tool") found.tool_call_id = node.callId;
  if (node.reasoning) found.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    found.tool_calls = node.calls.map(({ id, name, text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
    found.content ||= null;
  }
  return found;
}

export function ask(chat, text, files) {
  chat.title ||= (text.trim() || files[0].name).slice(0, 60);
  return answer(chat, add(chat, chat.leaf, { role: "user", content: text, files }));
}

/** Another text of a message: a branch beside the old one, and for a question a new answer. */
export function edit(chat, node, text) {
  const { role, reasoning, files, model } = node;
  if (role === "user") return answer(chat, add(chat, node.parent, { role, files, content: text }));
  add(chat, node.parent, { role, reasoning, model, content: text, calls: [], steps: [], state: "done", edited: true });
  return save(chat);
}

export const again = (chat, node, seed) => answer(chat, chat.nodes[node.parent], seed);

/** A tool's results, one for each call; the model goes on when the last is there. */
export function reply(chat, node, results) {
  let last = node;
  node.calls.forEach(({ id, name }, index) => {
    last = add(chat, last.id, { role: "tool", callId: id, name, content: results[index] });
  });
  return answer(chat, last);
}

/** Whether an answer has a text that its model can write on. */
export const isCut = (chat, node) => node.content && !node.calls.length && !node.edited && !chat.settings.schema?.trim()
  && !running.has(node.id) && (node.finish === "length" || node.state !== "done");

/** Let the model write on where its answer was cut: with its seed, these are the tokens that it would have had. */
export function goOn(chat, node) {
  Object.assign(node, { finish: null, error: null, param: null, turns: (node.turns ?? 0) + 1 });
  const more = { continue_final_message: true, ...(node.seed !== undefined && { seed: node.seed }) };
  return run(chat, node, async () => ({ ...(await requestBody(chat, path(chat, node.id))), ...more }));
}

export const stop = (node) => running.get(node.id)?.abort();

export function answer(chat, parent, seed) {
  const { model } = state, made = toldOf(chat.settings);
  const node = add(chat, parent.id, { role: "assistant", reasoning: "", calls: [], steps: [], model, made });
  const own = seed === undefined ? {} : { seed };
  return run(chat, node, async () => ({ ...(await requestBody(chat, path(chat, parent.id))), ...own }));
}

async function run(chat, node, makeBody) {
  const control = new AbortController();
  node.state = "sent";
  running.set(node.id, control);
  const saving = setInterval(() => save(chat), 1000 * SAVE_SECONDS);
  // A model that is not in memory is loaded for the request.
  const watching = setInterval(() => state.states && node.state === "sent" && connect(), 1000 * STATE_SECONDS);
  save(chat);
  try {
    const body = await makeBody();
    const work = () => stream(node, body, control.signal);
    await withConnection(work, () => ((node.state = "queued"), changed()), control.signal);
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") Object.assign(node, { error: error.message, param: error.param ?? null });
  } finally {
    clearInterval(saving);
    clearInterval(watching);
    running.delete(node.id);
    save(chat);
  }
  return node;
}

let frame = 0;
/** Redraw soon, but not for each of a fast stream's chunks. */
const drawSoon = () => (frame ||= setTimeout(() => ((frame = 0), changed()), 60));

async function stream(node, body, signal) {
  const began = performance.now();
  node.state = "sent";
  changed();
  for await (const chunk of events(await api("/v1/chat/completions", { body, signal }))) {
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
    node.seed = chunk.seed;
    node.timings = chunk.timings ?? node.timings;
    const [choice] = chunk.choices;
    if (chunk.prompt_progress) node.progress = chunk.prompt_progress;
    else if (choice) grow(node, choice);
    if (node.steps.length && !node.first) node.first = (performance.now() - began) / 1000;
    drawSoon();
  }
  if (!node.finish) throw new Error("The answer broke off: the server has stopped or was restarted.");
}

function grow(node, { delta, finish_reason: finish, mtp }) {
  if (node.state === "sent") node.state = "streaming";
  delete node.progress;
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    node.calls[index] ??= { id, name: called.name, text: "" };
    node.calls[index].text += called.arguments ?? "";
  }
  // As short as they can be, for the browser's storage: texts, drafts with sources, accepted.
  for (const { tokens, drafts, num_accepted: accepted } of mtp?.trace ?? []) {
    node.steps.push([tokens.map((t) => t.text), drafts.map((d) => [d.text, d.source]), accepted]);
  }
  node.finish = finish ?? node.finish;
}
