// Conversations: trees of messages, kept in this browser alone, and the requests that grow them.

import { ApiError, api, changed, events, state, withConnection } from "./api.js";

const PREFIX = "mlx-mtp.chat.";
const SAVE_SECONDS = 1;

export const chats = new Map(); // by id
export const running = new Map(); // by the id of an answer: what stops it
export const view = { id: null, drafts: localStorage.getItem("mlx-mtp.drafts") === "1", problem: null };

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");
export const current = () => chats.get(view.id) ?? made();

// A chat's settings, as they are typed: the field of the request, its name, and what it does.
const number = (text) => Number(text);
const SETTINGS = [
  { name: "system", label: "System prompt", kind: "text", help: "What the model is told before everything else." },
  { name: "temperature", label: "Temperature", parse: number, step: 0.1, help: "0 always takes the most probable token." },
  { name: "top_p", label: "Top p", parse: number, step: 0.05, help: "Keep the most probable tokens that add up to this." },
  { name: "top_k", label: "Top k", parse: number, step: 1, help: "Keep only so many of the most probable tokens." },
  { name: "min_p", label: "Min p", parse: number, step: 0.01, help: "Keep tokens at least this likely relative to the best." },
  { name: "repetition_penalty", label: "Repetition penalty", parse: number, step: 0.05, help: "Above 1: repeat less." },
  { name: "presence_penalty", label: "Presence penalty", parse: number, step: 0.1, help: "Lower what the answer has already." },
  { name: "max_tokens", label: "Most tokens", parse: number, step: 1, help: "Of an answer; empty: as the context has room." },
  { name: "seed", label: "Seed", parse: number, step: 1, help: "The same seed gives the same answer; empty: a new one each time." },
  {
    name: "thinking", label: "Reasoning", kind: "choice", choices: { "": "as the model does", on: "on", off: "off" },
    help: "Whether the model thinks before it answers, where it can.",
  },
  {
    name: "drafts", label: "Drafts a step", kind: "choice",
    get choices() {
      // Counts are of the head's drafts; without a head only copies can be turned off.
      const counts = [...Array(state.sources.includes("mtp") ? 9 : Math.min(state.sources.length, 1)).keys()];
      return { "": "what pays most", ...Object.fromEntries(counts.map((n) => [n, n || "none"])) };
    },
    help: "Changes the speed, never the answer.",
  },
  { name: "tools", label: "Tools", kind: "json", help: 'A list: [{"name": "get_time", "description": "…", "parameters": {…}}]' },
  { name: "schema", label: "JSON schema", kind: "json", help: "The answer will be JSON that fits it." },
];
/** The settings that this server can act on. */
export const offered = () => SETTINGS.filter(({ choices }) => !choices || Object.keys(choices).length > 1);

// Where the server's word for what was wrong belongs on this page.
const FIELDS = { response_format: "schema", chat_template_kwargs: "thinking", mtp: "drafts", messages: "system" };

/** The setting that an error of the server is about, if any. */
export function settingOf(param) {
  const field = (param ?? "").split(/[.[]/)[0];
  const name = FIELDS[field] ?? field;
  return SETTINGS.some((each) => each.name === name) ? name : null;
}

export function parsedJson(setting, text) {
  if (!text?.trim()) return undefined;
  const fail = (why) => {
    throw new ApiError(`${setting.label}: this ${why}`, { param: setting.name });
  };
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    fail(`is not JSON: ${error.message}`);
  }
  const isTools = setting.name === "tools";
  if (!(value instanceof Object) || Array.isArray(value) !== isTools) fail(`must be ${isTools ? "a list of functions" : "an object"}.`);
  return value;
}

const wrapped = (tool) => (tool?.function ? tool : { type: "function", function: tool });

function requestBody(chat, before) {
  const given = chat.settings;
  // An answer that failed or was stopped before its first word is none.
  const said = before.filter((node) => node.role !== "assistant" || node.content || node.calls.length);
  const body = { messages: said.map(message), stream: true, stream_options: { include_usage: true, include_progress: true } };
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

export function message(node) {
  const found = { role: node.role, content: node.content };
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

// The tree.

export const newChat = () => (made(), changed());

function made() {
  const settings = { ...(chats.get(view.id)?.settings ?? {}) };
  const chat = { id: newId(), title: "", at: Date.now(), settings, nodes: {}, leaf: null };
  chats.set(chat.id, chat);
  view.id = chat.id;
  return chat;
}

export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let node = chat.nodes[leaf]; node; node = chat.nodes[node.parent]) found.unshift(node);
  return found;
}

export const siblings = (chat, node) =>
  Object.values(chat.nodes).filter((each) => each.parent === node.parent && each.role === node.role);

