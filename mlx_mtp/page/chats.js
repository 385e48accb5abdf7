// Conversations: trees of messages, kept in this browser alone.

import { changed } from "./api.js";
import * as files from "./files.js";
import * as typed from "./typed.js";

const PREFIX = "mlx-mtp.chat.";
const SHOWN = "mlx-mtp.shown"; // the chat that this tab shows, for when it is loaded again
const MOST_STORED = 5_200_000; // characters, in the browsers that people have

export const chats = new Map(); // by id
export const running = new Map(); // by the id of an answer: what stops it
export const view = { id: null, drafts: localStorage.getItem("mlx-mtp.drafts") === "1", problem: null, edit: null, fill: null };

export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");
export const current = () => chats.get(view.id) ?? made();
const isKept = (chat) => chat.leaf !== null || typed.read(chat.id) !== null || typed.read(`${chat.id}.files`) !== null;

export function open(chat) {
  view.id = chat.id;
  sessionStorage.setItem(SHOWN, chat.id);
  changed();
}

function made() {
  const settings = { ...(chats.get(view.id)?.settings ?? {}) };
  const chat = { id: newId(), title: "", at: Date.now(), settings, nodes: {}, leaf: null };
  chats.set(chat.id, chat);
  view.id = chat.id;
  return chat;
}

/** A new chat, or the one that is new already. */
export const newChat = () => open([...chats.values()].find((chat) => chat.leaf === null && !isKept(chat)) ?? made());

/** The chats that are worth to be listed, pinned ones first; `words` are in the title or a message. */
export function listed(words = "") {
  const sought = words.trim().toLowerCase();
  const has = (text) => text.toLowerCase().includes(sought);
  return [...chats.values()]
    .filter((chat) => chat.id === view.id || isKept(chat))
    .filter((chat) => !sought || has(chat.title) || Object.values(chat.nodes).some((node) => has(node.content)))
    .sort((a, b) => Boolean(b.pinned) - Boolean(a.pinned) || b.at - a.at);
}

// The tree.

export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let node = chat.nodes[leaf]; node; node = chat.nodes[node.parent]) found.push(node);
  return found.reverse();
}

const below = (chat, id) => Object.values(chat.nodes).filter((each) => each.parent === id);
export const siblings = (chat, node) => below(chat, node.parent).filter((each) => each.role === node.role);

export function show(chat, node) {
  let leaf = node;
  for (let next; (next = below(chat, leaf.id).at(-1)); ) leaf = next;
  chat.leaf = leaf.id;
  save(chat);
}

export function add(chat, parent, fields) {
  const node = { id: newId(), parent: parent ?? null, content: "", ...fields };
  chat.nodes[node.id] = node;
  chat.leaf = node.id;
  chat.at = Date.now();
  return node;
}

/** Delete a message with all that follows it; a version beside it is shown then, or what was before. */
export function cut(chat, node) {
  const [beside] = siblings(chat, node).filter((each) => each !== node).slice(-1);
  if (!beside && node.parent === null) return remove(chat);
  const lost = [node];
  for (const each of lost) lost.push(...below(chat, each.id)); // which grows meanwhile
  dropNodes(chat, lost.map(({ id }) => id));
  if (beside) show(chat, beside);
  else chat.leaf = node.parent;
  save(chat);
}

function dropNodes(chat, ids) {
  for (const id of ids.filter((each) => each in chat.nodes)) {
    running.get(id)?.abort();
    delete chat.nodes[id];
    typed.drop(id);
  }
  chat.deleted = [...new Set([...(chat.deleted ?? []), ...ids])];
}

export function remove(chat) {
  localStorage.removeItem(PREFIX + chat.id);
  for (const id of [chat.id, ...Object.keys(chat.nodes)]) typed.drop(id);
  files.forget(chat.id);
  forget(chat);
}

function forget(chat) {
  for (const { id } of Object.values(chat.nodes)) running.get(id)?.abort();
  chats.delete(chat.id);
  if (view.id === chat.id) view.id = listed()[0]?.id ?? null;
  changed();
}

// Keeping them.

const sizes = new Map(); // characters, by chat

function write(chat) {
  const text = JSON.stringify(chat);
  localStorage.setItem(PREFIX + chat.id, text);
  sizes.set(chat.id, text.length);
}

export function save(chat) {
  // One without a message or a text is not worth keeping, and one that was deleted stays so.
  if (isKept(chat) && chats.get(chat.id) === chat) {
    try {
      write(chat);
      view.problem = null;
    } catch {
      // The drafts of each step take most of the room, and an answer is complete without them.
      for (const other of chats.values()) for (const node of Object.values(other.nodes)) node.steps = [];
      try {
        [...chats.values()].filter(isKept).forEach(write);
      } catch {
        view.problem = "This browser's storage is full: the latest messages are lost when the page closes. Export or delete some chats.";
      }
    }
  }
  changed();
}

/** The share of the browser's storage that chats take, about. */
export const stored = () => [...chats.keys()].reduce((sum, id) => sum + (sizes.get(id) ?? 0), 0) / MOST_STORED;

function load(key, text) {
  try {
    const chat = JSON.parse(text);
    sizes.set(key.slice(PREFIX.length), text.length);
    if (!chat.nodes || !chat.settings) return;
    const own = chats.get(key.slice(PREFIX.length));
    if (own) merge(own, chat);
    else if (isKept(chat)) chats.set(key.slice(PREFIX.length), chat);
    else localStorage.removeItem(key);
  } catch {
    // Not ours, or written by another version.
  }
}

// An answer that is continued has more turns.
const rank = (node) => (node ? 2 * (node.turns ?? 0) + ["done", "stopped", "failed", undefined].includes(node.state) : -1);

/** Take over what another tab wrote of a chat, and write again what it did not have. */
function merge(own, { nodes, leaf, title, pinned, settings, at, deleted = [] }) {
  const gone = new Set(own.deleted ?? []);
  const lacks = Object.values(own.nodes).some((node) => !deleted.includes(node.id) && rank(node) > rank(nodes[node.id]))
    || [...gone].some((id) => nodes[id]);
  for (const node of Object.values(nodes)) {
    if (!gone.has(node.id) && !running.has(node.id) && rank(node) >= rank(own.nodes[node.id])) own.nodes[node.id] = node;
  }
  if (deleted.length) dropNodes(own, deleted);
  Object.assign(own, { title, pinned, settings, at });
  // Each tab shows its own branch, and what another one adds to that.
  if (!own.nodes[own.leaf] || path(own, leaf).some((node) => node.id === own.leaf)) own.leaf = leaf;
  if (lacks) save(own);
}

for (const [key, text] of Object.entries(localStorage)) if (key.startsWith(PREFIX)) load(key, text);
const last = chats.get(sessionStorage.getItem(SHOWN));
view.id = (last ?? [...chats.values()].sort((a, b) => b.at - a.at)[0])?.id ?? null;
// Another tab has written or deleted a chat.
addEventListener("storage", ({ key, newValue }) => {
  if (!key?.startsWith(PREFIX)) return;
  const own = chats.get(key.slice(PREFIX.length));
  if (newValue !== null) load(key, newValue);
  else if (own) forget(own);
  changed();
});
