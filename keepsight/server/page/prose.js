// What a model says, as elements. Its text is hostile: marked reads it (HTML stays text, pictures stay
// text), Temml makes formulas of it, and only what DOMPurify lets through reaches the page.

import { copyButton, el } from "./dom.js";
import { Marked } from "./vendor/marked.esm.js";

const { DOMPurify, temml } = globalThis;
const LONGEST = 200_000, LONGEST_FORMULA = 4000; // characters
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
  for (const [name, value] of Object.entries({ rel: "noopener noreferrer nofollow", target: "_blank", title: address })) node.setAttribute(name, value);
});

const escaped = (text) => text.replace(/[&<>"]/g, (mark) => `&#${mark.charCodeAt(0)};`);

/** A formula as MathML; one that cannot be read is shown as it is written. */
function formula({ text, shown }) {
  try {
    const made = temml.renderToString(text, { displayMode: shown, throwOnError: true, trust: false, maxExpand: 500, maxSize: [20, 20] });
    return made.replace(/ style="[^"]*"/g, ""); // which the page's policy refuses
  } catch {
    return shown ? `<pre><code>${escaped(text)}</code></pre>` : `<code>${escaped(text)}</code>`;
  }
}

/** Formulas between dollars, \( \) and \[ \], in a line or as lines of their own. */
function formulas(level, start, ...patterns) {
  const name = `${level}-formula`;
  return {
    name, level, renderer: formula,
    start: (text) => text.slice(0, LONGEST_FORMULA).match(start)?.index,
    tokenizer(text) {
      for (const [pattern, shown] of patterns) {
        const found = pattern.exec(text.slice(0, LONGEST_FORMULA));
        if (found) return { type: name, raw: found[0], text: found[1].trim(), shown };
      }
    },
  };
}

const reader = new Marked({
  breaks: true,
  extensions: [
    formulas("block", /^ {0,3}(?:\$\$|\\\[)/m, [/^ {0,3}\$\$((?:[^$]|\\\$)+?)\$\$ *(?:\n|$)/, true], [/^ {0,3}\\\[([^]+?)\\\] *(?:\n|$)/, true]),
    formulas("inline", /\$|\\[([]/, [/^\$\$((?:[^$]|\\\$)+?)\$\$/, true], [/^\\\[([^]+?)\\\]/, true], [/^\\\(([^]+?)\\\)/, false],
      [/^\$(?!\s)((?:\\.|[^$\\\n])+?)(?<![\s\\])\$(?!\d)/, false]), // $5 and $6 is money
  ],
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text, href }) => escaped(`![${text}](${href})`),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) { // above it stands who speaks, as a heading of the second level
      const tag = `h${Math.min(6, depth + 2)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
});

/** Elements for a text. */
export function prose(text) {
  if (text.length > LONGEST) return el("p", { class: "plain", text });
  let made;
  try {
    made = DOMPurify.sanitize(reader.parse(text), ALLOWED);
  } catch {
    return el("p", { class: "plain", text }); // such as lists a thousand deep
  }
  for (const table of made.querySelectorAll("table")) {
    const room = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(room);
    room.append(table);
  }
  for (const pre of made.querySelectorAll("pre")) {
    const code = pre.textContent.replace(/\n$/, ""), language = pre.firstElementChild?.className.match(/language-(\S+)/)?.[1] ?? "";
    pre.replaceWith(el("div", { class: "code" },
      el("div", { class: "bar" }, el("span", { text: language }), copyButton(() => code, "Copy the code")),
      el("pre", { tabindex: "0", role: "region", "aria-label": `Code ${language}` }, el("code", { text: code }))));
  }
  return made;
}
