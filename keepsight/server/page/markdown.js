// Markdown and formulas as HTML, by marked and Temml. What comes out is for DOMPurify: see prose.js.
// HTML in a text stays text, and so do pictures, which would be fetched.

import { Marked } from "./vendor/marked.esm.js";

const { temml } = globalThis;
const LONGEST_FORMULA = 4000; // characters

const escaped = (text) => text.replace(/[&<>"]/g, (mark) => `&#${mark.charCodeAt(0)};`);

/** A formula as MathML; one that cannot be read is shown as it is written. */
function formula({ text, shown }) {
  try {
    return temml.renderToString(text, { displayMode: shown, throwOnError: true, trust: false, maxExpand: 500, maxSize: [20, 20] });
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

/** A text as HTML that nobody has looked through yet. */
export const html = (text) => reader.parse(text);
