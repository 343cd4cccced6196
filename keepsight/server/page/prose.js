// What a model says, as elements: the records of `markdown.js`, made node by node. Text is only ever
// text, and the tags are those named here, whatever a record says.

import { copyButton } from "./copy.js";
import { el, math } from "./dom.js";
import { markdown } from "./markdown.js";

const HTML = new Set("p h3 h4 h5 h6 hr pre blockquote ul ol li table thead tbody tr th td code strong em del span".split(" "));
const MATH = new Set(`math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover
  mtable mtr mtd`.split(/\s+/));

/** Elements for a text. */
export const prose = (text) => markdown(text).map(made);

function made(record) {
  if (typeof record === "string") return record;
  const { tag, props, kids } = record;
  if (tag === "pre") return codeBlock(kids[0] ?? "", props.language);
  if (MATH.has(tag)) return math(tag, props, ...kids.map(made));
  if (!HTML.has(tag)) throw new Error(`no such tag: ${tag}`);
  const element = el(tag, props, ...kids.map(made));
  return tag === "table" ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, element) : element;
}

function codeBlock(text, language) {
  return el("div", { class: "code" },
    el("div", { class: "bar" }, el("span", { text: language || "" }), copyButton(() => text, "Copy the code")),
    el("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, el("code", { text })));
}
