// Formulas between $, $$, \( \) and \[ \]: found as parts of Markdown, set by KaTeX.

import { useLayoutEffect, useRef } from "./vendor/hooks.js";
import { html } from "./ui.js";

const MOST_CHARACTERS = 4000;
const MOST_DEPTH = 300; // of elements: browsers fail at some thousands
// `trust` off: nothing is linked, fetched or given an attribute. Each formula has macros of its own.
const OPTIONS = { trust: false, strict: "ignore", throwOnError: true, maxSize: 20, maxExpand: 300, errorColor: "currentcolor" };

// A dollar is a price beside a space inside, or where a digit or a letter follows; code is no formula.
const BETWEEN = /^(?:\$\$((?:\\[^]|[^\\$`])+)\$\$|\$(?![\s$])((?:\\.|[^\\$\n`])+?)(?<!\s)\$(?![\w$])|\\\(((?:\\[^)]|[^\\`])+?)\\\)|\\\[((?:\\[^\]]|[^\\`])+?)\\\])/;
const PRICE = /^[\d.,]+(?:\s*[-–/]|[\s.,;:]+[A-Za-z]{2})/;
const OPENS = /\n {0,3}(?:\$\$|\\\[)/;
const BLANK = /\n[ \t]*\n/;

function inlineMath(src, tokens) {
  if (src[0] !== "$" && src[0] !== "\\") return undefined;
  const [raw, display, inline, round, square] = BETWEEN.exec(src) ?? [];
  if (!raw || (inline && (PRICE.test(inline) || /\w$/.test(tokens.at(-1)?.raw ?? "")))) return undefined;
  return { type: "math", raw, text: display ?? inline ?? round ?? square, display: (display ?? square) !== undefined };
}

/** A formula with lines of its own; until its end or a blank line comes, all that follows is of it. */
function blockMath(src) {
  const [begin, open] = /^ {0,3}(\$\$|\\\[)/.exec(src) ?? [];
  if (!open) return undefined;
  const blank = src.search(BLANK), close = open === "$$" ? "$$" : "\\]";
  const part = blank < 0 ? src : src.slice(0, blank + 1);
  const end = part.indexOf(close, begin.length);
  if (end < 0) return blank < 0 ? { type: "unread", raw: src, open: true } : undefined;
  const [rest] = /^[ \t]*(?:\n|$)/.exec(part.slice(end + 2)) ?? [];
  const text = part.slice(begin.length, end);
  if (rest === undefined || !text.trim() || text.includes("`")) return undefined;
  return { type: "math", raw: part.slice(0, end + 2) + rest, text, display: true, open: !rest.endsWith("\n") };
}

function startOfBlock(src) {
  const blank = src.search(BLANK);
  const found = OPENS.exec(blank < 0 ? src : src.slice(0, blank));
  return found ? found.index + 1 : undefined;
}

export const extensions = {
  block: [(src) => blockMath(src)], startBlock: [(src) => startOfBlock(src)],
  inline: [(src, tokens) => inlineMath(src, tokens)], startInline: [(src) => /\$|\\[([]/.exec(src)?.index],
};

let katex = null, coming = null;
async function load() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = "/page/vendor/katex.css";
  const styled = new Promise((done) => (style.onload = style.onerror = done));
  document.head.append(style);
  await Promise.all([import("./vendor/katex.js"), styled]);
  katex = globalThis.katex;
}

function depth(root) {
  let found = 0;
  for (let level = [root]; level.length && found <= MOST_DEPTH; found++) level = level.flatMap((each) => [...each.children]);
  return found;
}

const MOST_MS = 6; // of a frame: formulas beyond these are set in the next ones
const waiting = [];
let spent = 0, frame = 0;
function inTurn(...works) {
  waiting.push(...works);
  for (const began = performance.now() - spent; waiting.length && spent < MOST_MS; spent = performance.now() - began) waiting.shift()();
  if (works.length || waiting.length) frame ||= requestAnimationFrame(() => ((spent = frame = 0), inTurn()));
}

/** A formula as KaTeX sets it; its source, with the reason, where KaTeX can't read it. */
function made(text, raw, displayMode) {
  const root = document.createElement("span");
  try {
    if (text.length > MOST_CHARACTERS) throw new Error("This formula is too long.");
    katex.render(text, root, { ...OPTIONS, displayMode });
    if (depth(root) > MOST_DEPTH) throw new Error("This formula is nested too deeply.");
    return root;
  } catch ({ message }) {
    return Object.assign(document.createElement("code"), { textContent: raw.trim(), title: message });
  }
}

/** A formula; its source until it is set. */
export function Formula({ text, raw, display }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    const set = () => place.current?.replaceChildren(made(text, raw, display));
    if (katex) inTurn(set);
    else (coming ??= load()).then(() => inTurn(set), () => (coming = null));
  }, [text, display]);
  const source = html`<code>${raw.trim()}</code>`;
  return display ? html`<div class="wide" tabindex="0" role="math" ref=${place}>${source}</div>` : html`<span class="formula" ref=${place}>${source}</span>`;
}
