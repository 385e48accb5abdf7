// What the server does now, from its /live: one tab reads it, and passes it on to the others.

import { useEffect, useState } from "./vendor/hooks.js";
import { api, events, sleep } from "./api.js";
import { nameOf, ordinal } from "./drafts.js";
import { Failure, bytes, html, number, percent, plural, seconds } from "./ui.js";

const SAMPLE_SECONDS = 2, MOST_SAMPLES = 150;

const watched = { now: null, samples: [], error: null };

function take(message) {
  const { history, ...now } = message;
  watched.now = now;
  watched.error = null;
  if (history) watched.samples = history;
  const last = watched.samples.at(-1);
  // Another server's totals, or the same after a restart, are not to be compared with these.
  if (last && now.totals.generation_tokens < last.generation_tokens) watched.samples = [];
  if (!last || now.totals.time - last.time >= SAMPLE_SECONDS) {
    watched.samples = [...watched.samples, now.totals].slice(-MOST_SAMPLES);
  }
}

async function read(signal, tell) {
  while (!signal.aborted) {
    try {
      for await (const message of events(await api("/live", { signal }))) tell(message);
    } catch (error) {
      if (signal.aborted) return;
      tell({ error: error.message });
    }
    await sleep(1.5);
  }
}

/** Watch while this tab is seen; returns what ends it. */
function watch(show) {
  const channel = new BroadcastChannel("mlx-mtp live");
  let reading = null;
  const tell = (message, own = true) => {
    if (message.error) watched.error = message.error;
    else take(message);
    if (own) channel.postMessage(message);
    show();
  };
  channel.onmessage = ({ data }) => {
    if (data !== "hello") tell(data, false);
    else if (reading?.leads && watched.now) channel.postMessage({ ...watched.now, history: watched.samples });
  };
  const begin = () => {
    if (reading || document.hidden) return;
    const own = (reading = new AbortController());
    const lead = () => ((own.leads = true), read(own.signal, tell));
    channel.postMessage("hello");
    // Without locks, where the page came over the network without TLS, each tab reads for itself.
    if (navigator.locks) navigator.locks.request("mlx-mtp live", { signal: own.signal }, lead).catch(() => {});
    else lead();
  };
  const end = () => (reading?.abort(), (reading = null));
  const turn = () => (document.hidden ? end() : begin());
  document.addEventListener("visibilitychange", turn);
  begin();
  return () => {
    end();
    document.removeEventListener("visibilitychange", turn);
    channel.close();
  };
}

/** Differences of the totals between samples, for each second. */
function rates(samples, of) {
  return samples.slice(1).map((sample, index) => {
    const before = samples[index];
    return [sample.time, of(sample, before, sample.time - before.time)];
  }).filter(([, value]) => value !== null);
}

const perSecond = (name) => (sample, before, time) => (time > 0 ? (sample[name] - before[name]) / time : null);
function firstToken(sample, before) {
  const count = sample.first_tokens - before.first_tokens;
  return count > 0 ? (sample.first_token_seconds - before.first_token_seconds) / count : null;
}

const WIDTH = 300, HEIGHT = 64;

function Chart({ title, unit, points, digits = 0, dots = false }) {
  const end = watched.now.totals.time;
  const begin = Math.min(points[0]?.[0] ?? end, end - 60);
  const most = Math.max(...points.map(([, value]) => value), 1e-9);
  const x = (time) => (WIDTH * (time - begin)) / (end - begin);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 6) * value) / most;
  const at = points.map(([time, value]) => [x(time).toFixed(1), y(value).toFixed(1)]);
  const line = at.map((point) => point.join(" ")).join(" L");
  const last = points.at(-1)?.[1];
  const told = points.length ? `last ${number(last, digits)}, at most ${number(most, digits)} ${unit}` : "nothing yet";
  return html`<figure class="chart">
    <figcaption><b>${title}</b> <span>${told}</span></figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${title}: ${told}" preserveAspectRatio="none">
      ${dots
        ? at.map(([cx, cy]) => html`<ellipse cx=${cx} cy=${cy} rx="2" ry="2.5" />`)
        : at.length > 1 && html`<path class="area" d="M${at[0][0]} ${HEIGHT} L${line} L${at.at(-1)[0]} ${HEIGHT} Z" /><path d="M${line}" />`}
    </svg>
    <p class="axis"><span>${seconds(end - begin)} ago</span><span>now</span></p>
  </figure>`;
}

