// A conversation as a tree: an edited question or an answer asked for again stands beside the
// earlier one, and one path through the tree is shown. This file knows nothing of the page.

let made = 0;

/** One turn. `role` is "user" or "assistant". */
function turn(parent, role, fields) {
  return { id: ++made, parent, role, text: "", children: [], chosen: null, ...fields };
}

export class Talk {
  constructor() {
    this.root = turn(null, "root", {});
    this.number = 0;
  }

  /** Add a turn under another, and show it. */
  add(parent, role, fields) {
    const added = turn(parent, role, fields);
    parent.children.push(added);
    parent.chosen = added;
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
    const first = this.root.chosen?.text.trim().split("\n")[0] ?? "";
    if (!first) return `Talk ${this.number}`;
    return first.length > 32 ? `${first.slice(0, 31)}…` : first;
  }
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
