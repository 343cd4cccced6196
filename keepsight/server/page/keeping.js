// When conversations are written to the browser's database, and how they come back.

import { apiKey } from "./api.js";
import { Picture } from "./pictures.js";
import { freshId, openStore, ownerOf } from "./store.js";
import { Talk } from "./talk.js";

const OFF = "keepsight-keep", SHOWN = "keepsight-talk", TAB = "keepsight-tab";
const SOON = 400; // ms

/** Whether conversations are kept in this browser. */
export const isKeeping = () => localStorage.getItem(OFF) !== "no";

/** Whose conversations are shown: those of the key that is given. */
export const owner = () => ownerOf(apiKey());

/** Keeps conversations. `trouble(words)` is told when the browser will not. */
export class Keeper {
  constructor(trouble) {
    this.trouble = trouble;
    this.changed = new Set();
    this.timer = 0;
    this.last = sessionStorage.getItem(SHOWN); // what this tab showed before it was loaded anew
    this.opened = openStore();
    if (!isKeeping()) this.try((store) => store.clear(), true); // a page closed while it was deleting
    if (!sessionStorage.getItem(TAB)) sessionStorage.setItem(TAB, freshId());
    addEventListener("pagehide", () => this.flush());
  }

  /** The conversations of the key, unread, and the one that this tab showed. */
  async all() {
    const rows = (isKeeping() && (await (await this.opened)?.talks(owner()))) || [];
    const talks = rows.map((row) => new Talk(row.owner, row));
    const shown = talks.find((talk) => talk.id === this.last);
    this.last = null;
    return { talks, shown };
  }

  /** Read the turns of a conversation that has them still in the database. */
  async read(talk) {
    if (!talk.kept) return;
    const { turns, pictures } = await (await this.opened).rows(talk.id);
    talk.fill(talk.kept.chosen, turns, new Map(pictures.map((row) => [row.id, Picture.of(row)])));
  }

  /** A conversation is shown in this tab, and will be again when the page is loaded anew. */
  show(talk) {
    sessionStorage.setItem(SHOWN, talk.id);
  }

  /** A conversation has changed: write it soon. */
  soon(talk) {
    if (talk.kept || !talk.root.children.length) return;
    this.changed.add(talk);
    this.timer ||= setTimeout(() => this.flush(), SOON);
  }

  async flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    const talks = [...this.changed];
    this.changed.clear();
    const rows = talks.map((talk) => talk.rows());
    await this.try((store) => Promise.all(rows.map((row) => store.write(...row))));
  }

  async remove(talk) {
    this.changed.delete(talk);
    await this.try((store) => store.remove(talk.id));
  }

  /** Keep conversations from now on, or delete what is kept and keep nothing. */
  async turn(on, talks) {
    if (on === isKeeping()) return;
    if (on) {
      localStorage.removeItem(OFF);
      for (const talk of talks) this.soon(talk);
      return;
    }
    for (const talk of talks) await this.read(talk); // what is open stays in the page
    localStorage.setItem(OFF, "no"); // first: a turn that ends while rows are deleted writes none
    this.changed.clear();
    await this.try((store) => store.clear(), true);
  }

  /** The question that this tab was writing: { text, pictures }. */
  async draft() {
    const row = isKeeping() && (await (await this.opened)?.draft(sessionStorage.getItem(TAB)));
    return row ? { text: row.text, pictures: row.pictures.map(Picture.of) } : null;
  }

  writeDraft({ text, pictures }) {
    const row = { id: sessionStorage.getItem(TAB), at: Date.now(), text, pictures: pictures.map((picture) => picture.row()) };
    return this.try((store) => store.writeDraft(row));
  }

  async try(act, always = false) {
    const store = (always || isKeeping()) && (await this.opened);
    if (!store) return;
    try {
      await act(store);
    } catch (error) {
      const full = error?.name === "QuotaExceededError";
      this.trouble(`This browser ${full ? "has no room to keep" : "does not keep"} the conversation: download it from the menu before you close the page.`);
    }
  }
}
