// Code, highlighted by CodeMirror's modes: each reads a line once, and goes on from the state behind it.

import { useEffect, useMemo, useState } from "./vendor/hooks.js";
import { Fragment } from "./vendor/preact.js";
import { Copy, html } from "./ui.js";

// The modes, as file and export, and what fences call them.
const LANGUAGES = {
  "clike c": "c h", "clike cpp": "cpp c++ cc hpp cuda metal", "clike csharp": "csharp cs c#", "clike dart": "dart", "clike java": "java",
  "clike kotlin": "kotlin kt", "clike objectiveC": "objectivec objc", "clike scala": "scala", "css css": "css", "css less": "less",
  "css sCSS": "scss", "diff diff": "diff patch", "dockerfile dockerFile": "dockerfile docker", "go go": "go golang",
  "haskell haskell": "haskell hs", "javascript javascript": "javascript js jsx mjs cjs", "javascript json": "json jsonc json5 jsonl",
  "javascript typescript": "typescript ts tsx", "julia julia": "julia jl", "lua lua": "lua", "perl perl": "perl pl",
  "powershell powerShell": "powershell ps1", "properties properties": "ini properties env", "python python": "python py python3",
  "r r": "r", "ruby ruby": "ruby rb", "rust rust": "rust rs", "shell shell": "bash sh shell zsh", "sql standardSQL": "sql",
  "sql pgSQL": "postgresql pgsql", "stex stex": "latex tex", "swift swift": "swift", "toml toml": "toml",
  "xml html": "html htm vue svelte", "xml xml": "xml svg", "yaml yaml": "yaml yml",
};
const BY_NAME = new Map(Object.entries(LANGUAGES).flatMap(([mode, names]) => names.split(" ").map((name) => [name, mode])));
const KINDS = {
  comment: "comment", keyword: "keyword", atom: "atom", bool: "atom", null: "atom", number: "atom", string: "string", regexp: "string",
  def: "name", tag: "keyword", tagName: "keyword", attribute: "name", attributeName: "name", property: "name", propertyName: "name",
  typeName: "type", type: "type", builtin: "type", meta: "comment", link: "string", heading: "keyword", inserted: "string",
  positive: "string", deleted: "bad", negative: "bad", error: "bad", labelName: "name",
};
const MOST_CHARACTERS = 2000; // of a line: longer ones are plain
const CHUNK = 50; // lines of an element that is made once

/** One line, as modes read it. */
class Line {
  pos = 0;
  start = 0;
  tabSize = 4;
  indentUnit = 2;
  constructor(string) {
    this.string = string;
  }
  eol = () => this.pos >= this.string.length;
  sol = () => this.pos === 0;
  peek = () => this.string.charAt(this.pos) || undefined;
  next = () => (this.eol() ? undefined : this.string.charAt(this.pos++));
  current = () => this.string.slice(this.start, this.pos);
  column = () => this.start;
  indentation = () => this.string.search(/\S|$/);
  skipToEnd = () => void (this.pos = this.string.length);
  backUp = (count) => void (this.pos -= count);
  lookAhead = () => undefined;
  eat(what) {
    const found = this.peek();
    const fits = found !== undefined && (typeof what === "string" ? found === what : what instanceof RegExp ? what.test(found) : what(found));
    return fits ? this.next() : undefined;
  }
  eatWhile(what) {
    const from = this.pos;
    while (this.eat(what));
    return this.pos > from;
  }
  eatSpace = () => this.eatWhile(/\s/);
  skipTo(text) {
    const found = this.string.indexOf(text, this.pos);
    if (found >= 0) this.pos = found;
    return found >= 0;
  }
  match(what, consume = true, ignoreCase = false) {
    const rest = this.string.slice(this.pos);
    const fold = (text) => (ignoreCase ? text.toLowerCase() : text);
    const found = typeof what === "string" ? fold(rest).startsWith(fold(what)) && [what] : rest.match(what);
    if (!found || found.index > 0) return null;
    if (consume) this.pos += found[0].length;
    return typeof what === "string" ? true : found;
  }
}

function painted(mode, state, text) {
  if (!mode || text.length > MOST_CHARACTERS) return [text];
  if (!text.trim()) return (mode.blankLine?.(state, 2), [text]);
  const found = [], line = new Line(text);
  for (let idle = 0; !line.eol() && idle < 10; idle = line.pos > line.start ? 0 : idle + 1) {
    line.start = line.pos;
    const style = mode.token(line, state) ?? "";
    const kind = KINDS[style.split(/[ .]/)[0]], part = line.current();
    if (part) found.push(kind ? html`<span class="is-${kind}">${part}</span>` : part);
  }
  return line.eol() ? found : [...found, text.slice(line.pos)];
}

const copied = (state) => Object.fromEntries(Object.entries(state).map(([name, value]) => [name, Array.isArray(value) ? [...value] : value]));

/** Makes elements of a code that grows: a line that is complete is read once. */
export function painter(mode) {
  let read, state, chunks, lines;
  const restart = () => ([read, state, chunks, lines] = ["", mode?.startState?.(2) ?? {}, [], []]);
  // As a component: Preact compares one that is the same no further.
  const block = (parts) => html`<${Fragment}><div>${parts.map((part, index) => (index ? ["\n", part] : part))}</div><//>`;
  restart();
  return (text) => {
    if (!text.startsWith(read)) restart();
    for (let end; (end = text.indexOf("\n", read.length)) >= 0; read = text.slice(0, end + 1)) {
      lines.push(painted(mode, state, text.slice(read.length, end)));
      if (lines.length === CHUNK) chunks.push(block(lines.splice(0)));
    }
    const rest = painted(mode, mode?.copyState?.(state) ?? copied(state), text.slice(read.length));
    return [...chunks, block([...lines, rest])];
  };
}

const loaded = new Map(); // modes by their name, null while they come
function load(name) {
  const [file, part] = name.split(" ");
  if (!loaded.has(name)) loaded.set(name, import(`./vendor/modes/${file}.js`).then((all) => (loaded.set(name, all[part]), all[part])).catch(() => null));
  return loaded.get(name);
}

function useMode(lang) {
  const name = BY_NAME.get(lang.toLowerCase());
  const known = name && load(name);
  const [, redraw] = useState(0);
  const comes = known instanceof Promise;
  useEffect(() => void (comes && known.then(() => redraw((count) => count + 1))), [name, comes]);
  return comes ? null : known;
}

export function Code({ text, name = "", lang = name.split(/[\s:,{]/)[0] }) {
  const mode = useMode(lang);
  const paint = useMemo(() => painter(mode), [mode]);
  const parts = useMemo(() => {
    try {
      return paint(text);
    } catch {
      return text; // a mode has failed
    }
  }, [paint, text]);
  return html`<figure class="code">
    <figcaption><span>${name}</span><${Copy} text=${text} /></figcaption>
    <pre tabindex="0"><code>${parts}</code></pre>
  </figure>`;
}
