// Conversations in this browser's own database, so that a page that is loaded anew has lost nothing.
// A conversation is a row, its pictures are rows beside it. Two tabs may write to one conversation:
// their turns are joined. What was deleted stays deleted, though an answer to it may end later.

import { apiKey } from "./api.js";
import { Picture } from "./pictures.js";
import { Talk, freshId } from "./talk.js";

const OFF = "keepsight-keep", SHOWN = "keepsight-talk", TAB = "keepsight-tab";
const SOON = 400, WEEK = 7 * 24 * 3600 * 1000; // ms
const ROOMS = ["talks", "pictures", "drafts"];

export const isKeeping = () => localStorage.getItem(OFF) !== "no";

/** Whose conversations are shown: a name for the key, from which no key can be read. */
export function owner() {
  let sum = apiKey() ? 0x811c9dc5 : 0; // FNV-1a: its 32 bits keep keys apart, and are far too few to find one by
  for (const byte of new TextEncoder().encode(apiKey())) sum = Math.imul(sum ^ byte, 0x01000193) >>> 0;
  return sum.toString(16);
}

const result = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = request.onblocked = () => failed(request.error ?? new Error("another tab has an older page open"));
});

async function open() {
  const asked = indexedDB.open("keepsight", 2);
  asked.onupgradeneeded = () => {
    for (const name of asked.result.objectStoreNames) asked.result.deleteObjectStore(name);
    for (const name of ROOMS) asked.result.createObjectStore(name, { keyPath: "id" }).createIndex("of", name === "talks" ? "owner" : "talk");
  };
  const database = await result(asked);
  database.onversionchange = () => database.close();
  return database;
}

/** Keeps conversations. `trouble(words)` is told when the browser will not. */
export class Keeper {
  constructor(trouble) {
    this.trouble = trouble;
    this.changed = new Set();
    this.known = new Set(); // ids of conversations and pictures that are, or were, in the database
    this.last = sessionStorage.getItem(SHOWN); // what this tab showed before it was loaded anew
    this.opened = open().catch(() => null); // where there is none, conversations live in the page
    if (!sessionStorage.getItem(TAB)) sessionStorage.setItem(TAB, freshId());
    if (!isKeeping()) this.clear(); // a page closed while it was deleting
    addEventListener("pagehide", () => this.flush());
  }

  /** The conversations of the key. */
  async all() {
    const rooms = isKeeping() && (await this.begin("readonly"));
    if (!rooms) return [];
    const [rows, pictures] = await Promise.all([result(rooms.talks.index("of").getAll(owner())), result(rooms.pictures.getAll())]);
    for (const { id } of [...rows, ...pictures]) this.known.add(id);
    const made = new Map(pictures.map((row) => [row.id, Picture.of(row)]));
    return rows.map((row) => Talk.of(row, made));
  }

  /** A conversation is shown in this tab, and will be again when the page is loaded anew. */
  show(talk) {
    sessionStorage.setItem(SHOWN, talk.id);
  }

  /** A conversation has changed: write it soon. */
  soon(talk) {
    if (!talk.root.children.length) return;
    this.changed.add(talk);
    this.timer ||= setTimeout(() => this.flush(), SOON);
  }

  async flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    const talks = [...this.changed];
    this.changed.clear();
    const written = await this.write((rooms) => Promise.all(talks.map((talk) => this.put(rooms, talk))));
    if (written) for (const { id } of talks.flatMap((talk) => [talk, ...talk.pictures()])) this.known.add(id);
  }

  async put(rooms, talk) {
    const row = talk.row(), now = await result(rooms.talks.get(talk.id));
    if (!now && this.known.has(talk.id)) return; // deleted here or in another tab
    const mine = new Set(row.turns.map((turn) => turn.id));
    row.turns.push(...(now?.turns ?? []).filter((turn) => !mine.has(turn.id)));
    rooms.talks.put(row);
    for (const picture of talk.pictures()) if (!this.known.has(picture.id)) rooms.pictures.put({ ...picture.row(), talk: talk.id });
  }

  async remove(talk) {
    this.changed.delete(talk);
    this.known.add(talk.id);
    await this.write(async (rooms) => {
      rooms.talks.delete(talk.id);
      for (const id of await result(rooms.pictures.index("of").getAllKeys(talk.id))) rooms.pictures.delete(id);
    });
  }

  /** Keep conversations from now on, or delete what is kept and keep nothing. */
  async turn(on, talks) {
    if (on === isKeeping()) return;
    if (on) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "no"); // first: a turn that ends while rows are deleted writes none
    if (on) talks.forEach((talk) => this.soon(talk));
    else await this.clear();
  }

  async clear() {
    this.changed.clear();
    this.known.clear();
    await this.write((rooms) => ROOMS.forEach((name) => rooms[name].clear()), true);
  }

  /** The question that this tab was writing: { text, pictures }. */
  async draft() {
    const rooms = isKeeping() && (await this.begin("readonly"));
    const row = rooms && (await result(rooms.drafts.get(sessionStorage.getItem(TAB))));
    return row && { text: row.text, pictures: row.pictures.map(Picture.of) };
  }

  writeDraft({ text, pictures }) {
    const row = { id: sessionStorage.getItem(TAB), at: Date.now(), text, pictures: pictures.map((picture) => picture.row()) };
    return this.write(async ({ drafts }) => {
      for (const old of await result(drafts.getAll())) if (old.at < row.at - WEEK) drafts.delete(old.id);
      if (text || pictures.length) drafts.put(row);
      else drafts.delete(row.id);
    });
  }

  /** The rooms of the database, in one transaction; null where there is none. */
  async begin(mode) {
    const transaction = (await this.opened)?.transaction(ROOMS, mode);
    return transaction && Object.fromEntries([["transaction", transaction], ...ROOMS.map((name) => [name, transaction.objectStore(name)])]);
  }

  /** Write in one transaction; whether it is written. */
  async write(act, always = false) {
    try {
      const rooms = (always || isKeeping()) && (await this.begin("readwrite"));
      if (!rooms) return false;
      const whole = new Promise((done, failed) => {
        rooms.transaction.oncomplete = done;
        rooms.transaction.onabort = () => failed(rooms.transaction.error);
      });
      await Promise.all([whole, act(rooms)]);
      return true;
    } catch (error) {
      const full = error?.name === "QuotaExceededError";
      this.trouble(`This browser ${full ? "has no room to keep" : "does not keep"} the conversation: download it before you close the page.`);
      return false;
    }
  }
}