function Bar({ name, part, whole, told }) {
  const share = whole ? Math.min(part / whole, 1) : 0;
  return html`<div class="bar"><span>${name}</span>
    <meter min="0" max="1" value=${share} aria-label=${name}></meter><span>${told}</span></div>`;
}

const STATES = { waiting: "waits", prefilling: "computes the prompt", decoding: "answers" };

function Rows({ rows }) {
  const [failed, setFailed] = useState(null);
  const [ending, setEnding] = useState([]);
  const cancel = async (id) => {
    setEnding([...ending, id]);
    setFailed(null);
    try {
      await api(`/live/${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      setFailed(error.message);
    }
    setEnding(ending.filter((each) => each !== id));
  };
  if (!rows.length) return html`${failed && html`<${Failure}>${failed}<//>`}<p class="hint">No answer is running. Ask something in the chat, or point a client here.</p>`;
  return html`${failed && html`<${Failure}>${failed}<//>`}
    <div class="wide" tabindex="0" role="region" aria-label="Answers"><table class="rows">
    <thead><tr><th>Answer</th><th><span class="unseen">Cancel</span></th><th>State</th><th>Age</th><th>Prompt</th><th>Cached</th><th>Tokens</th><th>Tokens/s</th><th>Drafts a step</th><th>Accepted</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.id}>
      <td title=${row.id}><code>…${row.id.slice(-8)}</code></td>
      <td><button type="button" class="small" disabled=${ending.includes(row.id)} onClick=${() => cancel(row.id)} aria-label="Cancel the answer ${row.id.slice(-8)}">Cancel</button></td>
      <td>${STATES[row.state]}${row.computed !== undefined ? ` ${percent(row.computed, row.prompt_tokens)}` : ""}</td>
      <td>${seconds(row.age)}</td><td>${number(row.prompt_tokens)}</td><td>${number(row.cached_tokens)}</td>
      <td>${number(row.tokens)}</td><td>${number(row.tokens_per_second, 1)}</td>
      <td>${row.depth ? `${row.depth} ${nameOf(row.source)}` : row.state === "decoding" ? "none" : "–"}</td>
      <td>${row.drafts ? `${percent(row.accepted, row.drafts)} of ${number(row.drafts)}` : "–"}</td>
    </tr>`)}</tbody></table></div>`;
}

/** The speed that each number of drafts would have, as bars; the one in use is marked. */
function Bars({ values, chosen }) {
  const most = Math.max(...values, 1), gap = WIDTH / values.length, height = (value) => (HEIGHT * value) / most;
  const told = values.map((value, k) => `${k}: ${number(value, 2)}${k === chosen ? " (in use)" : ""}`).join(", ");
  return html`<figure class="chart bars">
    <figcaption><b>Speed by the number of the head's drafts</b> <span>with copies, where they pay; the line is 1.00, without drafts</span></figcaption>
    <svg viewBox="0 -14 ${WIDTH} ${HEIGHT + 28}" role="img" aria-label="Speed by the number of drafts: ${told}">
      <line x1="0" x2=${WIDTH} y1=${HEIGHT - height(1)} y2=${HEIGHT - height(1)} />
      ${values.map((value, k) => html`<g class=${k === chosen ? "in-use" : ""}>
        <rect x=${gap * k + gap * 0.15} width=${gap * 0.7} y=${HEIGHT - height(value)} height=${height(value)} />
        <text x=${gap * (k + 0.5)} y=${HEIGHT - height(value) - 3}>${number(value, 2)}</text>
        <text x=${gap * (k + 0.5)} y=${HEIGHT + 11}>${k}</text></g>`)}
    </svg></figure>`;
}

function Why({ choice, server }) {
  if (server.drafts === null) return html`<p class="hint">Nothing is drafted: --drafts says so, or the model has no MTP head and nothing may be copied.</p>`;
  if (server.drafts !== "auto") return html`<p class="hint">--mtp-num-draft-tokens ${server.drafts} fixes the number of drafts: none is chosen.</p>`;
  if (!choice) return html`<p class="hint">No step has been planned yet.</p>`;
  const { num_rows: rows, drafts, cost, num_tokens: brought, costs, tokens } = choice;
  const worth = tokens.map((count, k) => count / costs[k] / rows);
  const all = Object.entries(drafts).filter(([, count]) => count);
  // Copies are counted in each of the figures, and there are bars for none of them.
  const depth = all.some(([source]) => source !== "mtp") || (!all.length && worth[0] > 1.05) ? -1 : (drafts.mtp ?? 0) / rows;
  const told = all.length
    ? `each step checks ${all.map(([source, count]) => `${plural(count, "draft")} ${nameOf(source)}`).join(" and ")}. It takes ${number(cost, 2)} times as long as one without drafts and brings ${number(brought / rows, 2)} times as many tokens: ${number(brought / rows / cost, 2)} times the speed.`
    : depth < 0 ? "the last step had no drafts."
      : "nothing is drafted: a longer step would not bring as many more tokens as it costs.";
  const cells = (values) => values.map((value, k) => html`<td class=${k === depth ? "chosen" : ""}>${number(value, 2)}</td>`);
  return html`<p>For ${plural(rows, "answer")} at a time ${told}</p>
    <${Bars} values=${worth} chosen=${depth} />
    <details><summary>The figures behind it</summary><div class="wide" tabindex="0" role="region" aria-label="Price list"><table>
    <thead><tr><th>Drafts of the head for each answer</th>${costs.map((_, k) => html`<th class=${k === depth ? "chosen" : ""}>${k}</th>`)}</tr></thead>
    <tbody><tr><th>Time of a step</th>${cells(costs)}</tr>
      <tr><th>Tokens expected</th>${cells(tokens.map((count) => count / rows))}</tr>
      <tr><th>Speed</th>${cells(worth)}</tr></tbody></table></div>
    <p class="hint">Times and speeds are relative to a step without drafts, tokens are those of one answer. All answers get the same number of the head's drafts; one that copies verifies its copy instead. Another choice must promise 2% more than the one in use.</p></details>`;
}

const WORDS = {
  Token: "A piece of text, such as a short word. A model writes one token after another.",
  "Step": "One pass through the model, for all running answers at once.",
  Draft: "A token that is guessed ahead, by the model's small MTP head or from earlier text. One step checks several.",
  Accepted: "A draft that is what the model itself would have written. Others are dropped: the answer is the same either way.",
  "Prompt memory": "Beginnings of prompts that are kept, so that the next question of a chat need not be read again (the prefix cache).",
};
const Legend = () => html`<details class="card full"><summary>What the words mean</summary><dl class="words">${Object.entries(WORDS).map(([word, told]) =>
  html`<dt>${word}</dt><dd>${told}</dd>`)}</dl></details>`;

function Memory({ memory, prefixes }) {
  const names = { weights: "the model", head: "its MTP head", "prefix cache": "prompt memory", requests: "running answers", "prefill chunk": "reading prompts", texts: "texts of requests" };
  const parts = Object.entries(memory.plan).filter(([, planned]) => planned > 0);
  const used = {
    weights: memory.plan.weights, head: memory.plan.head, "prefix cache": prefixes.nbytes,
    requests: memory.rows * (memory.plan.requests ?? 0),
  };
  return html`${parts.map(([name, planned]) => html`<${Bar} name=${names[name] ?? name} part=${used[name] ?? 0} whole=${planned}
      told=${name in used ? `${bytes(used[name])} of ${bytes(planned)}` : `up to ${bytes(planned)}`} />`)}
    <p class="hint">${bytes(memory.active)} are in use now.${parts.length ? "" : " There is no plan: nothing is limited."}</p>`;
}

function Prefixes({ prefixes }) {
  if (!prefixes.limit) return html`<p class="hint">Off (--prefix-cache-size 0).</p>`;
  const evicted = Object.entries(prefixes.evicted);
  return html`<${Bar} name="tokens found" part=${prefixes.hits} whole=${prefixes.queries} told="${percent(prefixes.hits, prefixes.queries)} of ${number(prefixes.queries)}" />
    <${Bar} name="memory" part=${prefixes.nbytes} whole=${prefixes.limit} told="${bytes(prefixes.nbytes)} of ${bytes(prefixes.limit)}" />
    <p>${plural(prefixes.num_entries, "beginning")} of prompts in memory${prefixes.num_files ? `, ${number(prefixes.num_files)} on the disk (${bytes(prefixes.file_nbytes)})` : ""}.</p>
    <p>${evicted.length ? `Dropped again: ${evicted.map(([reason, count]) => `${count} (${reason})`).join(", ")}.` : "Nothing was dropped."}</p>`;
}

function Queue({ now }) {
  const rejected = Object.entries(now.rejected);
  return html`<p>${number(now.running)} of at most ${number(now.server.most_rows)} answers run, ${number(now.waiting)} wait.</p>
    <${Bar} name="places" part=${now.held} whole=${now.capacity} told="${now.held} of ${now.capacity} taken" />
    <p>${rejected.length ? `Refused: ${rejected.map(([why, count]) => `${count} (${why.replaceAll("_", " ")})`).join(", ")}.` : "No request was refused."}</p>
    ${now.failures.length
      ? html`<table><thead><tr><th>Errors</th><th>Status</th><th>Times</th></tr></thead><tbody>${now.failures.map(([route, status, count]) =>
          html`<tr><td><code>${route}</code></td><td>${status}</td><td>${count}</td></tr>`)}</tbody></table>`
      : html`<p>No errors.</p>`}
    ${now.server.restarts > 0 && html`<${Failure}>The engine died and was started again ${plural(now.server.restarts, "time")}; see the log.<//>`}`;
}

const Card = ({ title, children, wide }) => html`<section class="card ${wide ? "full" : ""}"><h2>${title}</h2>${children}</section>`;

export function Live() {
  const [, draw] = useState(0);
  useEffect(() => watch(() => draw((count) => count + 1)), []);
  const { now, samples, error } = watched;
  if (!now) return html`<div class="live">${error ? html`<${Failure}>${error} Trying again…<//>` : html`<p class="hint">Waiting for the first figures…</p>`}</div>`;
  const { server, drafts } = now;
  // Samples are taken at times, and messages come between them.
  const before = samples.findLast((each) => now.totals.time - each.time >= SAMPLE_SECONDS);
  const tokens = before ? perSecond("generation_tokens")(now.totals, before, now.totals.time - before.time) : 0;
  const status = { ready: "ready", stopping: "stopping: it finishes what it has and takes nothing new", failed: `failed: ${server.reason}` };
  const models = Object.entries(server.states ?? {}); // of several at one address
  const figures = html`
    <${Card} title="Answers now" wide><${Rows} rows=${now.rows} /><//>
    <${Card} title="The last minutes" wide><div class="charts">
      <${Chart} title="Tokens of answers" unit="tokens/s" points=${rates(samples, perSecond("generation_tokens"))} />
      <${Chart} title="Tokens of prompts" unit="tokens/s" points=${rates(samples, perSecond("prompt_tokens"))} />
      <${Chart} title="Time to the first token" unit="s" digits=${2} points=${rates(samples, firstToken)} dots />
    </div><//>
    <${Card} title="Why so many drafts" wide><${Why} choice=${drafts.choice} server=${server} /><//>
    <${Card} title="Accepted, by a draft's place">${Object.keys(drafts.sources).length
      ? Object.entries(drafts.sources).map(([source, { tried, accepted }]) => html`<h3 class="hint">Drafts ${nameOf(source)}</h3>
        ${tried.map((all, position) => all > 0 && html`<${Bar} name=${ordinal(position)} part=${accepted[position]} whole=${all}
          told="${percent(accepted[position], all)} of ${number(all)}" />`)}`)
      : html`<p class="hint">Nothing has been drafted yet.</p>`}<//>
    <${Card} title="Memory"><${Memory} memory=${now.memory} prefixes=${now.prefixes} /><//>
    <${Card} title="Prompt memory"><${Prefixes} prefixes=${now.prefixes} /><//>
    <${Card} title="Queue and errors"><${Queue} now=${now} /><//>
    <${Legend} />`;
  const isLoaded = server.context > 0;
  return html`<div class="live">
    ${error && html`<${Failure}>${error} These figures are old; trying again…<//>`}
    <p class="headline"><b class=${server.state}>${status[server.state]}</b> · up ${seconds(server.uptime)}
      ${isLoaded && html`${" "}· <b>${number(tokens, 1)}</b> tokens/s · <b>${now.running}</b> running, <b>${now.waiting}</b> waiting ·
        ${" "}<b>${percent(now.totals.accepted, now.totals.drafts)}</b> of drafts accepted · context ${number(server.context)}`}${" "}· mlx-mtp ${server.version}</p>
    ${models.length > 0 && html`<${Card} title="Models" wide><p>${models.map(([name, state]) => `${name} (${state})`).join(", ")}</p><//>`}
    ${isLoaded ? figures : html`<p class="hint headline">No model is in memory, so there are no figures. A question in the chat, or a client's request, loads one.</p>`}
  </div>`;
}
