// The chat: conversations at the left, messages, what to write, and settings.

import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { MOST_ANSWERS, changed, onChange, state } from "./api.js";
import * as store from "./chats.js";
import { Drafts } from "./drafts.js";
import { Markdown } from "./markdown.js";
import { Code, Copy, Failure, html, number, percent, useRedraw } from "./ui.js";

const { view } = store;

function open(chat) {
  view.id = chat.id;
  changed();
}

function Conversations({ chat, onClose }) {
  const chats = store.sorted().filter((each) => each.leaf !== null || each === chat);
  const remove = (each) => confirm(`Delete “${each.title || "New chat"}”?`) && store.remove(each);
  const choose = (act) => () => (act(), onClose());
  return html`<nav class="conversations" aria-label="Conversations">
    <button type="button" class="wide-button" onClick=${choose(store.newChat)}>New chat</button>
    <ul>${chats.map((each) => html`<li key=${each.id}>
      <button type="button" class="link" aria-current=${each === chat} onClick=${choose(() => open(each))}>${each.title || "New chat"}</button>
      ${each.leaf !== null && html`<button type="button" class="icon" aria-label="Delete ${each.title}" onClick=${() => remove(each)}>×</button>`}
    </li>`)}</ul>
    <p class="hint">Kept in this browser alone.</p>
  </nav>`;
}

