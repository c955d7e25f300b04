// Requests to the server that this page came from.
const KEY = "penstock.key";
const LOST = "The connection was lost before the answer was complete. Is the server running?";
let remembered = "";

export function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? remembered;
  } catch {
    return remembered;
  }
}

export function saveKey(key) {
  remembered = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // kept as long as the page
  }
}

// An error answer. `status` is 0 if the server cannot be reached.
export class RequestError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function send(path, { body, signal } = {}) {
  const headers = {};
  const key = readKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const text = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(path, { method: text === undefined ? "GET" : "POST", headers, body: text, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server cannot be reached. Is it running?", 0);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const error = answer?.error;
  throw new RequestError(String(error?.message ?? `The server answered ${response.status}.`), response.status, error?.code);
}

export async function fetchJSON(path, options) {
  return (await send(path, options)).json();
}

// The names of the server's models, loaded or not, without aliases.
export async function fetchModels() {
  return (await fetchJSON("/v1/models")).data.filter(({ id, root }) => id === root).map(({ id }) => id);
}

// The facts of a model, by default of the first one. One that is loaded by its first request has only its name.
export async function fetchServer(name, models) {
  try {
    return await fetchJSON(name ? `/server_info?model=${encodeURIComponent(name)}` : "/server_info");
  } catch (error) {
    const model = name || models[0];
    if (error.status !== 404 || !models.includes(model)) throw error;
    return { model, absent: true, chat: true, tools: true, reasoning: false, embeddings: false, aliases: [], defaults: {}, ranges: {}, limits: {} };
  }
}

// The events of a stream, parsed. An error event is thrown.
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new RequestError(LOST, 0);
      });
      if (done) throw new RequestError(LOST, 0);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new RequestError(String(event.error.message), event.error.status ?? 500, event.error.code);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a reader that leaves early ends the request
  }
}
