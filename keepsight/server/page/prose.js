// The little of Markdown that answers use (code, bold, lists), as elements. Links and pictures that
// a model writes stay text: nothing is loaded because an answer says so.

import { el } from "./dom.js";

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;
const ITEM = /^\s*(?:[-*•]|\d+[.)])\s+/;

/** Elements for a text. */
export function prose(text) {
  const made = [];
  for (const [spot, piece] of text.split(/^```[^\n]*\n?/m).entries()) {
    if (spot % 2) made.push(el("pre", { tabindex: "0" }, el("code", { text: piece.replace(/\n$/, "") })));
    else made.push(...blocks(piece));
  }
  return made;
}

function blocks(text) {
  return text.split(/\n{2,}/).map((block) => block.replace(/^\n+|\s+$/g, "")).filter(Boolean).map(block);
}

function block(text) {
  const lines = text.split("\n");
  if (!lines.every((line) => ITEM.test(line))) return el("p", {}, ...inline(text));
  const items = lines.map((line) => el("li", {}, ...inline(line.replace(ITEM, ""))));
  const numbered = /^\s*(\d+)/.exec(text);
  return numbered ? el("ol", { start: numbered[1] }, ...items) : el("ul", {}, ...items);
}

function inline(text) {
  return text.split(INLINE).filter(Boolean).map((part) => {
    if (/^`.+`$/.test(part)) return el("code", { text: part.slice(1, -1) });
    if (/^\*\*.+\*\*$/.test(part)) return el("strong", { text: part.slice(2, -2) });
    return part;
  });
}
