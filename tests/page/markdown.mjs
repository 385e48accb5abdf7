// Runs the page's Markdown component in Node.js: `node markdown.mjs FOLDER`, where FOLDER is a copy
// of the page. Reads [[piece, ..], ..] from standard input: texts, in the pieces in which they come.
// Writes for each text what is shown in the end, what is shown of the whole text at once, and how
// many characters were read for either.

import { readFileSync, writeFileSync } from "node:fs";

const folder = process.argv[2];
// A component is called once for each redraw; what it keeps is in `kept`.
let kept;
globalThis.memo = (make, inputs) => (inputs.length ? make() : (kept ??= make()));
const names = ["useEffect", "useLayoutEffect", "useRef", "useState"].map((name) => `export const ${name} = () => [];`);
writeFileSync(`${folder}/vendor/hooks.js`, `export const useMemo = globalThis.memo; ${names.join("")}`);
writeFileSync(`${folder}/package.json`, '{"type": "module"}');
const { Lexer, Tokenizer } = await import(`${folder}/vendor/marked.js`);
const { Fragment } = await import(`${folder}/vendor/preact.js`);
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

const found = JSON.parse(readFileSync(0, "utf8")).map((pieces) => {
  kept = undefined;
  read = 0;
  let text = "", element;
  for (const piece of pieces) element = Markdown({ text: (text += piece) });
  const grown = shown(element), forGrown = read;
  kept = undefined;
  read = 0;
  return [grown, shown(Markdown({ text })), forGrown, read];
});
process.stdout.write(JSON.stringify(found));
