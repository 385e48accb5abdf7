// The conversations at the left: found, named, pinned, deleted, taken in.

import { useRef, useState } from "./vendor/hooks.js";
import * as store from "./chats.js";
import { Failure, html, plural } from "./ui.js";

function Conversation({ chat, isCurrent, onOpen }) {
  const [name, setName] = useState(null);
  const title = chat.title || "New chat";
  const rename = (event) => {
    event.preventDefault();
    if (name.trim()) chat.title = name.trim();
    setName(null);
    store.save(chat);
  };
  const pin = () => ((chat.pinned = !chat.pinned), store.save(chat));
  const remove = () => confirm(`Delete “${title}”?`) && store.remove(chat);
  if (name !== null) {
    return html`<li><form class="rename" onSubmit=${rename} onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), setName(null))}>
      <input aria-label="Name of the chat" value=${name} maxlength="200" ref=${(box) => box && document.activeElement !== box && box.select()}
        onInput=${(event) => setName(event.target.value)} onBlur=${() => setName(null)} />
    </form></li>`;
  }
  return html`<li>
    <button type="button" class="link" aria-current=${isCurrent} title=${title} onClick=${onOpen}>${chat.pinned && html`<span title="Pinned">★ </span>`}${title}</button>
    ${isCurrent && chat.leaf !== null && html`<p class="actions">
      <button type="button" class="small" aria-label="Rename ${title}" onClick=${() => setName(title)}>Rename</button>
      <button type="button" class="small" aria-label="Pin ${title}" aria-pressed=${Boolean(chat.pinned)} onClick=${pin}>${chat.pinned ? "Unpin" : "Pin"}</button>
      <button type="button" class="small" aria-label="Delete ${title}" onClick=${remove}>Delete</button></p>`}
  </li>`;
}

export function Conversations({ chat, onClose }) {
  const [words, setWords] = useState("");
  const [told, setTold] = useState(null);
  const chooser = useRef(null);
  const found = store.listed(words);
  const used = Math.round(100 * store.stored());
  const choose = (act) => () => (act(), setTold(null), onClose());
  const take = async ({ target }) => {
    const [file] = target.files;
    setTold(null);
    try {
      const { imported } = await import("./transfer.js");
      const count = await imported(file);
      setTold({ text: `${plural(count, "chat")} imported.` });
    } catch (error) {
      setTold({ failed: `${file.name}: ${error.message}` });
    }
    target.value = "";
  };
  const everything = async () => (await import("./transfer.js")).download(store.listed().filter((each) => each.leaf !== null));
  const clear = () => confirm(`Delete all ${plural(store.chats.size, "chat")}? This can't be undone.`) && [...store.chats.values()].forEach(store.remove);
  return html`<nav class="conversations" aria-label="Conversations">
    <header class="only-narrow"><h2>Chats</h2><button type="button" class="icon" aria-label="Close the chats" onClick=${onClose}>×</button></header>
    <button type="button" class="wide-button" onClick=${choose(store.newChat)}>New chat</button>
    <input type="search" id="search" aria-label="Search the chats" placeholder="Search" value=${words} onInput=${(event) => setWords(event.target.value)} />
    <ul>${found.map((each) => html`<${Conversation} key=${each.id} chat=${each} isCurrent=${each === chat} onOpen=${choose(() => store.open(each))} />`)}
      ${!found.length && html`<li class="hint">No chat has these words.</li>`}</ul>
    <div class="keeping">
      ${told?.failed ? html`<${Failure}>${told.failed}<//>` : html`<p role="status">${told?.text}</p>`}
      <input type="file" hidden accept=".json,application/json" aria-label="Exported chats" ref=${chooser} onChange=${take} />
      <p class="actions"><button type="button" class="small" onClick=${() => chooser.current.click()}>Import</button>
        <button type="button" class="small" onClick=${everything}>Export all</button>
        <button type="button" class="small" onClick=${clear}>Delete all</button></p>
      <p class="hint">Kept in this browser alone, for the address ${location.host}. Another browser or address doesn't have these chats.
        ${" "}${used > 0 ? `${used}% of its storage for texts is used.` : ""}</p>
    </div>
  </nav>`;
}
