// Pictures and PDFs that somebody brought: what they look like, what the API is sent, and under
// which keys the server remembers them. `store.js` keeps their bytes.

import { call } from "./api.js";
import { el, plural } from "./dom.js";
import { fitted, isHeic } from "./photos.js";
import { freshId } from "./store.js";
import { TIERS, tierOf } from "./tiers.js";

const shown = new Map(); // key of a picture -> { picture, page }

/** One file. */
export class Picture {
  constructor(file) {
    this.id = freshId();
    this.file = file;
    this.pdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
    this.name = file.name || (this.pdf ? "document.pdf" : "picture");
    this.url = this.pdf ? null : URL.createObjectURL(file);
    this.keys = []; // one, or those of the pages
    this.state = "looking";
    this.note = ""; // what was done to it before it is sent
    this.fitting = null;
    this.error = null;
  }

  /** As a row of the store. */
  row() {
    const { id, name, keys, note, file } = this;
    return { id, name, keys, note, type: file.type, size: file.size, file };
  }

  /** From a row of the store. */
  static of({ id, name, type, keys, note, file }) {
    const picture = new Picture(new File([file], name, { type }));
    Object.assign(picture, { id, note });
    picture.remember(keys);
    return picture;
  }

  /** Make a large photo smaller, once. */
  fit() {
    if (this.pdf) return null;
    this.fitting ??= fitted(this.file).then(({ file, note }) => {
      this.file = file;
      this.note ||= note;
    });
    return this.fitting;
  }

  /** As a part of a message. */
  async part() {
    await this.fit();
    this.data ??= await dataUri(this.file);
    if (this.pdf) return { type: "file", file: { file_data: this.data, filename: this.name.slice(0, 200) } };
    return { type: "image_url", image_url: { url: this.data } };
  }

  /** Ask the server whether it can be read and is known; nothing is computed with the model. */
  async look(model) {
    try {
      const content = [await this.part()];
      const { report } = await call("v1/cache/explain", { model, messages: [{ role: "user", content }] });
      this.remember(report.images.map((image) => image.key));
      const tiers = report.images.map(tierOf);
      this.state = tiers.includes("computed") ? "new" : "remembered";
      this.tier = tiers[0] === "memory" ? "" : `, ${TIERS[tiers[0]].where}`;
    } catch (error) {
      const unread = error.status >= 400 && error.status < 500 && ![401, 403, 408, 429].includes(error.status);
      this.state = unread ? "refused" : "unknown"; // where the server cannot be asked now, asking will tell
      this.error = error.message;
    }
  }

  /** Under which keys the server remembers it, page by page. */
  remember(keys) {
    this.keys = keys;
    this.keys.forEach((key, page) => shown.set(key, { picture: this, page }));
  }

  /** How many images it is to the model. */
  get images() {
    return Math.max(1, this.keys.length);
  }

  /** What it is called, also page by page. */
  label(page = null) {
    return this.pdf && page !== null ? `${this.name}, page ${page + 1}` : this.name;
  }

  get words() {
    if (this.state === "refused" || this.state === "unknown") return this.error;
    const pages = this.pdf && this.keys.length ? `${plural(this.keys.length, "page")}, ` : "";
    const note = this.note ? `, ${this.note}` : "";
    return pages + { looking: "…", remembered: `remembered${this.tier}`, new: "new" }[this.state] + note;
  }
}

/** The picture behind a key, where this page knows it: { picture, page }. */
export const behind = (key) => shown.get(key);

/** The files among what was pasted, dropped or chosen; what cannot be used is named. */
export function sorted(files) {
  const usable = [], refused = [];
  for (const file of files) {
    const fits = /^image\//.test(file.type) || isHeic(file) || file.type === "application/pdf" || /\.pdf$/i.test(file.name);
    (fits ? usable : refused).push(file);
  }
  return { pictures: usable.map((file) => new Picture(file)), refused: refused.map((file) => file.name) };
}

/** A small view of a picture, or of one page of a PDF. */
export function thumbnail(picture, page = null) {
  const label = picture?.label(page) ?? "a picture that this page does not know";
  if (!picture || picture.pdf) {
    const text = picture ? (page === null ? "PDF" : `p. ${page + 1}`) : "?";
    return el("span", { class: "thumb blank", role: "img", "aria-label": label, title: label, text });
  }
  const title = picture.note ? `${label}, ${picture.note}` : label;
  const image = el("img", { class: "thumb", src: picture.url, alt: label, title });
  image.addEventListener("error", () => image.replaceWith(unseen(picture)), { once: true });
  return image;
}

/** A picture that this browser cannot show. */
function unseen({ name, file }) {
  const text = isHeic(file) ? "HEIC" : "?";
  return el("span", { class: "thumb blank", role: "img", "aria-label": name, title: name, text });
}

function dataUri(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read: was it moved or changed?`));
    reader.readAsDataURL(file);
  });
}
