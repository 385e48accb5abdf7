// Attached files: checked, kept in this browser's database, and put into a request.

import { ApiError, state } from "./api.js";
import { bytes, number } from "./ui.js";

const TAKEN = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const MOST_IMAGE_BYTES = 32 << 20; // the server's limits
const MOST_PIXELS = 100e6;
const MOST_ASPECT = 200;
const MOST_TEXT_BYTES = 8 << 20;
const LEAST_TOKEN = 6; // characters: text of longer tokens on average is rare

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let database = null;
async function table(mode) {
  if (!database) {
    const opening = indexedDB.open("mlx-mtp", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("files");
    database = done(opening);
  }
  return (await database).transaction("files", mode).objectStore("files");
}

const memory = new Map(); // where there is no database, as in some private windows, or no room in it

/** Keep a file for a chat; returns what the chat notes of it. */
export async function put(chatId, name, blob) {
  const id = `${chatId}/${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
  try {
    await done((await table("readwrite")).put(blob, id));
  } catch {
    memory.set(id, blob);
  }
  return { id, name, type: blob.type, size: blob.size };
}

export async function get({ id, name }) {
  const found = memory.get(id) ?? (await table("readonly").then((files) => done(files.get(id))).catch(() => null));
  if (!found) throw new ApiError(`The file ${name} is no longer in this browser: attach it again, or edit the message.`);
  return found;
}

export async function forget(chatId) {
  for (const id of memory.keys()) if (id.startsWith(`${chatId}/`)) memory.delete(id);
  await table("readwrite").then((files) => done(files.delete(IDBKeyRange.bound(`${chatId}/`, `${chatId}0`)))).catch(() => {});
}

export const isImage = ({ type }) => type.startsWith("image/");

/** What can be sent of a file that was chosen, dropped or pasted; an Error says why nothing can. */
export async function checked(file) {
  const name = file.name.replace(/[\x00-\x1f\x7f`]+/g, " ").trim().slice(0, 200) || "file";
  const fail = (why) => {
    throw new Error(`${name} ${why}`);
  };
  if (isImage(file) && file.type !== "image/svg+xml") return [name, await checkedImage(file, fail)];
  if (file.size > MOST_TEXT_BYTES) fail(`has ${bytes(file.size)}; a text may have ${bytes(MOST_TEXT_BYTES)}.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    fail("is neither text (UTF-8) nor an image. Paste its text instead.");
  }
  if (text.includes("\0")) fail("is not text. Paste its text instead.");
  const tokens = Math.ceil(text.length / LEAST_TOKEN);
  if (state.context && tokens > state.context) fail(`has about ${number(tokens)} tokens or more; the model's context is ${number(state.context)}.`);
  return [name, new Blob([text], { type: "text/plain" })];
}

async function checkedImage(file, fail) {
  if (!state.sees) fail(`is an image, and ${state.model ?? "this model"} can't see images.`);
  if (file.size > MOST_IMAGE_BYTES) fail(`has ${bytes(file.size)}; an image may have ${bytes(MOST_IMAGE_BYTES)}.`);
  const picture = await createImageBitmap(file).catch(() => fail("is no image that this browser can read."));
  const { width, height } = picture;
  if (width * height > MOST_PIXELS) fail(`has ${number(width * height)} pixels; an image may have ${number(MOST_PIXELS)}.`);
  if (Math.max(width / height, height / width) > MOST_ASPECT) fail(`is ${width} x ${height}; sides may differ ${MOST_ASPECT} times.`);
  if (TAKEN.has(file.type)) return file;
  const canvas = new OffscreenCanvas(width, height); // such as HEIC or AVIF: the server takes four types
  canvas.getContext("2d").drawImage(picture, 0, 0);
  return canvas.convertToBlob();
}

export function dataUrl(blob) {
  const reader = new FileReader();
  reader.readAsDataURL(blob);
  return new Promise((resolve) => (reader.onload = () => resolve(reader.result)));
}

function fenced(name, text) {
  const fence = "`".repeat(Math.max(2, ...Array.from(text.matchAll(/`+/g), ([marks]) => marks.length)) + 1);
  const kind = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${kind}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
}

/** A message's text and files, as a request has them. */
export async function content(node) {
  const images = [];
  let text = "";
  for (const file of node.files ?? []) {
    const blob = await get(file);
    if (isImage(file)) images.push({ type: "image_url", image_url: { url: await dataUrl(blob) } });
    else text += fenced(file.name, await blob.text());
  }
  text += node.content;
  return images.length ? [...images, ...(text ? [{ type: "text", text }] : [])] : text;
}