export function show(chat, node) {
  let leaf = node;
  for (;;) {
    const next = Object.values(chat.nodes).filter((each) => each.parent === leaf.id).at(-1);
    if (!next) break;
    leaf = next;
  }
  chat.leaf = leaf.id;
  save(chat);
}

function add(chat, parent, fields) {
  const node = { id: newId(), parent: parent ?? null, content: "", ...fields };
  chat.nodes[node.id] = node;
  chat.leaf = node.id;
  chat.at = Date.now();
  return node;
}

export function remove(chat) {
  localStorage.removeItem(PREFIX + chat.id);
  forget(chat);
}

function forget(chat) {
  for (const node of Object.values(chat.nodes)) stop(node);
  chats.delete(chat.id);
  if (view.id === chat.id) view.id = sorted()[0]?.id ?? null;
  changed();
}

export const sorted = () => [...chats.values()].sort((a, b) => b.at - a.at);

// Keeping them.

const write = (chat) => localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));

export function save(chat) {
  // One without a message is not worth keeping, and one that was deleted stays so.
  if (chat.leaf !== null && chats.get(chat.id) === chat) {
    try {
      write(chat);
      view.problem = null;
    } catch {
      // The drafts of each step take most of the room, and an answer is complete without them.
      for (const other of chats.values()) for (const node of Object.values(other.nodes)) node.steps = [];
      try {
        chats.forEach(write);
      } catch {
        view.problem = "This browser's storage is full: the latest messages are lost when the page closes. Delete some chats.";
      }
    }
  }
  changed();
}

function load(key, text) {
  try {
    const chat = JSON.parse(text);
    if (!chat.nodes || !chat.settings) return;
    const own = chats.get(key.slice(PREFIX.length));
    if (own) merge(own, chat);
    else chats.set(key.slice(PREFIX.length), chat);
  } catch {
    // Not ours, or written by another version.
  }
}

const hasEnded = (node) => ["done", "stopped", "failed"].includes(node?.state);

/** Take over what another tab wrote of a chat, and write again what it did not have. */
function merge(own, { nodes, leaf, title, settings, at }) {
  const lacks = Object.values(own.nodes).some((node) => !nodes[node.id] || (hasEnded(node) && !hasEnded(nodes[node.id])));
  for (const node of Object.values(nodes)) {
    if (!running.has(node.id) && !hasEnded(own.nodes[node.id])) own.nodes[node.id] = node;
  }
  Object.assign(own, { title, settings, at });
  // Each tab shows its own branch, and what another one adds to that.
  if (path(own, leaf).some((node) => node.id === own.leaf)) own.leaf = leaf;
  if (lacks) save(own);
}

for (const [key, text] of Object.entries(localStorage)) if (key.startsWith(PREFIX)) load(key, text);
view.id = sorted()[0]?.id ?? null;
// Another tab has written or deleted a chat.
addEventListener("storage", ({ key, newValue }) => {
  if (!key?.startsWith(PREFIX)) return;
  const own = chats.get(key.slice(PREFIX.length));
  if (newValue !== null) load(key, newValue);
  else if (own) forget(own);
  changed();
});

// Asking.

export function ask(chat, text) {
  chat.title ||= text.slice(0, 60);
  const node = add(chat, chat.leaf, { role: "user", content: text });
  return answer(chat, node);
}

/** Ask again with another text: a branch beside the old one. */
export function edit(chat, node, text) {
  return answer(chat, add(chat, node.parent, { role: "user", content: text }));
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

export const stop = (node) => running.get(node.id)?.abort();

async function answer(chat, parent, seed) {
  const node = add(chat, parent.id, { role: "assistant", reasoning: "", calls: [], steps: [], state: "sent" });
  const control = new AbortController();
  running.set(node.id, control);
  const saving = setInterval(() => save(chat), 1000 * SAVE_SECONDS);
  save(chat);
  try {
    const body = requestBody(chat, path(chat, parent.id));
    if (seed !== undefined) body.seed = seed;
    const work = () => stream(node, body, control.signal);
    await withConnection(work, () => ((node.state = "queued"), changed()), control.signal);
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") Object.assign(node, { error: error.message, param: error.param ?? null });
  } finally {
    clearInterval(saving);
    running.delete(node.id);
    save(chat);
  }
  return node;
}

let frame = 0;
/** Redraw soon: not for each of a fast stream's chunks, and less often the longer a text is. */
function drawSoon(length) {
  frame ||= setTimeout(() => ((frame = 0), changed()), 60 + length / 100);
}

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
    drawSoon(node.content.length);
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

/** A conversation as a file that other programs can read. */
export function exported(chat) {
  const { system } = chat.settings;
  const messages = path(chat).map(message);
  if (system?.trim()) messages.unshift({ role: "system", content: system });
  const found = { title: chat.title, settings: chat.settings, messages };
  return new Blob([JSON.stringify(found, null, 2)], { type: "application/json" });
}
