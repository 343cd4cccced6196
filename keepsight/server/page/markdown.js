// Markdown as answers use it, read into plain records: { tag, props, kids }. No name of a tag or an
// attribute comes from the text, and nothing here knows a page: `prose.js` makes elements of it.
//
// Read: headings, paragraphs, lists in lists, quotes, tables, code, rules, bold, italic, struck out,
// formulas between $ or \( \). Links stay text beside their address, and pictures and HTML stay as they
// are written: nothing is loaded, and nothing leads away, because an answer says so. Every step looks
// at a character a bounded number of times, so that no answer can hold up the page.

import { formula } from "./formula.js";

const DEEPEST = 8; // lists and quotes in one another; what lies deeper is text
const MOST_COLUMNS = 64;
const LONGEST_FORMULA = 64; // lines
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+•]|\d{1,9}[.)])( +)(?=\S)/;
const SHOWN = { $$: "$$", "\\[": "\\]" }; // how formulas with lines of their own begin and end

const node = (tag, props, ...kids) => ({ tag, props, kids });

/** The records of a text. */
export function markdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length; ) {
    const [kid, next] = block(lines, at, depth);
    if (kid) made.push(kid);
    at = next;
  }
  return made;
}

/** The block that begins at a line, and the line behind it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const shallow = depth < DEEPEST;
  return fenced(lines, at) ?? heading(line, at) ?? ruled(line, at) ?? shown(lines, at) ?? table(lines, at)
    ?? (shallow ? quote(lines, at, depth) ?? list(lines, at, depth) : null) ?? paragraph(lines, at, shallow);
}

/** Whether a line cannot go on with the paragraph above it. */
function interrupts(lines, at, shallow) {
  const line = lines[at];
  const item = shallow && ITEM.exec(line);
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (shallow && QUOTE.test(line))
    || (item && !/^(?!1[.)])\d/.test(item[2])) || opensShown(line) || isTable(lines, at);
}

function paragraph(lines, at, shallow) {
  let end = at + 1;
  while (end < lines.length && !interrupts(lines, end, shallow)) end += 1;
  return [node("p", {}, ...inline(lines.slice(at, end).map((line) => line.trim()).join("\n"))), end];
}

