// Conversations in this browser's own database, so that a page that is loaded anew has them again.
// Every turn and every picture is a row of its own: two tabs that write to one conversation lose
// nothing of each other. Where a browser has no database for a page, conversations live in the page.

const NAME = "keepsight", VERSION = 1;
const WEEK = 7 * 24 * 3600 * 1000;

/** The database, or null where there is none for this page. */
export async function openStore() {
  try {
    const asked = indexedDB.open(NAME, VERSION);
    asked.onupgradeneeded = () => {
      const made = (name) => asked.result.createObjectStore(name, { keyPath: "id" });
      made("talks").createIndex("owner", "owner");
      for (const name of ["turns", "pictures"]) made(name).createIndex("talk", "talk");
      made("drafts");
    };
    return new Store(await result(asked));
  } catch {
    return null;
  }
}

/** Whose conversations these are: a name for a key, from which no key can be read. */
export function ownerOf(key) {
  if (!key) return "";
  let sum = 0x811c9dc5; // FNV-1a: its 32 bits keep keys apart, and are far too few to find one by
  for (const byte of new TextEncoder().encode(key)) sum = Math.imul(sum ^ byte, 0x01000193) >>> 0;
  return sum.toString(16);
}

/** A random name, also where the page has no secure origin. */
export const freshId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

const result = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
  request.onblocked = () => failed(new Error("another tab has an older page open"));
});

const finished = (transaction) => new Promise((done, failed) => {
  transaction.oncomplete = done;
  transaction.onerror = transaction.onabort = () => failed(transaction.error ?? new Error("not written"));
});

class Store {
  constructor(database) {
    this.database = database;
    this.written = new Map(); // talk -> its rows as they were last written or read: id -> JSON
    database.onversionchange = () => database.close();
  }

  /** What is known of somebody's conversations, the last used first. */
  async talks(owner) {
    const rows = await result(this.begin("readonly", "talks").objectStore("talks").index("owner").getAll(owner));
    return rows.sort((a, b) => b.at - a.at);
  }

  /** The rows of a conversation: { turns, pictures }. */
  async rows(id) {
    const begun = this.begin("readonly", "turns", "pictures");
    const [turns, pictures] = await Promise.all(["turns", "pictures"].map((name) => result(begun.objectStore(name).index("talk").getAll(id))));
    this.written.set(id, new Map([...turns, ...pictures].map((row) => [row.id, text(row)])));
    return { turns: turns.sort((a, b) => a.at - b.at), pictures };
  }

  /** Write what has changed of a conversation: its row, and those of its turns and pictures. What was
   * deleted since, here or in another tab, stays deleted: an answer to it may end later. */
  async write(talk, turns, pictures) {
    const begun = this.begin("readwrite", "talks", "turns", "pictures");
    if (this.written.has(talk.id) && !(await result(begun.objectStore("talks").getKey(talk.id)))) return;
    const before = this.written.get(talk.id) ?? new Map(), now = new Map();
    begun.objectStore("talks").put(talk);
    for (const [name, rows] of [["turns", turns], ["pictures", pictures]]) {
      for (const row of rows) {
        now.set(row.id, text(row));
        if (before.get(row.id) !== now.get(row.id)) begun.objectStore(name).put(row);
      }
    }
    for (const gone of before.keys()) if (!now.has(gone)) for (const name of ["turns", "pictures"]) begun.objectStore(name).delete(gone);
    await finished(begun);
    this.written.set(talk.id, now);
  }

  async remove(id) {
    const begun = this.begin("readwrite", "talks", "turns", "pictures");
    begun.objectStore("talks").delete(id);
    for (const name of ["turns", "pictures"]) {
      const keys = await result(begun.objectStore(name).index("talk").getAllKeys(id));
      for (const key of keys) begun.objectStore(name).delete(key);
    }
    this.written.set(id, new Map());
    await finished(begun);
  }

  async clear() {
    const names = ["talks", "turns", "pictures", "drafts"], begun = this.begin("readwrite", ...names);
    for (const name of names) begun.objectStore(name).clear();
    await finished(begun);
    this.written.clear();
  }

  /** The question that a tab was writing, or undefined. */
  draft(tab) {
    return result(this.begin("readonly", "drafts").objectStore("drafts").get(tab));
  }

  /** Write that question; what tabs of long ago were writing is removed. */
  async writeDraft(row) {
    const begun = this.begin("readwrite", "drafts"), drafts = begun.objectStore("drafts");
    for (const old of await result(drafts.getAll())) if (old.at < row.at - WEEK) drafts.delete(old.id);
    if (row.text || row.pictures.length) drafts.put(row);
    else drafts.delete(row.id);
    await finished(begun);
  }

  begin(mode, ...names) {
    return this.database.transaction(names, mode);
  }
}

/** A row as text, to see whether it has changed; the bytes of a picture never do. */
const text = (row) => JSON.stringify(row);
