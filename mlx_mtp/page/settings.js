// A chat's settings, as they are typed: the field of the request, its name, and what it does.

import { useState } from "./vendor/hooks.js";
import { ApiError, state } from "./api.js";
import { Failure, html } from "./ui.js";

const SETTINGS = [
  { name: "system", label: "System prompt", kind: "text", help: "What the model is told before everything else." },
  { name: "temperature", label: "Temperature", parse: Number, step: 0.1, help: "0 always takes the most probable token." },
  { name: "top_p", label: "Top p", parse: Number, step: 0.05, help: "Keep the most probable tokens that add up to this." },
  { name: "top_k", label: "Top k", parse: Number, step: 1, help: "Keep only so many of the most probable tokens." },
  { name: "min_p", label: "Min p", parse: Number, step: 0.01, help: "Keep tokens at least this likely relative to the best." },
  { name: "repetition_penalty", label: "Repetition penalty", parse: Number, step: 0.05, help: "Above 1: repeat less." },
  { name: "presence_penalty", label: "Presence penalty", parse: Number, step: 0.1, help: "Lower what the answer has already." },
  { name: "max_tokens", label: "Max tokens", parse: Number, step: 1, help: "Of an answer; empty: as the context has room." },
  { name: "seed", label: "Seed", parse: Number, step: 1, help: "The same seed gives the same answer; empty: a new one each time." },
  {
    name: "thinking", label: "Reasoning", kind: "choice", choices: { "": "as the model does", on: "on", off: "off" },
    help: "Whether the model thinks before it answers, where it can.",
  },
  {
    name: "drafts", label: "Drafts a step", kind: "choice",
    get choices() {
      // Counts are of the head's drafts; without a head only copies can be turned off.
      const counts = [...Array(state.sources.includes("mtp") ? 9 : Math.min(state.sources.length, 1)).keys()];
      return { "": "what pays most", ...Object.fromEntries(counts.map((n) => [n, n || "none"])) };
    },
    help: "How many tokens are guessed ahead. Changes the speed, never the answer.",
  },
  { name: "tools", label: "Tools", kind: "json", help: 'A list: [{"name": "get_time", "description": "…", "parameters": {…}}]' },
  { name: "schema", label: "JSON schema", kind: "json", help: "The answer will be JSON that fits it." },
];
/** The settings that this server can act on. */
export const offered = () => SETTINGS.filter(({ choices }) => !choices || Object.keys(choices).length > 1);

// Where the server's word for what was wrong belongs on this page.
const FIELDS = { response_format: "schema", chat_template_kwargs: "thinking", mtp: "drafts", messages: "system" };

/** The setting that an error of the server is about, if any. */
export function settingOf(param) {
  const field = (param ?? "").split(/[.[]/)[0];
  const name = FIELDS[field] ?? field;
  return SETTINGS.some((each) => each.name === name) ? name : null;
}

/** In a line, what of an answer's settings is not the server's own choice. */
export const toldOf = (settings) => SETTINGS
  .filter(({ name, parse, kind }) => settings[name] && name !== "seed" && (parse || kind === "choice"))
  .map(({ name, label }) => `${label.toLowerCase()} ${settings[name]}`).join(", ");

export function parsedJson(setting, text) {
  if (!text?.trim()) return undefined;
  const fail = (why) => {
    throw new ApiError(`${setting.label}: this ${why}`, { param: setting.name });
  };
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    fail(`is not JSON: ${error.message}`);
  }
  const isTools = setting.name === "tools";
  if (!(value instanceof Object) || Array.isArray(value) !== isTools) fail(`must be ${isTools ? "a list of functions" : "an object"}.`);
  return value;
}

function Setting({ setting, chat, problem, onChange }) {
  const { name, label, kind, help, step, choices } = setting;
  const [own, setOwn] = useState(null);
  const value = chat.settings[name] ?? "";
  const id = `setting-${name}`;
  const write = (event) => {
    chat.settings = { ...chat.settings, [name]: event.target.value };
    setOwn(null);
    onChange();
  };
  const check = () => {
    try {
      parsedJson(setting, value);
    } catch (error) {
      setOwn(error.message);
    }
  };
  const shared = { id, value, onInput: write, "aria-describedby": `${id}-help`, "aria-invalid": Boolean(own ?? problem) };
  const field = kind === "choice"
    ? html`<select ...${shared}>${Object.entries(choices).map(([key, text]) => html`<option value=${key} selected=${key === String(value)}>${text}</option>`)}</select>`
    : kind
      ? html`<textarea ...${shared} rows="3" spellcheck=${kind === "text"} class=${kind} onBlur=${kind === "json" && check}></textarea>`
      : html`<input ...${shared} type="number" step=${step} placeholder="default" />`;
  return html`<div class="setting ${kind ?? "number"}">
    <label for=${id}>${label}</label>${field}
    <small id="${id}-help">${help}</small>
    ${(own ?? problem) && html`<${Failure}>${own ?? problem}<//>`}
  </div>`;
}

/** The settings of a chat; `last` is its last answer, `onAgain` asks for it once more. */
export function Settings({ chat, last, onChange, onAgain, onClose }) {
  const name = last?.state === "failed" ? settingOf(last.param) : null;
  return html`<aside class="settings" aria-label="Settings of this chat">
    <header><h2>Settings</h2><button type="button" class="icon" aria-label="Close the settings" onClick=${onClose}>×</button></header>
    ${offered().map((setting) => html`<${Setting} key="${chat.id} ${setting.name}" setting=${setting} chat=${chat}
      onChange=${onChange} problem=${setting.name === name ? last.error : null} />`)}
    ${last?.role === "assistant" && html`<p class="actions"><button type="button" class="wide-button" onClick=${onAgain}>Regenerate the last answer with these</button></p>`}
  </aside>`;
}
