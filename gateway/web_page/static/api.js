// Calls of the gateway: with the operator's key where there is one, errors with the gateway's own words.

const KEY_PLACE = "chipmesh-key";
let ownKey = "";
try {
  ownKey = sessionStorage.getItem(KEY_PLACE) ?? "";
} catch {
  ownKey = "";
}

export function hasKey() {
  return ownKey !== "";
}

/** Kept for this tab only. */
export function setKey(key) {
  ownKey = key.trim();
  try {
    if (ownKey) sessionStorage.setItem(KEY_PLACE, ownKey);
    else sessionStorage.removeItem(KEY_PLACE);
  } catch {
    return;
  }
}

export class CallError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }

  get isRefusal() {
    return this.status === 401 || this.status === 403;
  }
}

export async function get(path) {
  return (await call(path)).json();
}

export async function post(path, body) {
  return (await call(path, { body })).json();
}

/** Reads a stream of events. onOpen gets the response; onEvent each event's data: JSON, or "[DONE]". */
export async function stream(path, { body, signal, onOpen = () => {}, onEvent }) {
  const response = await call(path, { body, signal });
  onOpen(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new CallError("The connection broke before the end.");
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) onEvent(part === "data: [DONE]" ? "[DONE]" : JSON.parse(part.slice(6)));
    }
  }
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (ownKey) headers.authorization = `Bearer ${ownKey}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("The gateway does not answer.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = {};
  }
  const words = error.message ?? `The gateway answers with status ${response.status}.`;
  return new CallError(words, { status: response.status, code: error.code ?? "" });
}
