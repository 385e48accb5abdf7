// How to point other programs at this server.

import { useEffect, useState } from "./vendor/hooks.js";
import { api, state } from "./api.js";
import { Code } from "./code.js";
import { Failure, html } from "./ui.js";

export function Clients() {
  const [clients, setClients] = useState(null);
  const [failed, setFailed] = useState(null);
  const [name, setName] = useState(null);
  useEffect(() => {
    api("/clients").then((found) => found.json()).then(setClients).catch((error) => setFailed(error.message));
  }, [state.lost]);
  if (!clients) return html`<div class="clients">${failed ? html`<${Failure}>${failed}<//>` : html`<p class="hint">Loading…</p>`}</div>`;
  const chosen = clients.find((each) => each.name === name) ?? clients[0];
  // The server can't know whether a proxy before it speaks TLS.
  const text = chosen.text.replaceAll(`http://${location.host}`, location.origin);
  return html`<div class="clients">
    <dl><dt>Address (OpenAI)</dt><dd><${Code} text="${location.origin}/v1" /></dd>
      <dt>Address (Anthropic, Ollama)</dt><dd><${Code} text=${location.origin} /></dd>
      <dt>Model</dt><dd><${Code} text=${state.model ?? ""} /></dd></dl>
    <div class="names" role="group" aria-label="Client">${clients.map((each) => html`<button type="button" key=${each.name}
      aria-pressed=${each === chosen} onClick=${() => setName(each.name)}>${each.name}</button>`)}</div>
    <${Code} text=${text} name=${chosen.name} />
    <p>On this machine <code>mlx-mtp connect ${chosen.name}</code> shows the same, and with <code>--write</code> changes the client's own file where it has one.</p>
  </div>`;
}
