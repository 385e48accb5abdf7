// The page: which view is shown, the question for the key, and whether the server answers.

import { render } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import { choose, connect, onChange, setKey, state } from "./api.js";
import { Chat } from "./chat.js";
import { Failure, html, useRedraw } from "./ui.js";

// A view that is not the chat is loaded when it is opened.
const VIEWS = {
  chat: ["Chat", Chat],
  live: ["Live", later(() => import("./live.js").then(({ Live }) => Live))],
  clients: ["Set up a client", later(() => import("./clients.js").then(({ Clients }) => Clients))],
};

function later(load) {
  let View = null;
  return function Later() {
    const [failed, setFailed] = useState(false);
    useEffect(() => {
      if (!View) load().then((found) => ((View = found), setFailed(null)), () => setFailed(true));
    }, [state.lost]);
    if (View) return html`<${View} />`;
    return failed ? html`<${Failure}>This view can't be loaded: the server does not answer.<//>` : html`<p class="hint loading">Loading…</p>`;
  };
}

function Key() {
  const [key, setOwn] = useState("");
  const send = (event) => {
    event.preventDefault();
    setKey(key.trim());
  };
  return html`<form class="ask-key" onSubmit=${send}>
    <h2>This server asks for its API key</h2>
    <label>API key <input type="password" autocomplete="off" required value=${key} onInput=${(event) => setOwn(event.target.value)} /></label>
    ${state.refused && html`<${Failure}>The server refuses this key.<//>`}
    <p class="hint">It is one of those that the server was started with (--api-key, --api-key-file), and is kept until this tab is closed.</p>
    <button type="submit">Open</button>
  </form>`;
}

function Picker() {
  return html`<select class="model" aria-label="Model" onFocus=${connect} onChange=${(event) => choose(event.target.value)}>
    ${state.models.map((each, place) => html`<option key=${each} value=${each} selected=${each === state.model}>${each} (${state.states[place]})</option>`)}
  </select>`;
}

function App() {
  useRedraw(onChange);
  const [name, setName] = useState(location.hash.slice(1));
  useEffect(() => {
    const turn = () => setName(location.hash.slice(1));
    addEventListener("hashchange", turn);
    connect();
    return () => removeEventListener("hashchange", turn);
  }, []);
  const [, View] = VIEWS[name] ?? VIEWS.chat;
  const isShown = (each) => VIEWS[each][1] === View;
  return html`
    <header class="top"><a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>Skip to the content</a>
      <h1>mlx-mtp</h1>
      ${!state.locked && html`<nav aria-label="Views">${Object.entries(VIEWS).map(([each, [label]]) =>
        html`<a key=${each} href="#${each}" aria-current=${isShown(each) ? "page" : undefined}>${label}</a>`)}</nav>
      ${state.states ? html`<${Picker} />` : html`<span class="model" title=${state.models?.join(", ")}>${state.model}</span>`}`}
    </header>
    <div role="status">${state.lost && html`<p class="notice">${state.lost} This page goes on by itself when the server is back.</p>`}</div>
    <main id="main" tabindex="0">${state.locked ? html`<${Key} />` : html`<${View} />`}</main>`;
}

document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
