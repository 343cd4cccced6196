// What a model says, as elements. Its text is hostile: only what DOMPurify lets through reaches the
// page, and that is what is named here.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import { html } from "./markdown.js";

const { DOMPurify } = globalThis;
const LONGEST = 200_000; // characters
const ALLOWED = {
  ALLOWED_TAGS: `p br h3 h4 h5 h6 hr pre blockquote ul ol li table thead tbody tr th td code strong em del a
    math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts
    mprescripts none mtable mtr mtd mstyle mpadded mphantom menclose #text`.split(/\s+/),
  ALLOWED_ATTR: `href start align class display displaystyle scriptlevel mathvariant stretchy fence separator largeop
    movablelimits symmetric accent accentunder minsize maxsize width height depth lspace rspace voffset linethickness
    columnalign columnspacing columnlines rowspacing rowlines notation`.split(/\s+/),
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return node.namespaceURI.endsWith("MathML") && node.removeAttribute("href");
  const address = node.getAttribute("href") ?? "";
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return node.removeAttribute("href");
  const safe = { rel: "noopener noreferrer nofollow", target: "_blank", title: address };
  for (const [name, value] of Object.entries(safe)) node.setAttribute(name, value);
});

/** Elements for a text. */
export function prose(text) {
  if (text.length > LONGEST) return [el("p", { class: "plain", text })];
  let made;
  try {
    made = DOMPurify.sanitize(html(text), ALLOWED);
  } catch {
    return [el("p", { class: "plain", text })]; // such as lists a thousand deep
  }
  for (const table of made.querySelectorAll("table")) {
    const room = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(room);
    room.append(table);
  }
  for (const pre of made.querySelectorAll("pre")) {
    const language = pre.firstElementChild?.className.match(/language-(\S+)/)?.[1] ?? "";
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), language));
  }
  return [made];
}

function codeBlock(text, language) {
  return el("div", { class: "code" },
    el("div", { class: "bar" }, el("span", { text: language }), copyButton(() => text, "Copy the code")),
    el("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, el("code", { text })));
}
