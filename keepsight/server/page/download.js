// A conversation as a file: Markdown to read, `.keep` to go on with in `keepsight chat` or Python.

import { file } from "./api.js";
import { announce, el } from "./dom.js";
import { systemPrompt } from "./settings.js";
import { asMarkdown, messages } from "./talk.js";

export function saveMarkdown(talk) {
  save(new Blob([asMarkdown(talk)], { type: "text/markdown" }), talk, "md");
}

/** What the server remembers of it, with features and states: what is not there yet is computed. */
export async function saveKeep(talk, model) {
  announce("Asking the server for the file");
  const body = { model, messages: await messages(talk.path(), systemPrompt()) };
  save(await file("v1/cache/save", body), talk, "keep");
}

function save(blob, talk, ending) {
  const name = talk.title().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
  const link = el("a", { href: URL.createObjectURL(blob), download: `${name}.${ending}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  announce(`Saved as ${link.download}`);
}
