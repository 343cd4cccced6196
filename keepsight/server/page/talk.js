// A conversation as a tree: an edited question or an answer asked for again stands beside the
// earlier one, and one path through the tree is shown. This file knows nothing of the page.

import { freshId } from "./store.js";

let last = 0;

/** Milliseconds, and never the same ones twice: turns stand in the order in which they were made. */
const moment = () => (last = Math.max(last + 1, Date.now()));

/** One turn. `role` is "user" or "assistant". */
function turn(parent, role, fields) {
  return { id: freshId(), at: moment(), parent, role, text: "", children: [], chosen: null, ...fields };
}

export class Talk {
  /** Somebody's conversation; with `kept` (its row of the store) one whose turns are yet to be read. */
  constructor(owner = "", kept = null) {
    this.owner = owner;
    this.root = turn(null, "root", {});
    this.id = kept?.id ?? this.root.id;
    this.at = kept?.at ?? this.root.at;
    this.kept = kept;
  }

  /** Add a turn under another, and show it. */
  add(parent, role, fields) {
    const added = turn(parent, role, fields);
    parent.children.push(added);
    parent.chosen = added;
    this.at = added.at;
    return added;
  }

  /** Take a turn, and all that follows it, out of the tree. */
  remove(gone) {
    const { parent } = gone;
    parent.children = parent.children.filter((child) => child !== gone);
    if (parent.chosen === gone) parent.chosen = parent.children.at(-1) ?? null;
  }

  /** The turns that are shown. */
  path() {
    const turns = [];
    for (let at = this.root.chosen; at; at = at.chosen) turns.push(at);
    return turns;
  }

  /** The last turn that is shown; the root of an empty conversation. */
  leaf() {
    return this.path().at(-1) ?? this.root;
  }

  /** Show the branch `step` to the right (or left) of a turn. */
  step(from, step) {
    const { children } = from.parent;
    from.parent.chosen = children[children.indexOf(from) + step] ?? from;
  }

  /** Show nothing behind a turn: what is said next begins a branch. */
  endAt(at) {
    at.chosen = null;
  }

  /** Where a turn stands among its branches: [place from 1, how many]. */
  place(of) {
    const { children } = of.parent;
    return [children.indexOf(of) + 1, children.length];
  }

  /** The first words of a conversation. */
  title() {
    const first = this.root.chosen;
    if (!first) return this.kept?.title ?? "New conversation";
    const words = first.text.trim().split("\n")[0] || first.pictures[0]?.name || "New conversation";
    return words.length > 60 ? `${words.slice(0, 59)}…` : words;
  }

  /** Every turn of every branch. */
  turns() {
    const all = [], open = [...this.root.children];
    for (let at; (at = open.pop()); open.push(...at.children)) all.push(at);
    return all;
  }

  /** As rows of the store: [conversation, turns, pictures]. */
  rows() {
    const turns = this.turns(), pictures = new Map(turns.flatMap((one) => one.pictures ?? []).map((picture) => [picture.id, picture]));
    const talk = { id: this.id, owner: this.owner, at: this.at, title: this.title(), chosen: this.root.chosen?.id ?? null };
    return [talk, turns.map((one) => rowOf(one, this)), [...pictures.values()].map((picture) => ({ ...picture.row(), talk: this.id }))];
  }

  /** Take in rows that were read; `pictures` by their ids. */
  fill(chosen, rows, pictures) {
    const known = new Map([[this.id, this.root]]);
    for (const { id, parent, pictures: ids, chosen: _, talk: __, ...fields } of rows) {
      if (!known.has(parent)) continue; // of a turn that another tab took out
      const made = { ...turn(known.get(parent), fields.role, fields), id };
      if (ids) made.pictures = ids.map((one) => pictures.get(one)).filter(Boolean);
      if (made.running) Object.assign(made, { running: false, broken: true });
      made.parent.children.push(made);
      known.set(id, made);
    }
    for (const row of rows) if (known.has(row.id)) known.get(row.id).chosen = known.get(row.chosen) ?? null;
    this.root.chosen = known.get(chosen) ?? this.root.children.at(-1) ?? null;
    this.kept = null;
  }
}

function rowOf({ parent, children: _, chosen, pictures, error, ...fields }, talk) {
  const row = { ...fields, talk: talk.id, parent: parent === talk.root ? talk.id : parent.id, chosen: chosen?.id ?? null };
  if (pictures) row.pictures = pictures.map((picture) => picture.id);
  if (error) row.error = { message: error.message, status: error.status, retryAfter: error.retryAfter };
  return JSON.parse(JSON.stringify(row));
}

/** What is shown of a conversation, as Markdown. */
export function asMarkdown(talk) {
  const parts = talk.path().map((one) => {
    const pictures = (one.pictures ?? []).map((picture) => `![${picture.name}](<${picture.name.replace(/[<>\n]/g, "_")}>)`).join("\n");
    return [`## ${one.role === "user" ? "You" : one.told.model || "Model"}`, pictures, one.text].filter(Boolean).join("\n\n");
  });
  return `# ${talk.title()}\n\n${parts.join("\n\n")}\n`;
}

/** The turns from the first to this one. */
export function lineage(of) {
  const turns = [];
  for (let at = of; at.parent; at = at.parent) turns.unshift(at);
  return turns;
}

/** Turns as the API wants them. An answer that never came is left out. */
export async function messages(turns, system) {
  const said = turns.filter((one) => one.role === "user" || one.text);
  const list = await Promise.all(said.map(message));
  return system ? [{ role: "system", content: system }, ...list] : list;
}

async function message(one) {
  if (one.role === "assistant") return { role: "assistant", content: one.text };
  if (!one.pictures.length) return { role: "user", content: one.text };
  const parts = await Promise.all(one.pictures.map((picture) => picture.part()));
  if (one.text) parts.push({ type: "text", text: one.text });
  return { role: "user", content: parts };
}