function Setting({ setting, chat, problem }) {
  const { name, label, kind, help, step, choices } = setting;
  const [own, setOwn] = useState(null);
  const value = chat.settings[name] ?? "";
  const id = `setting-${name}`;
  const write = (event) => {
    chat.settings = { ...chat.settings, [name]: event.target.value };
    setOwn(null);
    store.save(chat);
  };
  const check = () => {
    try {
      store.parsedJson(setting, value);
    } catch (error) {
      setOwn(error.message);
    }
  };
  const shared = { id, value, onInput: write, "aria-describedby": `${id}-help`, "aria-invalid": Boolean(own ?? problem) };
  const field = kind === "choice"
    ? html`<select ...${shared}>${Object.entries(choices).map(([key, text]) => html`<option value=${key} selected=${key === String(value)}>${text}</option>`)}</select>`
    : kind
      ? html`<textarea ...${shared} rows="3" spellcheck=${kind === "text"} class=${kind} onBlur=${kind === "json" && check}></textarea>`
      : html`<input ...${shared} type="number" step=${step} placeholder="default" />`;
  return html`<div class="setting ${kind ?? "number"}">
    <label for=${id}>${label}</label>${field}
    <small id="${id}-help">${help}</small>
    ${(own ?? problem) && html`<${Failure}>${own ?? problem}<//>`}
  </div>`;
}

function Settings({ chat, onClose }) {
  const failed = store.path(chat).at(-1);
  const name = failed?.state === "failed" ? store.settingOf(failed.param) : null;
  const key = (setting) => `${chat.id} ${setting.name}`;
  return html`<aside class="settings" aria-label="Settings of this chat">
    <header><h2>Settings</h2><button type="button" class="icon" aria-label="Close the settings" onClick=${onClose}>×</button></header>
    ${store.offered().map((setting) => html`<${Setting} key=${key(setting)} setting=${setting} chat=${chat}
      problem=${setting.name === name ? failed.error : null} />`)}
  </aside>`;
}

function Figures({ chat, node }) {
  const t = node.timings;
  if (!t) return null;
  const reuse = () => {
    chat.settings = { ...chat.settings, seed: String(node.seed) };
    store.save(chat);
  };
  return html`<p class="figures">
    <span><b>${number(t.predicted_per_second, 1)}</b> tokens/s</span>
    <span>first token after <b>${number(node.first ?? t.prompt_ms / 1000, 2)} s</b></span>
    <span><b>${t.cache_n}</b> of ${t.cache_n + t.prompt_n} prompt tokens cached</span>
    <span>${t.draft_n ? html`<b>${t.draft_n_accepted}</b> of ${t.draft_n} drafts accepted (${percent(t.draft_n_accepted, t.draft_n)})` : "no drafts"}</span>
    <span>seed ${node.seed}${" "}${chat.settings.seed === String(node.seed)
      ? "(in use)"
      : html`<button type="button" class="link" onClick=${reuse}>use again</button>`}</span>
  </p>`;
}

function Calls({ chat, node, isLast }) {
  const [results, setResults] = useState({}); // by the call's index
  const send = (event) => {
    event.preventDefault();
    store.reply(chat, node, node.calls.map((_, index) => results[index]));
  };
  const write = (index) => (event) => setResults({ ...results, [index]: event.target.value });
  const waits = isLast && node.state === "done";
  return html`<form class="calls" onSubmit=${send}>
    ${node.calls.map((call, index) => html`<div class="call">
      <p>The model calls <code>${call.name}</code> with</p>
      <${Code} text=${pretty(call.text)} name="arguments" />
      ${waits && html`<label>Its result <textarea rows="2" required value=${results[index] ?? ""} onInput=${write(index)}></textarea></label>`}
    </div>`)}
    ${waits && html`<button type="submit">Send ${node.calls.length > 1 ? "the results" : "the result"}</button>`}
  </form>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const WAITING = {
  queued: `${MOST_ANSWERS} answers are running in this browser; this one waits for one of them to end.`,
  sent: "Sent. The server computes the prompt, or other requests are before this one.",
};
const waiting = ({ state, progress }) =>
  progress ? `${number(progress.processed)} of ${number(progress.total)} tokens of the prompt are computed.` : WAITING[state];

function Branches({ chat, node }) {
  const all = store.siblings(chat, node);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  const go = (by) => () => store.show(chat, all[at + by]);
  return html`<span class="branches">
    <button type="button" class="icon" aria-label="Earlier version" disabled=${at === 0} onClick=${go(-1)}>‹</button>
    ${at + 1} of ${all.length}
    <button type="button" class="icon" aria-label="Later version" disabled=${at === all.length - 1} onClick=${go(1)}>›</button>
  </span>`;
}

function Question({ chat, node }) {
  const [text, setText] = useState(null);
  if (text === null) {
    return html`<article class="message ${node.role}">
      <h3>${node.role === "tool" ? `Result of ${node.name}` : "You"}</h3>
      <div class="said">${node.content}</div>
      <p class="actions"><${Branches} chat=${chat} node=${node} />
        ${node.role === "user" && html`<button type="button" class="small" onClick=${() => setText(node.content)}>Edit</button>`}
        <${Copy} text=${node.content} /></p>
    </article>`;
  }
  const send = (event) => {
    event.preventDefault();
    setText(null);
    if (text.trim()) store.edit(chat, node, text);
  };
  return html`<form class="message user" onSubmit=${send}>
    <label>Ask this instead, in a branch of its own
      <textarea rows="4" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
    <p class="actions"><button type="submit">Send</button><button type="button" onClick=${() => setText(null)}>Cancel</button></p>
  </form>`;
}

function Answer({ chat, node, isLast, onSettings }) {
  const live = store.running.has(node.id);
  const traced = node.steps?.length > 0;
  return html`<article class="message assistant" aria-busy=${live}>
    <h3>${state.model ?? "The model"}</h3>
    ${live && waiting(node) && html`<p class="hint waiting">${waiting(node)}</p>`}
    ${view.drafts && traced
      ? html`<${Drafts} steps=${node.steps} />`
      : html`${node.reasoning && html`<details class="reasoning" open=${live && !node.content}>
            <summary>Reasoning</summary><${Markdown} text=${node.reasoning} /></details>`}
          ${node.content && html`<${Markdown} text=${node.content} />`}`}
    ${view.drafts && !traced && !live && node.state !== "failed" && html`<p class="hint">The drafts of this answer are not kept.
      ${" "}<button type="button" class="link" onClick=${() => store.again(chat, node, node.seed)}>Ask again with its seed</button></p>`}
    ${node.calls.length > 0 && html`<${Calls} chat=${chat} node=${node} isLast=${isLast} />`}
    ${node.state === "failed" && html`<${Failure}>${node.error}
      ${store.settingOf(node.param) && html`${" "}<button type="button" class="link" onClick=${onSettings}>Open the settings</button>`}<//>`}
    ${node.finish === "length" && html`<p class="hint">It ends here because it has as many tokens as it may.</p>`}
    ${node.state === "stopped" && html`<p class="hint">Stopped.</p>`}
    ${!live && ["sent", "queued", "streaming"].includes(node.state) && html`<p class="hint">It is not finished: the page was closed meanwhile, or another tab reads it.</p>`}
    <${Figures} chat=${chat} node=${node} />
    <p class="actions"><${Branches} chat=${chat} node=${node} />
      ${live
        ? html`<button type="button" onClick=${() => store.stop(node)}>Stop</button>`
        : html`<button type="button" class="small" onClick=${() => store.again(chat, node)}>${node.state === "failed" ? "Try again" : "Regenerate"}</button>`}
      ${node.content && html`<${Copy} text=${node.content} />`}</p>
  </article>`;
}

function Composer({ chat }) {
  const [text, setText] = useState("");
  const last = store.path(chat).at(-1);
  const busy = last !== undefined && store.running.has(last.id);
  const send = (event) => {
    event.preventDefault();
    if (busy || !text.trim()) return;
    setText("");
    store.ask(chat, text);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea rows="2" aria-label="Your message" placeholder="Ask something. Enter sends, Shift+Enter begins a new line."
      value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    ${busy
      ? html`<button type="button" onClick=${() => store.stop(last)}>Stop</button>`
      : html`<button type="submit" disabled=${!text.trim()}>Send</button>`}
  </form>`;
}

function download(chat) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(store.exported(chat));
  link.download = `${chat.title.replace(/[^\w -]+/g, "").trim() || "chat"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function Chat() {
  useRedraw(onChange);
  const [panel, setPanel] = useState(null); // on a phone: which side covers the messages
  const bottom = useRef(null);
  const chat = store.current();
  const nodes = store.path(chat);
  const toggle = (name) => setPanel(panel === name ? null : name);
  const size = nodes.at(-1)?.steps?.length ?? nodes.length;
  useEffect(() => {
    bottom.current.scrollTop = bottom.current.scrollHeight; // A question may be longer than the screen.
  }, [chat.id, nodes.length]);
  useEffect(() => {
    const list = bottom.current;
    // Follow an answer as it grows, but not away from what somebody reads further up.
    if (list.scrollHeight - list.scrollTop - list.clientHeight < 200) list.scrollTop = list.scrollHeight;
  }, [size]);
  const drafts = () => {
    view.drafts = !view.drafts;
    localStorage.setItem("mlx-mtp.drafts", view.drafts ? "1" : "0");
    changed();
  };
  return html`<div class="chat" data-panel=${panel ?? "none"}>
    <${Conversations} chat=${chat} onClose=${() => setPanel(null)} />
    <section class="talk" aria-label="Conversation">
      <div class="tools">
        <button type="button" class="only-narrow" aria-expanded=${panel === "chats"} onClick=${() => toggle("chats")}>Chats</button>
        <label class="switch"><input type="checkbox" role="switch" checked=${view.drafts} onChange=${drafts} /> Show the drafts</label>
        ${chat.leaf !== null && html`<button type="button" onClick=${() => download(chat)}>Export</button>`}
        <button type="button" aria-expanded=${panel === "settings"} onClick=${() => toggle("settings")}>Settings</button>
      </div>
      <div class="messages" ref=${bottom} tabindex="0" role="log" aria-label="Messages" aria-live="off">
        ${nodes.length === 0 && html`<div class="empty"><h2>Ask ${state.model ?? "the model"} something</h2>
          <p>“Show the drafts” colours an answer by where its tokens came from: drawn by the model, or drafted and accepted. The answer is the same either way.</p></div>`}
        ${nodes.map((node, index) => node.role === "assistant"
          ? html`<${Answer} key=${node.id} chat=${chat} node=${node} isLast=${index === nodes.length - 1} onSettings=${() => setPanel("settings")} />`
          : html`<${Question} key=${node.id} chat=${chat} node=${node} />`)}
      </div>
      <p role="status" class="unseen">${{ done: "The answer is complete.", streaming: "The model answers." }[nodes.at(-1)?.state]}</p>
      ${view.problem && html`<${Failure}>${view.problem}<//>`}
      <${Composer} key=${chat.id} chat=${chat} />
    </section>
    ${panel === "settings" && html`<${Settings} chat=${chat} onClose=${() => setPanel(null)} />`}
  </div>`;
}
