// Markdown to elements. marked finds the parts; none of their text is ever taken for HTML.

import { lexer } from "./vendor/marked.js";
import { useMemo } from "./vendor/hooks.js";
import { Code, html } from "./ui.js";

const MOST_LEVELS = 40;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const plain = (text) => text.replace(/&(amp|lt|gt|quot|apos|nbsp|#39);/g, (_, name) => NAMED[name]);

const inner = (token, level) =>
  token.tokens ? token.tokens.map((each) => element(each, level + 1)) : plain(token.text ?? token.raw);

function link(token, level) {
  const safe = /^(https?:|mailto:)/i.test(token.href);
  if (!safe) return inner(token, level);
  return html`<a href=${token.href} target="_blank" rel="noopener noreferrer">${inner(token, level)}</a>`;
}

function table(token, level) {
  const cell = (tag) => (each, column) =>
    html`<${tag} class=${token.align[column] ?? ""}>${inner(each, level)}<//>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${token.header.map(cell("th"))}</tr></thead>
    <tbody>${token.rows.map((row) => html`<tr>${row.map(cell("td"))}</tr>`)}</tbody>
  </table></div>`;
}

function list(token, level) {
  const items = token.items.map((each) => html`<li>${inner(each, level)}</li>`);
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
  image: (token, level) => link({ ...token, tokens: null, text: `[image: ${token.text || token.href}]` }, level),
};

function element(token, level) {
  if (level > MOST_LEVELS) return token.raw;
  if (MAKERS[token.type]) return MAKERS[token.type](token, level);
  const tag = token.type === "heading" ? `h${Math.min(token.depth + 2, 6)}` : TAGS[token.type];
  return tag ? html`<${tag}>${inner(token, level)}<//>` : inner(token, level);
}

export function Markdown({ text }) {
  const elements = useMemo(() => {
    try {
      return lexer(text, { gfm: true, breaks: true }).map((token) => element(token, 0));
    } catch {
      return html`<pre>${text}</pre>`; // nested deeper than the stack bears
    }
  }, [text]);
  return html`<div class="markdown">${elements}</div>`;
}
