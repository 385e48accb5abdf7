// Markdown to elements. marked finds the parts; none of their text is ever taken for HTML.

import { Lexer, walkTokens } from "./vendor/marked.js";
import { useMemo } from "./vendor/hooks.js";
import { Code, html } from "./ui.js";

const OPTIONS = { gfm: true, breaks: true };
// What exceeds one of these bounds is shown as plain text. From each mark marked may search to the
// end of a paragraph, and for each level of lists, quotes or emphasis it reads a text once more.
const MOST_LEVELS = 12;
const MOST_STEPS = 4_000_000; // marks of a paragraph times its characters
const MOST_CHARACTERS = 100_000; // of a block
const MARK = /[*_~`[\]<>&\\]|\s\s/g;

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

const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };
const MAKERS = {
  link,
  table,
  list,
  space: () => null,
  def: () => null,
  hr: () => html`<hr />`,
  br: () => html`<br />`,
  code: ({ text, lang }) => html`<${Code} text=${text} name=${lang ?? ""} />`,
  codespan: ({ text }) => html`<code>${text}</code>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  escape: ({ text }) => text,
  html: ({ raw }) => raw,
  // Nothing is fetched for an answer: an image is its description, and a link to it.
  image: (token) => link({ ...token, tokens: null, text: `[image: ${token.text || token.href}]` }),
  unread: ({ raw }) => html`<span class="unread">${raw}</span>`,
};

function element(token) {
  if (MAKERS[token.type]) return MAKERS[token.type](token);
  const tag = token.type === "heading" ? `h${Math.min(token.depth + 2, 6)}` : TAGS[token.type];
  return tag ? html`<${tag}>${inner(token)}<//>` : inner(token);
}

class BoundedLexer extends Lexer {
  level = 0;

  within(bound, raw, tokens, read) {
    if (!bound || this.level > MOST_LEVELS) {
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
    return this.within(true, text, tokens, () => super.blockTokens(text, tokens, last));
  }

  inlineTokens(text, tokens = []) {
    const marks = text.match(MARK)?.length ?? 0;
    return this.within(marks * text.length <= MOST_STEPS, text, tokens, () => super.inlineTokens(text, tokens));
  }
}

const size = (links) => Object.keys(links).length;

/** Makes elements of a text that grows: a block that can't change any more is read once. */
function reader() {
  let done, made, links;
  const restart = () => ([done, made, links] = ["", [], Object.create(null)]);
  restart();

  return (given) => {
    const text = given.replace(/\r\n?/g, "\n"); // as marked does
    if (!text.startsWith(done)) restart();
    for (let restarted = done === ""; ; ) {
      const rest = text.slice(done.length, done.length + MOST_CHARACTERS), lexer = new BoundedLexer(OPTIONS);
      Object.assign(lexer.tokens.links, links);
      const tokens = lexer.lex(rest);
      if (!restarted && size(tokens.links) > size(links)) {
        restart(); // Earlier blocks may name the new link.
        restarted = true;
        continue;
      }
      // A block can change until the next one's first two lines, as of a table, are complete.
      const whole = rest.lastIndexOf("\n");
      let count = 0, end = 0;
      for (const { raw } of tokens) {
        if (!/^\s*\S.*\n/.test(rest.slice(end + raw.length, whole))) break;
        [count, end] = [count + 1, end + raw.length];
      }
      const settled = Object.assign(Object.create(null), links);
      walkTokens(tokens.slice(0, count), (token) => token.type === "def" && (settled[token.tag] ??= token));
      const isLast = done.length + rest.length === text.length, elements = tokens.map(element);
      // A link's address that still grows counts for all blocks, and for none of them for good.
      if (isLast && size(tokens.links) > size(settled)) return made.concat(elements);
      [done, links] = [done + rest.slice(0, end), settled];
      made = made.concat(elements.splice(0, count));
      if (isLast) return made.concat(elements);
      if (count === 0) return made.concat(element({ type: "unread", raw: text.slice(done.length) }));
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
