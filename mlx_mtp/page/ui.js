// Small parts that every view uses.

import { h } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);

const formats = new Map();
export function number(value, digits = 0) {
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat("en", options));
  return formats.get(digits).format(value);
}
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export function bytes(count) {
  if (count < 1000) return `${count} B`;
  const power = count >= 1e9 ? 9 : count >= 1e6 ? 6 : 3;
  return `${number(count / 10 ** power, power === 9 ? 2 : 1)} ${{ 3: "KB", 6: "MB", 9: "GB" }[power]}`;
}
export function seconds(value) {
  if (value < 60) return `${number(value, value < 10 ? 2 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function useRedraw(subscribe) {
  const [, redraw] = useState(0);
  useEffect(() => subscribe(() => redraw((count) => count + 1)), []);
}

/** The clipboard is for pages that came from this machine or over TLS; elsewhere one selects. */
export function Copy({ text, name = "Copy" }) {
  const [done, setDone] = useState(false);
  if (!navigator.clipboard) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="small" type="button" onClick=${copy}>${done ? "Copied" : name}</button>`;
}

export function Failure({ children }) {
  return html`<p class="failure" role="alert">${children}</p>`;
}
