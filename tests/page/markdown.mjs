// Runs the page's Markdown component in Node.js: `node markdown.mjs FOLDER`, where FOLDER is a copy
// of the page. Reads [[piece, ..], ..] from standard input: texts, in the pieces in which they come.
// Writes for each text what it shows when grown in pieces, what it shows when given at once, the
// number of characters read for each, the most read for one redraw of the second half, and the most
// lines of code painted again for one piece if the text is code.

import { readFileSync, writeFileSync } from "node:fs";

const folder = process.argv[2];
// The component is called once for each redraw; `kept` is its state between redraws.
let kept;
globalThis.memo = (make, inputs) => (inputs.length ? make() : (kept ??= make()));
const names = ["useEffect", "useLayoutEffect", "useRef", "useState"].map((name) => `export const ${name} = () => [];`);
writeFileSync(`${folder}/vendor/hooks.js`, `export const useMemo = globalThis.memo; ${names.join("")}`);
writeFileSync(`${folder}/package.json`, '{"type": "module"}');
const { Lexer, Tokenizer } = await import(`${folder}/vendor/marked.js`);
const { Fragment } = await import(`${folder}/vendor/preact.js`);
const { painter } = await import(`${folder}/code.js`);
const { Markdown } = await import(`${folder}/markdown.js`);

let read = 0;
for (const [owner, name, argument] of [[Lexer, "blockTokens", 0], [Lexer, "inlineTokens", 0], [Tokenizer, "emStrong", 1]]) {
  const real = owner.prototype[name];
  owner.prototype[name] = function (...given) {
    read += given[argument].length;
    return real.apply(this, given);
  };
}

function shown(node) {
  if (Array.isArray(node)) return node.map(shown).join("");
  if (node === null || node === undefined || node === false) return "";
  if (typeof node !== "object") return String(node).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const { children, text, ...more } = node.props;
  if (node.type === Fragment) return shown(children);
  const tag = typeof node.type === "function" ? node.type.name : node.type;
  const told = Object.entries(more).map(([name, value]) => ` ${name}="${value}"`);
  return `<${tag}${told.join("")}>${shown(text ?? children)}</${tag}>`;
}

function painted(pieces) {
  let text = "", lines = 0;
  const paint = painter({ token: (stream) => ((lines += 1), stream.skipToEnd()) });
  return Math.max(...pieces.map((piece) => {
    const before = lines;
    paint((text += piece));
    return lines - before - piece.split("\n").length;
  }));
}

const found = JSON.parse(readFileSync(0, "utf8")).map((pieces) => {
  kept = undefined;
  read = 0;
  let text = "", element, most = 0;
  for (const [index, piece] of pieces.entries()) {
    const before = read;
    element = Markdown({ text: (text += piece) });
    if (2 * index > pieces.length) most = Math.max(most, read - before);
  }
  const grown = shown(element), forGrown = read;
  kept = undefined;
  read = 0;
  return [grown, shown(Markdown({ text })), forGrown, read, most, painted(pieces)];
});
process.stdout.write(JSON.stringify(found));
