// The messages of a conversation, and what one can do with each.

import { useEffect, useState } from "./vendor/hooks.js";
import { MOST_ANSWERS, state } from "./api.js";
import * as asking from "./asking.js";
import * as store from "./chats.js";
import { Code } from "./code.js";
import { Attached, BOX, Box } from "./composer.js";
import { Drafts } from "./drafts.js";
import { Markdown } from "./markdown.js";
import { settingOf } from "./settings.js";
import { useTyped } from "./typed.js";
import { Copy, Failure, html, number, percent } from "./ui.js";

const { view } = store;

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
    ${node.made && html`<span>${node.made}</span>`}
    <span>seed ${node.seed}${" "}${chat.settings.seed === String(node.seed)
      ? "(in use)"
      : html`<button type="button" class="link" onClick=${reuse}>use again</button>`}</span>
  </p>`;
}

function Calls({ chat, node, isLast }) {
  const [results, setResults] = useTyped(`${node.id}.results`, []); // by the call's index
  const send = (event) => {
    event.preventDefault();
    setResults([]);
    asking.reply(chat, node, node.calls.map((_, index) => results[index]));
  };
  const write = (index) => (text) => setResults(node.calls.map((_, each) => (each === index ? text : results[each] ?? "")));
  const waits = isLast && node.state === "done";
  return html`<form class="calls" onSubmit=${send}>
    ${node.calls.map((call, index) => html`<div class="call">
      <p>The model calls <code>${call.name}</code> with</p>
      <${Code} text=${pretty(call.text)} name="arguments" lang="json" />
      ${waits && html`<label>Its result <${Box} required value=${results[index] ?? ""} onText=${write(index)} /></label>`}
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
function waiting({ state: at, progress, model }) {
  if (progress) return `${number(progress.processed)} of ${number(progress.total)} tokens of the prompt are computed.`;
  const loaded = state.states?.[state.models.indexOf(model)];
  return at === "sent" && ["on disk", "loading"].includes(loaded) ? `${model} is being loaded into memory.` : WAITING[at];
}

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

/** A message's text to be changed; it is kept until it is sent, as everything typed. */
function Edit({ chat, node, text, onText }) {
  const end = () => (onText(null), document.querySelector(BOX)?.focus());
  const send = (event) => {
    event.preventDefault();
    end();
    if (text.trim() && text !== node.content) asking.edit(chat, node, text);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
    if (event.key === "Escape" && !event.isComposing) (event.stopPropagation(), end());
  };
  return html`<form class="message ${node.role}" onSubmit=${send} onKeyDown=${onKey}>
    <label>${node.role === "user" ? "Ask this instead, in a branch of its own" : "The answer as it should be, in a branch of its own"}
      <${Box} value=${text} onText=${onText} focus /></label>
    <p class="actions"><button type="submit">${node.role === "user" ? "Send" : "Keep"}</button><button type="button" onClick=${end}>Cancel</button></p>
  </form>`;
}

function useEdit(node) {
  const [text, setText] = useTyped(`${node.id}.edit`, null);
  useEffect(() => {
    if (view.edit !== node.id) return;
    view.edit = null;
    setText(text ?? node.content);
  });
  return [text, setText];
}

function Delete({ chat, node }) {
  const ask = () => confirm("Delete this message and those that follow it?") && store.cut(chat, node);
  return html`<button type="button" class="small" onClick=${ask}>Delete</button>`;
}

export function Question({ chat, node, isLast }) {
  const [text, setText] = useEdit(node);
  if (text !== null) return html`<${Edit} chat=${chat} node=${node} text=${text} onText=${setText} />`;
  return html`<article class="message ${node.role}">
    <h2>${node.role === "tool" ? `Result of ${node.name}` : "You"}</h2>
    ${node.files?.length > 0 && html`<div class="files">${node.files.map((file) => html`<${Attached} key=${file.id} file=${file} />`)}</div>`}
    ${node.content && html`<div class="said">${node.content}</div>`}
    <p class="actions"><${Branches} chat=${chat} node=${node} />
      ${node.role === "user" && html`<button type="button" class="small" onClick=${() => setText(node.content)}>Edit</button>`}
      ${isLast && html`<button type="button" class="small" onClick=${() => asking.answer(chat, node)}>Answer</button>`}
      ${node.content && html`<${Copy} text=${node.content} />`}<${Delete} chat=${chat} node=${node} /></p>
  </article>`;
}

export function Answer({ chat, node, isLast, onSettings }) {
  const [text, setText] = useEdit(node);
  const [raw, setRaw] = useState(false);
  if (text !== null) return html`<${Edit} chat=${chat} node=${node} text=${text} onText=${setText} />`;
  const live = store.running.has(node.id);
  const traced = node.steps?.length > 0;
  const cut = asking.isCut(chat, node);
  const button = (name, act) => html`<button type="button" class="small" onClick=${act}>${name}</button>`;
  return html`<article class="message assistant" aria-busy=${live}>
    <h2>${node.model ?? state.model ?? "The model"}${node.edited && " (edited by you)"}</h2>
    ${live && waiting(node) && html`<p class="hint waiting">${waiting(node)}</p>`}
    ${raw ? html`<pre class="raw" tabindex="0">${node.reasoning && `${node.reasoning}\n\n`}${node.content}</pre>`
      : view.drafts && traced
        ? html`<${Drafts} steps=${node.steps} />`
        : html`${node.reasoning && html`<details class="reasoning" open=${live && !node.content}>
              <summary>Reasoning</summary><${Markdown} text=${node.reasoning} /></details>`}
            ${node.content && html`<${Markdown} text=${node.content} />`}`}
    ${view.drafts && !traced && !live && !node.edited && node.state !== "failed" && html`<p class="hint">The drafts of this answer are not kept.
      ${" "}<button type="button" class="link" onClick=${() => asking.again(chat, node, node.seed)}>Ask again with its seed</button></p>`}
    ${node.calls.length > 0 && html`<${Calls} chat=${chat} node=${node} isLast=${isLast} />`}
    ${node.state === "failed" && html`<${Failure}>${node.error}
      ${settingOf(node.param) && html`${" "}<button type="button" class="link" onClick=${onSettings}>Open the settings</button>`}<//>`}
    ${node.finish === "length" && html`<p class="hint">Cut by the limit of tokens: Max tokens in the settings, or the context.</p>`}
    ${node.state === "stopped" && html`<p class="hint">Stopped.</p>`}
    ${!live && ["sent", "queued", "streaming"].includes(node.state) && html`<p class="hint">It is not finished: the page was closed meanwhile, or another tab reads it.</p>`}
    <${Figures} chat=${chat} node=${node} />
    <p class="actions"><${Branches} chat=${chat} node=${node} />
      ${live
        ? html`<button type="button" onClick=${() => asking.stop(node)}>Stop</button>`
        : html`${cut && isLast && html`<button type="button" onClick=${() => asking.goOn(chat, node)}>Continue</button>`}
          ${button(node.state === "failed" ? "Try again" : "Regenerate", () => asking.again(chat, node))}
          ${button("with other settings", onSettings)}
          ${button("Edit", () => setText(node.content))}
          ${node.content && html`<${Copy} text=${node.content} name="Copy as Markdown" />
            <button type="button" class="small" aria-pressed=${raw} onClick=${() => setRaw(!raw)}>Raw text</button>`}
          <${Delete} chat=${chat} node=${node} />`}</p>
  </article>`;
}
