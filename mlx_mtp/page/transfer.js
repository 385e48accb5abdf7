// Conversations as files: what Export writes, and what it, Open WebUI and ChatGPT have written.

import { message } from "./asking.js";
import * as store from "./chats.js";
import * as files from "./files.js";

const ROLES = new Set(["user", "assistant", "tool"]);
const MOST_BYTES = 200 << 20;

/** A conversation as other programs can read it; `branches` are all messages, those that are not shown too. */
async function exported(chat) {
  const { system } = chat.settings;
  const branches = await Promise.all(Object.values(chat.nodes).map(async ({ id, parent, ...node }) => ({ id, parent, ...(await message(node)) })));
  const messages = await Promise.all(store.path(chat).map(message));
  if (system?.trim()) messages.unshift({ role: "system", content: system });
  return { title: chat.title, updated_at: chat.at / 1000, settings: chat.settings, messages, branches, shown: chat.leaf };
}

/** Save chats as a file: one as an object, several as a list. */
export async function download(chats) {
  const found = await Promise.all(chats.map(exported));
  const text = JSON.stringify(found.length === 1 ? found[0] : found, null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `${(chats.length === 1 ? chats[0].title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() : "") || "chats"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };
export const asMarkdown = (chat) => [`# ${chat.title}`, ...store.path(chat).map((node) =>
  `## ${NAMES[node.role]}\n\n${[...(node.files ?? []).map((file) => `[${file.name}]`), node.content].join("\n\n")}`)].join("\n\n");

const textOf = (content) => typeof content === "string" ? content
  : Array.isArray(content) ? content.map((part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : "")).filter(Boolean).join("\n") : "";
const string = (value) => (typeof value === "string" ? value : "");

/** What the file says about messages, as `[key, parent's key, role, content, more]`, and the last one's key. */
function read(one) {
  const tree = one?.chat?.history?.messages ?? one?.mapping; // Open WebUI, ChatGPT
  if (tree) {
    const found = Object.entries(tree).map(([key, each]) => {
      const { author, role = author?.role, content } = each?.message ?? each ?? {};
      return [key, each?.parentId ?? each?.parent, role, content?.parts ?? content, {}];
    });
    return [found, one.chat?.history?.currentId ?? one.current_node];
  }
  if (Array.isArray(one?.branches)) return [one.branches.map((each) => [each?.id, each?.parent, each?.role, each?.content, each ?? {}]), one.shown];
  const list = one?.messages ?? one?.chat?.messages;
  if (!Array.isArray(list)) throw new Error("this is no chat that Export, Open WebUI or ChatGPT has written.");
  return [list.map((each, index) => [index, index - 1, each?.role, each?.content, each ?? {}]), list.length - 1];
}

async function pictures(chat, content) {
  const found = [];
  for (const part of Array.isArray(content) ? content : []) {
    const [, type, data] = /^data:(image\/(?:png|jpeg|webp|gif));base64,([A-Za-z0-9+/=]+)$/.exec(string(part?.image_url?.url)) ?? [];
    if (data) found.push(await files.put(chat.id, "image", new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], { type })));
  }
  return found;
}

async function take(one) {
  const [found, lastKey] = read(one);
  const settings = Object.fromEntries(Object.entries(one.settings ?? {}).filter(([, value]) => typeof value === "string"));
  const chat = { id: store.newId(), title: string(one.title ?? one.chat?.title).slice(0, 200), at: 1000 * (Number(one.updated_at ?? one.update_time) || Date.now() / 1000), settings, nodes: {}, leaf: null };
  const byKey = new Map(found.map((each) => [each[0], each]));
  const ids = new Map();
  for (const [key, , role, content, more] of found) {
    const text = textOf(content);
    if (role === "system" && text && !settings.system) settings.system = text;
    if (!ROLES.has(role) || (role === "tool" && !more.tool_call_id)) continue;
    const calls = Array.isArray(more.tool_calls) ? more.tool_calls.map((call) => ({
      id: string(call?.id), name: string(call?.function?.name), text: string(call?.function?.arguments) })) : [];
    const images = await pictures(chat, content);
    if (!text && !calls.length && !images.length) continue;
    const own = { user: { files: images }, tool: { callId: string(more.tool_call_id), name: "" },
      assistant: { reasoning: string(more.reasoning_content), calls, steps: [], state: "done", model: "Imported" } }[role];
    ids.set(key, store.newId());
    chat.nodes[ids.get(key)] = { id: ids.get(key), content: text, role, ...own };
  }
  // Messages that are not shown, such as ChatGPT's of role system, are left out of the tree.
  const shown = (key) => {
    const seen = new Set();
    while (byKey.has(key) && !ids.has(key) && !seen.has(key)) (seen.add(key), (key = byKey.get(key)[1]));
    return ids.get(key) ?? null;
  };
  for (const [key, id] of ids) chat.nodes[id].parent = shown(byKey.get(key)[1]);
  chat.leaf = shown(lastKey) ?? [...ids.values()].at(-1) ?? null;
  for (const node of Object.values(chat.nodes)) if (isCircular(chat, node)) node.parent = null;
  if (chat.leaf === null) throw new Error("a chat in it has no messages.");
  chat.title ||= store.path(chat)[0].content.slice(0, 60);
  return chat;
}

function isCircular(chat, node) {
  let count = Object.keys(chat.nodes).length;
  for (let each = node; each && count >= 0; each = chat.nodes[each.parent]) count -= 1;
  return count < 0;
}

/** Take in the chats of a file; returns how many. */
export async function imported(file) {
  if (file.size > MOST_BYTES) throw new Error("the file is too large.");
  let given;
  try {
    given = JSON.parse(await file.text());
  } catch {
    throw new Error("this is not JSON.");
  }
  const chats = await Promise.all((Array.isArray(given) ? given : [given]).map(take));
  for (const chat of chats) {
    store.chats.set(chat.id, chat);
    store.save(chat);
  }
  if (chats.length) store.open(chats.at(-1));
  return chats.length;
}
