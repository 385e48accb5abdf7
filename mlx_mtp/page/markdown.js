// Markdown to elements. marked finds the parts; none of their text is ever taken for HTML.

import { Lexer, walkTokens } from "./vendor/marked.js";
import { useMemo } from "./vendor/hooks.js";
import { Fragment } from "./vendor/preact.js";
import { Code } from "./code.js";
import { Formula, extensions } from "./math.js";
import { html } from "./ui.js";

const OPTIONS = { gfm: true, breaks: true, extensions };
// What exceeds one of these bounds is shown as plain text: for each level of lists, quotes or
// emphasis marked reads a text once more.
const MOST_LEVELS = 12;
const MOST_NESTED = 150_000; // characters of a nested block times its level
const MOST_CHARACTERS = 100_000; // of a block, unless it is code
// From each mark marked may search to the end of its text, so a long one is read in runs.
const MOST_STEPS = 1_000_000; // marks of a run times its characters
const MARK = /[*_~`[\]<>&\\$]|\s\s/g;
const FENCE = /^(`{3,}(?=[^`\n]*\n)|~{3,})([^\n]*)\n/;
const LINES = /(?:[^\n]*\n){1,10}|[^\n]+$/g; // parts of a text that isn't read
const MOST_INFO = 300; // characters of the line that opens a fence

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const plain = (text) => text.replace(/&(amp|lt|gt|quot|apos|nbsp|#39);/g, (_, name) => NAMED[name]);

const inner = (token) => (token.tokens ? token.tokens.map(element) : plain(token.text ?? token.raw));

function link(token) {
  const safe = /^(https?:|mailto:)/i.test(token.href);
  if (!safe) return inner(token);
  return html`<a href=${token.href} target="_blank" rel="noopener noreferrer">${inner(token)}</a>`;
}

function table(token) {
  const cell = (tag) => (each, column) => html`<${tag} class=${token.align[column] ?? ""}>${inner(each)}<//>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${token.header.map(cell("th"))}</tr></thead>
    <tbody>${token.rows.map((row) => html`<tr>${row.map(cell("td"))}</tr>`)}</tbody>
  </table></div>`;
}

function list(token) {
  const items = token.items.map((each) => html`<li>${inner(each)}</li>`);
  return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
}

/** One of several parts is a block of lines: otherwise each redraw would lay all of them out. */
const part = (children, several) => html`<span class=${several ? "run several" : "run"}>${children}</span>`;

function unread({ raw }) {
  const parts = raw.match(LINES) ?? [];
  return html`<span class="unread">${parts.map((each) => part(each, parts.length > 1))}</span>`;
}

const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };
const MAKERS = {
  link,
  table,
  list,
  space: () => null,
  def: () => null,
  hr: () => html`<hr />`,
  br: () => html`<br />`,
  code: ({ text, lang }) => html`<${Code} text=${text.replace(/\n+$/, "")} name=${lang ?? ""} />`,
  math: ({ text, raw, display }) => html`<${Formula} text=${text} raw=${raw} display=${display} />`,
  run: (token) => (token.made ??= fixed(part(token.tokens.map(element), token.several))),
  codespan: ({ text }) => html`<code>${text}</code>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  escape: ({ text }) => text,
  html: unread,
  // Nothing is fetched for an answer: an image is its description, and a link to it.
  image: (token) => link({ ...token, tokens: null, text: `[image: ${token.text || token.href}]` }),
  unread,
};

/** Preact compares a component with itself no further, so what is the same in the next redraw costs nothing. */
const fixed = (children) => html`<${Fragment}>${children}<//>`;
const block = (token) => fixed(element(token));

function element(token) {
  if (MAKERS[token.type]) return MAKERS[token.type](token);
  const tag = token.type === "heading" ? `h${Math.min(token.depth + 2, 6)}` : TAGS[token.type];
  return tag ? html`<${tag}>${inner(token)}<//>` : inner(token);
}

/** The pieces of a text that are read by themselves; where they end depends on what is before. */
function* runs(text) {
  let begin = 0, marks = 0;
  for (const { index } of text.matchAll(MARK)) {
    marks += 1;
    if (marks * (index - begin) < MOST_STEPS) continue;
    const at = Math.max(text.lastIndexOf(" ", index), text.lastIndexOf("\n", index));
    const end = at > (begin + index) / 2 ? at : index;
    yield text.slice(begin, end);
    [begin, marks] = [end, 1];
  }
  yield text.slice(begin);
}

class BoundedLexer extends Lexer {
  level = 0;

  /** `known` has the runs of the last redraw, if this one's links are the same. */
  constructor(links, known) {
    super(OPTIONS);
    Object.assign(this.tokens.links, links);
    [this.known, this.given, this.read] = [known, size(links), new Map()];
  }

  within(raw, tokens, read) {
    if (this.level > MOST_LEVELS || this.level * raw.length > MOST_NESTED) {
      this.state.top = true; // as marked leaves it
      tokens.push({ type: "unread", raw });
      return tokens;
    }
    this.level += 1;
    try {
      return read();
    } finally {
      this.level -= 1;
    }
  }

  blockTokens(text, tokens = [], last = false) {
    return this.within(text, tokens, () => super.blockTokens(text, tokens, last));
  }

  inlineTokens(text, tokens = []) {
    if (this.level > 0) return this.within(text, tokens, () => super.inlineTokens(text, tokens));
    const isKnown = size(this.tokens.links) === this.given;
    const all = [...runs(text)], several = all.length > 1;
    for (const raw of all) {
      Object.assign(this.state, { inLink: false, inRawBlock: false });
      const key = several + raw, known = isKnown && (this.read.get(key) ?? this.known.get(key));
      const run = known || { type: "run", raw, several, tokens: this.within(raw, [], () => super.inlineTokens(raw, [])) };
      if (isKnown) this.read.set(key, run);
      tokens.push(run);
    }
    return tokens;
  }
}

const size = (links) => Object.keys(links).length;

/** What a text begins with if that is a fence: its language, code and length; it may still grow. */
function fenced(text, from, scanned) {
  const [opening, fence, info] = FENCE.exec(text.slice(from, from + MOST_INFO)) ?? [];
  if (!opening) return null;
  const begin = from + opening.length, closing = new RegExp(`^ {0,3}${fence}[~\`]* *$`, "gm");
  closing.lastIndex = Math.max(begin, scanned);
  const found = closing.exec(text);
  const end = found ? found.index + found[0].length : text.length;
  return {
    token: { type: "code", lang: info.trim().replace(/\\([!-/:-@[-`{-~])/g, "$1"), text: text.slice(begin, found ? Math.max(begin, found.index - 1) : end) },
    end: found && end < text.length ? end : null, scanned: text.lastIndexOf("\n") + 1,
  };
}

/** Makes elements of a text that grows: a block that can't change any more is read once. */
function reader() {
  let done, made, links, known, scanned;
  const restart = () => ([done, made, links, known, scanned] = ["", [], Object.create(null), new Map(), 0]);
  restart();

  return (given) => {
    const text = given.replace(/\r\n?/g, "\n"); // as marked does
    if (!text.startsWith(done)) restart();
    for (let restarted = done === ""; ; ) {
      const code = fenced(text, done.length, scanned);
      if (code) {
        const found = block(code.token);
        if (code.end === null) return ((scanned = code.scanned), made.concat(found));
        [done, made, scanned] = [text.slice(0, code.end), made.concat(found), 0];
        continue;
      }
      const rest = text.slice(done.length, done.length + MOST_CHARACTERS), lexer = new BoundedLexer(links, known);
      const tokens = lexer.lex(rest);
      known = lexer.read;
      if (!restarted && size(tokens.links) > size(links)) {
        restart(); // Earlier blocks may name the new link.
        restarted = true;
        continue;
      }
      // A block can change until the next one's first two lines, as of a table, are complete.
      const whole = rest.lastIndexOf("\n");
      let count = 0, end = 0;
      for (const [index, { raw }] of tokens.entries()) {
        if (tokens[index + 1]?.open || !/^\s*\S.*\n/.test(rest.slice(end + raw.length, whole))) break;
        [count, end] = [count + 1, end + raw.length];
      }
      const settled = Object.assign(Object.create(null), links);
      walkTokens(tokens.slice(0, count), (token) => token.type === "def" && (settled[token.tag] ??= token));
      const isLast = done.length + rest.length === text.length, elements = tokens.map(block);
      // A link's address that still grows counts for all blocks, and for none of them for good.
      if (isLast && size(tokens.links) > size(settled)) return made.concat(elements);
      [done, links] = [done + rest.slice(0, end), settled];
      made = made.concat(elements.splice(0, count));
      if (isLast) return made.concat(elements);
      if (count === 0) return made.concat(block({ type: "unread", raw: text.slice(done.length) }));
    }
  };
}

export function Markdown({ text }) {
  const read = useMemo(reader, []);
  const elements = useMemo(() => {
    try {
      return read(text);
    } catch {
      return html`<span class="unread">${text}</span>`; // marked has failed
    }
  }, [text]);
  return html`<div class="markdown">${elements}</div>`;
}
