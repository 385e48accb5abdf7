// Requests to the server that this page came from: its key, errors in words, streams, who waits.

export const state = { locked: false, refused: false, lost: "", models: null, model: null, states: null, sources: [], sees: false, context: 0 };

const listeners = new Set();
export const onChange = (listener) => (listeners.add(listener), () => listeners.delete(listener));
export const changed = () => listeners.forEach((listener) => listener());
export const set = (fields) => (Object.assign(state, fields), changed());

// Kept for this tab alone.
const KEY = "mlx-mtp.key";
export const setKey = (key) => (sessionStorage.setItem(KEY, key), connect());

/** An error; `param` is the field of the request that it is about. */
export class ApiError extends Error {
  constructor(message, fields = {}) {
    super(message);
    Object.assign(this, fields);
  }
}

export async function api(path, { method, body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    const sent = body && JSON.stringify(body);
    response = await fetch(path, { method: method ?? (body ? "POST" : "GET"), headers, body: sent, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost("The server does not answer.");
    throw new ApiError("The server does not answer. Is it running?");
  }
  if (response.ok) return response;
  if (response.status === 401) set({ locked: true, refused: Boolean(key) });
  const text = await response.text();
  let fields = {};
  try {
    fields = JSON.parse(text).error ?? {};
  } catch {
    // Something else than the server answers, such as a proxy.
  }
  if (fields.code === "shutting_down") lost("The server is stopping: it finishes what it has begun.");
  throw new ApiError(fields.message ?? `${response.status} ${response.statusText}`, fields);
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke off before the answer's end.");
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

export const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

async function lost(why) {
  if (state.lost) return;
  set({ lost: why });
  while (state.lost) {
    await sleep(1.5);
    const found = await fetch("/health").catch(() => null);
    if (found?.ok) {
      set({ lost: "" });
      connect();
    }
  }
}

/** Ask another model from now on. */
export function choose(model) {
  set({ model });
  return connect();
}

/** Learn the model's name and what is drafted for it; without the right key the page shows nothing but its question for it. */
export async function connect() {
  try {
    const all = (await (await api("/v1/models")).json()).data, chats = all.filter((each) => !each.embeddings);
    const data = chats.length ? chats : all; // The page has nothing for models that make embeddings.
    const card = data.find((each) => each.id === state.model) ?? data[0];
    // Only a server of several models says which of them are loaded.
    const states = card.state ? data.map((each) => each.state) : null;
    const { id: model, draft_sources: sources, images: sees = false, max_model_len: context } = card;
    set({ models: data.map((each) => each.id), model, states, sources, sees, context, locked: false, refused: false });
  } catch {
    // Said where it was noticed.
  }
}

// A browser opens six connections to a host, for all its tabs. One is for /live and one stays free,
// so more answers than this wait here, where it can be said, instead of inside the browser.
export const MOST_ANSWERS = 4;

export function withConnection(work, onWait, signal) {
  const locks = navigator.locks; // not where the page came over the network without TLS
  if (!locks) return work();
  return new Promise((done, fail) => {
    const waiting = new AbortController(); // for the first of the places to become free
    signal.addEventListener("abort", () => (waiting.abort(), fail(signal.reason)));
    const take = () => {
      if (waiting.signal.aborted) return undefined;
      waiting.abort();
      return work().then(done, fail);
    };
    for (let number = 0; number < MOST_ANSWERS; number++) {
      locks.request(`mlx-mtp answer ${number}`, { signal: waiting.signal }, take).catch(() => {});
    }
    setTimeout(() => waiting.signal.aborted || onWait(), 200);
  });
}
