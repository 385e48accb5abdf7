// Formulas between $, $$, \( \) and \[ \]: found as parts of Markdown, set by KaTeX.

import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
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
  const [, rest] = /^([ \t]*(?:\n|$))?/.exec(part.slice(end + 2));
  const text = part.slice(begin.length, end);
  if (rest === undefined || !text.trim() || text.includes("`")) return undefined;
  return { type: "math", raw: part.slice(0, end + 2) + rest, text, display: true, open: !rest.endsWith("\n") };
}

function startOfBlock(src) {
  const blank = src.search(BLANK);
  const found = OPENS.exec(blank < 0 ? src : src.slice(0, blank));
  return found ? found.index + 1 : undefined;
}

function startOfInline(src) {
  const found = /\$|\\[([]/.exec(src);
  return found?.index;
}

export const extensions = {
  block: [(src) => blockMath(src)], startBlock: [(src) => startOfBlock(src)],
  inline: [(src, tokens) => inlineMath(src, tokens)], startInline: [(src) => startOfInline(src)],
};

let katex = null;
let coming = null;
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

/** A formula; its source where KaTeX can't read it, or until KaTeX has come. */
export function Formula({ text, raw, display }) {
  const place = useRef(null);
  const [ready, setReady] = useState(katex !== null);
  const [failed, setFailed] = useState(null);
  useEffect(() => {
    if (!ready) (coming ??= load()).then(() => setReady(true), () => (coming = null));
  }, [ready]);
  useLayoutEffect(() => {
    if (!ready) return;
    try {
      if (text.length > MOST_CHARACTERS) throw new Error("This formula is too long.");
      const made = document.createElement("span");
      katex.render(text, made, { ...OPTIONS, displayMode: display });
      if (depth(made) > MOST_DEPTH) throw new Error("This formula is nested too deeply.");
      place.current.replaceChildren(made);
      setFailed(null);
    } catch (error) {
      setFailed(error.message);
    }
  }, [text, display, ready]);
  if (!ready || failed) return html`<code key="source" class="formula" title=${failed}>${raw.trim()}</code>`;
  return display ? html`<div key="set" class="wide" tabindex="0" role="math" ref=${place}></div>` : html`<span key="set" class="formula" ref=${place}></span>`;
}