function fenced(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, marks, language] = open;
  const closes = (line) => line.trim().startsWith(marks) && !line.trim().replaceAll(marks[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1; // of an answer that still comes: to its end
  return [node("pre", { language }, lines.slice(at + 1, end).join("\n")), end + 1];
}

function heading(line, at) {
  const found = HEADING.exec(line);
  if (!found) return null;
  // Above them stands who speaks, as a heading of the second level.
  const tag = `h${Math.min(6, Math.max(3, found[1].length + 1))}`;
  return [node(tag, {}, ...inline(found[2].trimEnd().replace(/ #+$/, ""))), at + 1];
}

const ruled = (line, at) => (RULE.test(line) ? [node("hr", {}), at + 1] : null);

const opensShown = (line) => /^ {0,3}(?:\$\$|\\\[)/.test(line);

function shown(lines, at) {
  if (!opensShown(lines[at])) return null;
  const closing = SHOWN[lines[at].trim().slice(0, 2)];
  const own = [lines[at].trim().slice(2)];
  while (!own.at(-1).includes(closing)) {
    const line = lines[at + own.length];
    if (!line?.trim() || own.length === LONGEST_FORMULA) return null;
    own.push(line);
  }
  const text = own.join("\n"), stop = text.indexOf(closing);
  return text.slice(stop + 2).trim() ? null : [formula(text.slice(0, stop), true), at + own.length];
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [node("blockquote", {}, ...blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1)), end];
}

// -- lists ---------------------------------------------------------------------------------------

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const numbered = /^\d/.test(first[2]), items = [];
  let end = at;
  for (;;) {
    const found = ITEM.exec(lines[end] ?? "");
    if (!found || found[1].length > first[1].length + 3 || /^\d/.test(found[2]) !== numbered || RULE.test(lines[end])) break;
    const [item, next] = listItem(lines, end, found, depth);
    items.push(item);
    end = next;
  }
  if (!items.length) return null;
  const start = numbered ? { start: String(parseInt(first[2], 10)) } : {};
  return [node(numbered ? "ol" : "ul", start, ...items), end];
}

/** One item: its line, and those that are indented under it or go on with its words. */
function listItem(lines, at, found, depth) {
  const inside = Math.min(found[0].length, found[1].length + 5), own = [lines[at].slice(found[0].length)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end], indent = line.length - line.trimStart().length;
    if (line.trim() && (indent >= inside || (indent > found[1].length && ITEM.test(line)))) own.push(line.slice(Math.min(indent, inside)));
    else if (line.trim()) {
      if (!lines[end - 1].trim() || ITEM.test(line) || interrupts(lines, end, true)) break;
      own.push(line.trimStart());
    } else if (/^ +\S/.test(lines[end + 1] ?? "") && lines[end + 1].search(/\S/) > found[1].length) own.push("");
    else if (ITEM.exec(lines[end + 1] ?? "")?.[1].length === found[1].length) continue; // an empty line between items
    else break;
  }
  const task = /^\[([ xX])\] +/.exec(own[0]);
  if (task) own[0] = `${task[1] === " " ? "☐" : "☑"} ${own[0].slice(task[0].length)}`;
  const kids = blocks(own, depth + 1);
  const tight = kids[0]?.tag === "p" && !own.includes("");
  return [node("li", {}, ...(tight ? [...kids[0].kids, ...kids.slice(1)] : kids)), end];
}

// -- tables --------------------------------------------------------------------------------------

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const marks = cells(lines[at + 1]);
  return marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === cells(lines[at]).length;
}

function table(lines, at) {
  if (!isTable(lines, at)) return null;
  const sides = cells(lines[at + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => {
    const found = cells(line);
    return node("tr", {}, ...sides.map((side, i) => node(tag, { class: side, scope: tag === "th" ? "col" : null }, ...inline(found[i] ?? ""))));
  };
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [node("table", {}, node("thead", {}, row(lines[at], "th")), node("tbody", {}, ...body)), end];
}

/** The cells of a line; a bar in code or behind a backslash is no border. */
function cells(line) {
  const found = line.trim().replace(/^\|/, "").match(/(?:\\.|`[^`]*`|[^|])+|\|/g) ?? [];
  const made = [""];
  for (const piece of found) {
    if (piece === "|") made.push("");
    else made[made.length - 1] += piece;
  }
  if (made.length > 1 && !made.at(-1).trim()) made.pop();
  return made.slice(0, MOST_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// -- within a line ---------------------------------------------------------------------------------

const TOKEN = /\\[([]|\\[!-/:-@[-`{-~]|`+|\*{3}(?!\*)|\*\*|__|~~|[*_$]|!?\[/g;
const LINK = /\[([^[\]\n]*)\]\(([^()\s]*)\)/y;
const STYLES = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

function inline(text, depth = 0) {
  const made = [], hopeless = new Set(); // what has no end in the rest of this text
  let plain = "", at = 0;
  const put = (kid) => {
    if (plain) made.push(plain);
    plain = "";
    made.push(kid);
  };
  for (let token; (token = nextToken(text, at)); ) {
    plain += text.slice(at, token.index);
    const [mark] = token;
    const found = hopeless.has(mark) ? null : piece(text, token.index, mark, depth, hopeless);
    if (found) put(found.kid);
    else plain += /^\\[^([]/.test(mark) ? mark[1] : mark;
    at = found ? found.end : token.index + mark.length;
  }
  plain += text.slice(at);
  if (plain) made.push(plain);
  return made;
}

/** The next mark from here on. */
function nextToken(text, from) {
  TOKEN.lastIndex = from;
  return TOKEN.exec(text);
}

/** What a mark begins, and where it ends; null where it is only a character. */
function piece(text, at, mark, depth, hopeless) {
  if (mark[0] === "`") return codeSpan(text, at, mark, hopeless);
  if (mark === "$" || mark === "\\(" || mark === "\\[") return inlineFormula(text, at, mark, hopeless);
  if (mark === "[") return link(text, at);
  if (mark === "***") return bothStyles(text, at, depth, hopeless);
  return mark in STYLES && depth < DEEPEST ? styled(text, at, mark, depth, hopeless) : null;
}

function codeSpan(text, at, mark, hopeless) {
  for (let end = text.indexOf(mark, at + mark.length); end >= 0; end = text.indexOf(mark, end)) {
    let behind = end + mark.length;
    while (text[behind] === "`") behind += 1;
    if (behind - end === mark.length) {
      const inside = text.slice(at + mark.length, end).replaceAll("\n", " ");
      return { kid: node("code", {}, inside.replace(/^ (.*\S.*) $/, "$1")), end: behind };
    }
    end = behind;
  }
  hopeless.add(mark);
  return null;
}

/** $ is money unless it touches what is inside, and what follows is no digit. */
function inlineFormula(text, at, mark, hopeless) {
  const wide = text.startsWith("$$", at);
  const open = wide ? "$$" : mark, close = wide ? "$$" : { "\\(": "\\)", "\\[": "\\]", $: "$" }[mark];
  const end = text.indexOf(close, at + open.length);
  if (end < 0) return hopeless.add(mark), null;
  const inside = text.slice(at + open.length, end), behind = end + close.length;
  if (!inside.trim() || (open === "$" && (/^\s|[\s\\]$/.test(inside) || /\d/.test(text[behind] ?? "")))) return null;
  return { kid: formula(inside, wide || mark === "\\["), end: behind };
}

function link(text, at) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  if (!found) return null;
  const [whole, words, address] = found;
  const named = words && words !== address;
  const kids = named ? [`${words} `, node("span", { class: "address" }, `(${address})`)] : [address];
  return { kid: node("span", {}, ...kids), end: at + whole.length };
}

function styled(text, at, mark, depth, hopeless) {
  const from = at + mark.length;
  if (/^(\s|$)/.test(text.slice(from, from + 1))) return null;
  if (mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) return null;
  const end = closing(text, from, mark);
  if (end < 0) return hopeless.add(mark), null;
  return { kid: node(STYLES[mark], {}, ...inline(text.slice(from, end), depth + 1)), end: end + mark.length };
}

/** Bold and italic at once. */
function bothStyles(text, at, depth, hopeless) {
  const end = depth < DEEPEST ? text.indexOf("***", at + 4) : -1;
  if (end < 0) return hopeless.add("***"), null;
  return { kid: node("strong", {}, node("em", {}, ...inline(text.slice(at + 3, end), depth + 2))), end: end + 3 };
}

/** Where a style ends: the same mark, touching what is inside, and not within code. */
function closing(text, from, mark) {
  const marks = mark.length === 1 ? new RegExp(`\\\\.|\`[^\`\\n]*\`|\\${mark}+`, "g") : new RegExp(`\\\\.|\`[^\`\\n]*\`|${mark.replaceAll("*", "\\*")}`, "g");
  marks.lastIndex = from;
  for (let found; (found = marks.exec(text)); ) {
    const [run] = found, end = found.index;
    if (run[0] !== mark[0] || end === from || /\s/.test(text[end - 1])) continue;
    if (mark.length === 1 && run.length === 2) continue; // of another style
    const spot = end + run.length - mark.length;
    if (mark[0] !== "_" || !/[\p{L}\p{N}]/u.test(text[spot + mark.length] ?? "")) return spot;
  }
  return -1;
}
