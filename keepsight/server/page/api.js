// The server's API: requests with the key, errors in words, and streams of events.

const KEY = "keepsight-key";

/** What the server, or the way to it, says is wrong. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

/** The key, which this tab alone keeps. */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** A request; its JSON, or an ApiError. With a body it is a POST. */
export async function call(path, body, signal) {
  const response = await send(path, body, signal);
  return response.json();
}

/** A request whose answer is a file. */
export async function file(path, body) {
  return (await send(path, body)).blob();
}

/** A request whose answer is text. */
export async function text(path) {
  return (await send(path)).text();
}

/** A request whose answer is a stream of events; each one's data, parsed. */
export async function* events(path, body, signal) {
  const response = await send(path, body, signal);
  let left = "";
  for await (const text of texts(response.body, signal)) {
    const parts = (left + text).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = dataOf(part);
      if (data === "[DONE]") return;
      if (data) yield checked(JSON.parse(data));
    }
  }
  throw new ApiError("The server broke off before the answer was whole.", { code: "broken_off" });
}

async function* texts(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw signal?.aborted ? error : new ApiError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

function checked(data) {
  if (data.error) throw new ApiError(data.error.message, data.error);
  return data;
}

async function send(path, body, signal) {
  const headers = {};
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const about = { status: response.status, retryAfter };
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...about, param: error.param, code: error.code });
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, about);
  }
}
