// The server's API: requests with the key, errors in words, and streams of events.

const KEY = "keepsight-key";

/** What the server, or the way to it, says is wrong. */
export class ApiError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

/** The key, which this tab alone keeps. */
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** A response that is in order, or an ApiError. With a body it is a POST. */
export async function send(path, body, signal) {
  const headers = { ...(apiKey() && { authorization: `Bearer ${apiKey()}` }), ...(body && { "content-type": "application/json" }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ApiError(told?.error?.message ?? `The server answered with status ${response.status}.`,
    { status: response.status, retryAfter: Number(response.headers.get("retry-after")) || null });
}

export const call = async (path, body) => (await send(path, body)).json();

/** The data of each event of a stream. */
export async function* events(path, body, signal) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let left = ""; ;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("The server broke off before the answer was whole.");
      const parts = (left + value).split(/\r?\n\r?\n/);
      left = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n").trim();
        if (data === "[DONE]") return;
        if (data) yield checked(JSON.parse(data));
      }
    }
  } catch (error) {
    throw signal.aborted || error instanceof ApiError ? error : new ApiError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function checked(data) {
  if (data.error) throw new ApiError(data.error.message, data.error);
  return data;
}
