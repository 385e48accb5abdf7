// Where each token of an answer came from.

import { useState } from "./vendor/hooks.js";
import { html, number, percent, plural } from "./ui.js";

const NAMES = { mtp: "of the MTP head", copy: "copied from earlier text" };
export const nameOf = (source) => NAMES[source] ?? `of ${source}`;
const shown = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

const LAST = 3; // position of a colour of its own

/** What each position of each source was tried and accepted, over an answer's steps; those behind the last as one. */
function counted(steps) {
  const counts = new Map();
  for (const [, drafts, accepted] of steps) {
    drafts.forEach(([, source], place) => {
      const position = Math.min(place, LAST), key = `${source} ${position}`;
      const found = counts.get(key) ?? { source, position, tried: 0, accepted: 0 };
      // Behind the first that was rejected nothing is tried.
      found.tried += place <= accepted;
      found.accepted += place < accepted;
      found.later ||= place > LAST;
      counts.set(key, found);
    });
  }
  return [...counts.values()].sort((a, b) => a.source.localeCompare(b.source) || a.position - b.position);
}

const classOf = (source, position) => `from-${source in NAMES ? source : "other"} depth-${Math.min(position, LAST) + 1}`;
const ORDINALS = ["1st", "2nd", "3rd"];
export const ordinal = (position) => ORDINALS[position] ?? `${position + 1}th`;

function Legend({ steps }) {
  const tokens = steps.reduce((sum, [texts]) => sum + texts.length, 0);
  const own = tokens - steps.reduce((sum, [, , accepted]) => sum + accepted, 0);
  const tried = counted(steps).filter((each) => each.tried > 0);
  return html`<div class="legend">
    <p><span>${plural(tokens, "token")} in ${plural(steps.length, "step")}: <b>${number(tokens / steps.length, 2)} a step</b></span>
      <span><span class="key">a</span> drawn by the model: ${own}</span></p>
    ${[...new Set(tried.map((each) => each.source))].map((source) => html`<p>
      <span>Accepted drafts ${nameOf(source)}:</span>
      ${tried.filter((each) => each.source === source).map(({ position, tried: all, accepted, later }) => html`<span title="${accepted} of ${all} that were tried">
        <span class="key ${classOf(source, position)}">a</span> ${ordinal(position)}${later ? " and later drafts" : " draft"} ${percent(accepted, all)}</span>`)}
    </p>`)}
    <details><summary>What are drafts?</summary><p>Tokens that are guessed ahead; one step of the model checks several. Where a guess is what the model itself writes it is accepted, and saves a step. The answer is the same without drafts. Of drafts copied from other answers only accepted ones are shown.</p></details>
  </div>`;
}

function Step({ step: [texts, drafts, accepted], index }) {
  const own = texts[accepted];
  return html`<p class="step" aria-live="polite">
    <strong>Step ${index + 1}.</strong>
    ${" "}${drafts.length ? `Drafted ${drafts.length}:` : "No drafts;"}
    ${drafts.map(([text, source], position) => html`${" "}<span class="key ${position < accepted ? classOf(source, position) : position === accepted && own !== undefined ? "rejected" : "untried"}">${shown(text)}</span>${" "}${
      position < accepted ? "accepted" : position > accepted ? "not tried" : own === undefined ? "beyond the end" : "rejected"},`)}
    ${own === undefined
      ? " and the answer ends."
      : html`${" "}the model drew <span class="key">${shown(own)}</span>${drafts.length > accepted ? " instead." : drafts.length ? " after them." : "."}`}
  </p>`;
}

/** An answer as its tokens; arrow keys or the pointer choose the step that is told below. */
export function Drafts({ steps }) {
  const [chosen, choose] = useState(0);
  const at = Math.min(chosen, steps.length - 1);
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(steps.length - 1, at + by)));
  };
  const onPoint = (event) => {
    const index = event.target.closest("[data-step]")?.dataset.step;
    if (index !== undefined) choose(Number(index));
  };
  return html`<div class="drafts">
    <${Legend} steps=${steps} />
    <div class="tokens" tabindex="0" role="group" aria-label="The answer's tokens by step; arrow keys choose a step"
      onKeyDown=${onKey} onPointerMove=${onPoint} onClick=${onPoint}>
      ${steps.map(([texts, drafts, accepted], index) => html`<span key=${index} data-step=${index}
        class="of-step ${index === at ? "chosen" : ""}">${texts.map((text, position) =>
          html`<span class="token ${position < accepted ? classOf(drafts[position][1], position) : ""}">${text}</span>`)}</span>`)}
    </div>
    ${steps[at] && html`<${Step} step=${steps[at]} index=${at} />`}
  </div>`;
}
