// A conversation as a tree: an edited question or an answer asked for again stands beside the
// earlier one, and one path through the tree is shown.

let last = 0;

/** Milliseconds, and never the same ones twice: turns stand in the order in which they were made. */
const moment = () => (last = Math.max(last + 1, Date.now()));

/** A random name, also where the page has no secure origin. */
export const freshId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Talk {
  constructor(owner) {
    this.owner = owner;
    this.root = { id: freshId(), children: [], chosen: null };
    this.id = this.root.id;
    this.at = moment();
  }

  /** Add a turn ("user" or "assistant") under another, and show it. */
  add(parent, role, fields) {
    const turn = { id: freshId(), at: moment(), role, text: "", ...fields, parent, children: [], chosen: null };
    parent.children.push(turn);
    parent.chosen = turn;
    this.at = turn.at;
    return turn;
  }

  /** The turns that are shown. */
  path() {
    const turns = [];
    for (let at = this.root.chosen; at; at = at.chosen) turns.push(at);
    return turns;
  }

  /** Every turn of every branch. */
  turns() {
    const all = [...this.root.children];
    for (const turn of all) all.push(...turn.children); // it grows while it is gone through
    return all;
  }

  pictures() {
    return [...new Set(this.turns().flatMap((turn) => turn.pictures ?? []))];
  }

  /** The first words. */
  title() {
    const first = this.root.chosen;
    const words = first?.text.trim().split("\n")[0] || first?.pictures[0]?.name || "New conversation";
    return words.length > 60 ? `${words.slice(0, 59)}…` : words;
  }

  /** As plain data, to be kept. */
  row() {
    const turns = this.turns().map(({ parent, children: _, chosen, pictures, error, ...fields }) => ({
      ...fields, parent: parent.id, chosen: chosen?.id ?? null, pictures: pictures?.map((picture) => picture.id),
      error: error && { message: error.message, status: error.status, retryAfter: error.retryAfter },
    }));
    return { id: this.id, owner: this.owner, at: this.at, chosen: this.root.chosen?.id ?? null, turns };
  }

  /** From what was kept; `pictures` by their ids. */
  static of({ id, owner, at, chosen, turns }, pictures) {
    const talk = new Talk(owner);
    const known = new Map([[id, Object.assign(talk.root, { id })]]);
    for (const { pictures: ids, parent, ...fields } of turns.toSorted((a, b) => a.at - b.at)) {
      const turn = talk.add(known.get(parent), fields.role, { ...fields, pictures: ids?.map((one) => pictures.get(one)).filter(Boolean) });
      if (turn.running) Object.assign(turn, { running: false, broken: true });
      known.set(turn.id, Object.assign(turn, { at: fields.at }));
    }
    for (const turn of turns) known.get(turn.id).chosen = known.get(turn.chosen) ?? null;
    talk.root.chosen = known.get(chosen) ?? talk.root.children.at(-1) ?? null;
    return Object.assign(talk, { id, at });
  }

  markdown() {
    const parts = this.path().map((turn) => {
      const pictures = (turn.pictures ?? []).map(({ name }) => `![${name}](<${name.replace(/[<>\n]/g, "_")}>)`).join("\n");
      return [`## ${turn.role === "user" ? "You" : turn.told.model || "Model"}`, pictures, turn.text].filter(Boolean).join("\n\n");
    });
    return `# ${this.title()}\n\n${parts.join("\n\n")}\n`;
  }
}

/** The turns from the first to this one. */
export function lineage(turn) {
  return turn.parent ? [...lineage(turn.parent), turn] : [];
}

/** Turns as the API wants them. An answer that never came is left out. */
export async function messages(turns, system) {
  const said = turns.filter((turn) => turn.role === "user" || turn.text).map(async ({ role, text, pictures = [] }) => {
    if (!pictures.length) return { role, content: text };
    const parts = await Promise.all(pictures.map((picture) => picture.part()));
    return { role, content: text ? [...parts, { type: "text", text }] : parts };
  });
  return [...(system ? [{ role: "system", content: system }] : []), ...(await Promise.all(said))];
}
