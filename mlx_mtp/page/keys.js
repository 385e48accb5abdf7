// What keys do, and the list of it.

import { useEffect, useRef } from "./vendor/hooks.js";
import { BOX } from "./composer.js";
import { html } from "./ui.js";

const COMMAND = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
const KEYS = [
  ["Enter", "Send"], ["Shift Enter", "A new line"], ["Esc", "Stop the answer, or close what is open"],
  ["↑", "Edit the last question, where the box is empty"], [`${COMMAND} Enter`, "Send an edited message"],
  [`${COMMAND} Shift O`, "A new chat"], [`${COMMAND} K`, "Search the chats"], ["?", `This list; ${COMMAND} / while typing`],
];

/** The list of shortcuts, a dialog that is open while it is rendered. */
export function Shortcuts({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} aria-labelledby="shortcuts" onClose=${onClose} onClick=${(event) => event.target === dialog.current && onClose()}>
    <header><h2 id="shortcuts">Shortcuts</h2><button type="button" class="icon" aria-label="Close" onClick=${onClose}>×</button></header>
    <dl>${KEYS.map(([keys, does]) => html`<dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${does}</dd>`)}</dl>
  </dialog>`;
}

const isTyping = ({ tagName, type }) => tagName === "TEXTAREA" || tagName === "SELECT" || (tagName === "INPUT" && !["checkbox", "file"].includes(type));

/** Listen for keys: `act` has what to do for each of `list`, `create`, `search` and `escape`. */
export function useKeys(act) {
  const now = useRef(act);
  now.current = act;
  useEffect(() => {
    const press = (event) => {
      if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
      const { key, target, altKey } = event, command = event.ctrlKey || event.metaKey;
      const does = command
        ? { "/": "list", "?": "list", k: "search", O: event.shiftKey && "create", o: event.shiftKey && "create" }[key]
        : key === "Escape" ? target.type !== "search" && "escape" : key === "?" && !isTyping(target) && "list";
      if (does) {
        if (now.current[does]() !== false) event.preventDefault();
      } else if (!command && !altKey && key.length === 1 && key !== " " && !isTyping(target)) document.querySelector(BOX)?.focus();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}
