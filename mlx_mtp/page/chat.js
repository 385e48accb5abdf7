// The chat: conversations at the left, messages, what to write, and settings.

import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { changed, onChange, state } from "./api.js";
import { again, stop } from "./asking.js";
import * as store from "./chats.js";
import { BOX, Composer, isTouched } from "./composer.js";
import { Shortcuts, useKeys } from "./keys.js";
import { Answer, Question } from "./messages.js";
import { Settings } from "./settings.js";
import { Conversations } from "./sidebar.js";
import { Failure, html, useRedraw } from "./ui.js";

const { view } = store;
const FOLLOWED = 200; // pixels from the end

const EXAMPLES = ["Explain how a rainbow forms, with the formula for its angle.", "Write a Python function that merges two sorted lists.", "Draft a short, polite reminder about an unpaid bill."];

function Empty() {
  const begin = (text) => ((view.fill = text), changed());
  return html`<div class="empty"><h2>Ask ${state.model ?? "the model"} something</h2>
    <p>Write below${isTouched ? "; + attaches" : ", or drop"} ${state.sees ? "a picture, a text or code" : "a text or code"}${isTouched ? "" : " onto this page"}.</p>
    <ul class="examples">${EXAMPLES.map((text) => html`<li><button type="button" onClick=${() => begin(text)}>${text}</button></li>`)}</ul>
    <p class="hint">The model runs on the server's machine, and chats are kept in this browser.${!isTouched && html`${" "}<kbd>?</kbd> lists the shortcuts.`}</p></div>`;
}

function More({ chat, onKeys }) {
  const menu = useRef(null);
  const close = (act) => () => (menu.current.hidePopover(), act());
  const withTransfer = (act) => close(async () => act(await import("./transfer.js")));
  return html`<button type="button" popovertarget="more" aria-label="More">⋯</button>
    <div id="more" class="menu" popover ref=${menu}>
      ${chat.leaf !== null && html`<button type="button" onClick=${withTransfer(({ download }) => download([chat]))}>Export</button>
        ${navigator.clipboard && html`<button type="button" onClick=${withTransfer(({ asMarkdown }) => navigator.clipboard.writeText(asMarkdown(chat)))}>Copy all as Markdown</button>`}`}
      <button type="button" onClick=${close(onKeys)}>Shortcuts</button>
    </div>`;
}

export function Chat() {
  useRedraw(onChange);
  const [panel, setPanel] = useState(null); // on a phone: which side covers the messages
  const [listing, setListing] = useState(false);
  const bottom = useRef(null);
  const chat = store.current();
  const nodes = store.path(chat);
  const last = nodes.at(-1);
  const toggle = (name) => setPanel(panel === name ? null : name);
  const close = () => (setPanel(null), isTouched || setTimeout(() => document.querySelector(BOX)?.focus()));
  const size = (last?.steps?.length ?? 0) + (last?.content.length ?? 0);
  useEffect(() => {
    bottom.current.scrollTop = bottom.current.scrollHeight; // A question may be longer than the screen.
  }, [chat.id, nodes.length]);
  useEffect(() => {
    const list = bottom.current;
    // Follow an answer as it grows, but not away from what somebody reads further up.
    if (list.scrollHeight - list.scrollTop - list.clientHeight < FOLLOWED) list.scrollTop = list.scrollHeight;
  }, [size]);
  useKeys({
    list: () => setListing(true),
    create: () => (store.newChat(), close()),
    search: () => (setPanel("chats"), setTimeout(() => document.getElementById("search").focus())),
    escape: () => (last && store.running.has(last.id) ? stop(last) : panel ? close() : false),
  });
  const drafts = () => {
    view.drafts = !view.drafts;
    localStorage.setItem("mlx-mtp.drafts", view.drafts ? "1" : "0");
    changed();
  };
  return html`<div class="chat" data-panel=${panel ?? "none"}>
    <${Conversations} chat=${chat} onClose=${close} />
    <section class="talk" aria-label="Conversation">
      <div class="tools">
        <button type="button" class="only-narrow" aria-expanded=${panel === "chats"} onClick=${() => toggle("chats")}>Chats</button>
        <label class="switch" title="Colour each token by where it came from"><input type="checkbox" role="switch" checked=${view.drafts} onChange=${drafts} /> Show the drafts</label>
        <button type="button" aria-expanded=${panel === "settings"} onClick=${() => toggle("settings")}>Settings</button>
        <${More} chat=${chat} onKeys=${() => setListing(true)} />
      </div>
      <div class="messages" ref=${bottom} tabindex="0" role="log" aria-label="Messages" aria-live="off">
        ${nodes.length === 0 && html`<${Empty} />`}
        ${nodes.map((node, index) => node.role === "assistant"
          ? html`<${Answer} key=${node.id} chat=${chat} node=${node} isLast=${index === nodes.length - 1} onSettings=${() => setPanel("settings")} />`
          : html`<${Question} key=${node.id} chat=${chat} node=${node} isLast=${node === last} />`)}
      </div>
      <p role="status" class="unseen">${{ done: "The answer is complete.", streaming: "The model answers." }[last?.state]}</p>
      ${view.problem && html`<${Failure}>${view.problem}<//>`}
      <${Composer} key=${chat.id} chat=${chat} />
    </section>
    ${panel === "settings" && html`<${Settings} chat=${chat} last=${last} onChange=${() => store.save(chat)}
      onAgain=${() => again(chat, last)} onClose=${close} />`}
    ${listing && html`<${Shortcuts} onClose=${() => (setListing(false), close())} />`}
  </div>`;
}
