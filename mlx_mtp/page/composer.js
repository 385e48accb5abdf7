// What one writes: a box that grows, files with it, and how much of the context is used.

import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { changed, state } from "./api.js";
import { ask, stop } from "./asking.js";
import { path, running, save, view } from "./chats.js";
import * as files from "./files.js";
import { useTyped } from "./typed.js";
import { Failure, bytes, html, number, percent } from "./ui.js";

export const isTouched = matchMedia("(pointer: coarse)").matches; // a screen keyboard, where Enter is a new line
const NEARLY_FULL = 0.8;
const TOKEN = 3.5; // characters, about

export const BOX = "#message";

/** A text that grows with what is in it, up to half of the window. */
export function Box({ value, onText, focus, ...rest }) {
  const box = useRef(null);
  useEffect(() => {
    if (!focus || isTouched) return;
    box.current.focus();
    box.current.setSelectionRange(value.length, value.length);
  }, []);
  // For browsers without `field-sizing`; others look at the text itself.
  const rows = value.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / 80), 0);
  return html`<textarea ref=${box} class="box" rows=${Math.min(rows, 14)} value=${value} ...${rest}
    onInput=${(event) => onText(event.target.value)}></textarea>`;
}

/** A file of a message: a picture, or a text's name. */
export function Attached({ file, onRemove }) {
  const [shown, setShown] = useState(null);
  const image = files.isImage(file);
  useEffect(() => {
    let url = null, ended = false;
    const load = async () => {
      const blob = await files.get(file);
      if (!ended) setShown(image ? (url = URL.createObjectURL(blob)) : (await blob.text()).slice(0, 20_000));
    };
    load().catch(() => setShown(""));
    return () => ((ended = true), url && URL.revokeObjectURL(url));
  }, [file.id]);
  const told = html`<span class="name">${file.name}</span> <small>${bytes(file.size)}</small>`;
  return html`<div class="attached">
    ${shown === "" && file.size > 0 ? html`<small>${file.name} is no longer in this browser.</small>`
      : image ? html`${shown && html`<img src=${shown} alt=${file.name} />`}<p>${told}</p>`
        : html`<details><summary>${told}</summary><pre tabindex="0">${shown}</pre></details>`}
    ${onRemove && html`<button type="button" class="icon" aria-label="Remove ${file.name}" onClick=${onRemove}>×</button>`}
  </div>`;
}

function Context({ chat, length }) {
  const last = path(chat).findLast((node) => node.timings);
  if (!state.context || (!last && length < 2000)) return null;
  const { cache_n: cached, prompt_n: computed, predicted_n: predicted } = last?.timings ?? { cache_n: 0, prompt_n: 0, predicted_n: 0 };
  const used = cached + computed + predicted, about = used + Math.ceil(length / TOKEN);
  const full = about / state.context, left = state.context - about;
  return html`<div class="context ${full >= NEARLY_FULL ? "failure" : ""}">
    <meter min="0" max="1" value=${Math.min(full, 1)} aria-label="Context used"></meter>
    <span>${number(used)} of ${number(state.context)} tokens of context used (${percent(used, state.context)})${last && `, ${number(cached)} were cached`}.</span>
    ${full >= NEARLY_FULL && html`<span role="status">${left > 0 ? `About ${number(left)} are left${length ? " with this text" : ""}` : "This text does not fit"}: begin a new chat, or delete messages.</span>`}
  </div>`;
}

export function Composer({ chat }) {
  const [text, setText] = useTyped(chat.id);
  const [attached, setAttached] = useTyped(`${chat.id}.files`, []);
  const [failed, setFailed] = useState(null);
  const now = useRef(null); // for what ends later
  now.current = attached;
  const chooser = useRef(null);
  const last = path(chat).at(-1);
  const busy = last !== undefined && running.has(last.id);
  const ready = !busy && (text.trim() || attached.length > 0);
  const back = () => isTouched || document.querySelector(BOX)?.focus();

  // An empty chat is kept from its first letter on.
  const write = (next) => (setText(next), chat.leaf === null && Boolean(next) !== Boolean(text) && save(chat));
  useEffect(() => {
    if (view.fill === null) return;
    write(view.fill);
    view.fill = null;
    back();
  });
  const attach = async (chosen) => {
    setFailed(null);
    const problems = [];
    for (const file of chosen) {
      try {
        const [name, blob] = await files.checked(file);
        setAttached((now.current = [...now.current, await files.put(chat.id, name, blob)]));
      } catch (error) {
        problems.push(error.message);
      }
    }
    if (problems.length) setFailed(problems.join(" "));
    save(chat);
    back();
  };
  const send = (event) => {
    event.preventDefault();
    if (!ready) return;
    setText("");
    setAttached([]);
    setFailed(null);
    ask(chat, text, attached);
    back();
  };
  const onKey = (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && !isTouched) send(event);
    const question = event.key === "ArrowUp" && !text && path(chat).findLast((node) => node.role === "user");
    if (question) (event.preventDefault(), (view.edit = question.id), changed());
  };
  useEffect(() => {
    const take = (event) => {
      const data = event.clipboardData ?? event.dataTransfer, given = [...(data?.files ?? [])];
      // Office programs add a picture of the text that is copied.
      const isText = data?.types.includes("text/html") && data.types.includes("text/plain");
      if (given.length && !isText) (event.preventDefault(), attach(given));
    };
    const allow = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
    const heard = { paste: take, drop: take, dragover: allow };
    for (const [name, listener] of Object.entries(heard)) addEventListener(name, listener);
    return () => Object.entries(heard).forEach(([name, listener]) => removeEventListener(name, listener));
  }, [chat.id]);

  return html`<form class="composer" onSubmit=${send}>
    ${failed && html`<${Failure}>${failed}<//>`}
    ${attached.length > 0 && html`<div class="files">${attached.map((file) => html`<${Attached} key=${file.id} file=${file}
      onRemove=${() => setAttached(attached.filter((each) => each !== file))} />`)}</div>`}
    <div class="line">
      <input type="file" multiple hidden ref=${chooser} aria-label="Files" onChange=${(event) => (attach([...event.target.files]), (event.target.value = ""))} />
      <button type="button" class="icon" aria-label="Attach files" title=${state.sees ? "Attach images, text or code" : "Attach text or code (this model can't see images)"}
        onClick=${() => chooser.current.click()}>+</button>
      <${Box} id="message" aria-label="Your message" placeholder="Ask something" value=${text} onText=${write} onKeyDown=${onKey} focus />
      ${busy
        ? html`<button type="button" onClick=${() => (stop(last), back())}>Stop</button>`
        : html`<button type="submit" disabled=${!ready}>Send</button>`}
    </div>
    <${Context} chat=${chat} length=${text.length + attached.reduce((sum, file) => sum + (files.isImage(file) ? 0 : file.size), 0)} />
  </form>`;
}
