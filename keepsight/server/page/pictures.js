// Pictures and PDFs that somebody brought: what is sent of them, whether the server can read them,
// and under which keys it remembers them.

import { call } from "./api.js";
import { el, plural } from "./dom.js";
import { freshId } from "./talk.js";

const WHOLE = "keepsight-photos", LARGEST = 4_000_000, QUALITY = 0.92; // pixels: a page of text at 200 dots per inch
const shown = new Map(); // key of a picture -> { picture, page }

/** Where what is remembered is kept, in words. */
export const TIERS = {
  memory: { from: "from memory", where: "in memory" }, host: { from: "from host memory", where: "in host memory" },
  disk: { from: "from disk", where: "on disk" }, remote: { from: "from the remote store", where: "in the remote store" },
  computed: { from: "looked at now", where: "nowhere yet" },
};

/** Where a picture's part of a prompt comes from, by what a report says of it. */
export function tierOf({ status, reason, features, tier: lay }) {
  const tier = status === "reused" ? (lay ?? reason) : features;
  return tier in TIERS ? tier : status === "reused" ? "memory" : "computed";
}

/** Whether large photos are made smaller before they are sent. */
export const isShrinking = () => localStorage.getItem(WHOLE) !== "whole";
export const setShrinking = (on) => (on ? localStorage.removeItem(WHOLE) : localStorage.setItem(WHOLE, "whole"));

const isHeic = ({ type, name }) => /^image\/hei[cf]/.test(type) || /\.hei[cf]$/i.test(name);
const isPdf = ({ type, name }) => type === "application/pdf" || /\.pdf$/i.test(name);
export const isUsable = (file) => file.type.startsWith("image/") || isHeic(file) || isPdf(file);

export class Picture {
  constructor(file) {
    this.id = freshId();
    this.file = file;
    this.pdf = isPdf(file);
    this.name = file.name || (this.pdf ? "document.pdf" : "picture");
    this.keys = []; // one, or those of the pages
    this.state = "looking"; // then "new", "remembered" or "refused"; "unknown" where the server cannot be asked
    this.note = ""; // what was done to it before it is sent
  }

  get url() {
    return (this.address ??= URL.createObjectURL(this.file));
  }

  /** As a row of the database. */
  row() {
    const { id, name, keys, note, file } = this;
    return { id, name, keys, note, file };
  }

  static of({ id, name, keys, note, file }) {
    const picture = Object.assign(new Picture(file), { id, name, note });
    picture.remember(keys);
    return picture;
  }

  /** Make a large photo smaller, once; every turn sends it again. */
  fit() {
    this.fitting ??= fitted(this.file).then(([file, note]) => Object.assign(this, { file, note: this.note || note }));
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
      this.state = error.status === 0 || [401, 403, 408, 429].includes(error.status) || error.status >= 500 ? "unknown" : "refused";
      this.error = error.message.replace(/^[\w.[\]]+: /, ""); // where in the request it stood
    }
  }

  /** Under which keys the server remembers it, page by page. */
  remember(keys) {
    this.keys = keys;
    keys.forEach((key, page) => shown.set(key, { picture: this, page }));
  }

  /** Its pages, as the model sees them. */
  pages() {
    return Array.from({ length: Math.max(1, this.keys.length) }, (_, page) => ({ picture: this, page: this.pdf ? page : null }));
  }

  /** What it is called, also page by page. */
  label(page = null) {
    return this.pdf && page !== null ? `${this.name}, page ${page + 1}` : this.name;
  }

  get words() {
    if (this.state === "refused" || this.state === "unknown") return this.error;
    const pages = this.pdf && this.keys.length ? `${plural(this.keys.length, "page")}, ` : "";
    return `${pages}${{ looking: "…", remembered: `remembered${this.tier}`, new: "new" }[this.state]}${this.note && `, ${this.note}`}`;
  }
}

/** The picture behind a key, where this page knows it: { picture, page }. */
export const behind = (key) => shown.get(key);

/** A small view of a picture, or of one page of a PDF. */
export function thumbnail(picture, page = null) {
  const name = picture?.label(page) ?? "a picture that this page does not know";
  const blank = (text) => el("span", { class: "thumb blank", role: "img", "aria-label": name, title: name, text });
  if (!picture || picture.pdf) return blank(picture ? (page === null ? "PDF" : `p. ${page + 1}`) : "?");
  const image = el("img", { class: "thumb", src: picture.url, alt: name, title: [name, picture.note].filter(Boolean).join(", ") });
  image.addEventListener("error", () => image.replaceWith(blank(isHeic(picture.file) ? "HEIC" : "?")), { once: true });
  return image;
}

/** What to send for a file, and a note where that is not the file itself. */
async function fitted(file) {
  const picture = isPdf(file) || /^image\/(gif|svg)/.test(file.type) ? null : await createImageBitmap(file).catch(() => null); // upright
  if (!picture) return [file, ""]; // the server says whether it can read it
  const { width, height } = picture;
  const scale = isShrinking() ? Math.min(1, Math.sqrt(LARGEST / (width * height))) : 1;
  if (scale === 1 && !isHeic(file)) return [file, ""];
  const size = [width, height].map((side) => Math.max(1, Math.floor(side * scale)));
  try {
    return [await drawn(picture, size, file), scale === 1 ? "sent as JPEG" : `shrunk from ${width} × ${height} to ${size.join(" × ")}`];
  } catch {
    return [file, ""]; // no room for so large a drawing
  }
}

/** A picture drawn anew: screenshots stay without loss, photos are JPEG. */
async function drawn(picture, [width, height], { type, name }) {
  const canvas = new OffscreenCanvas(width, height), pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(picture, 0, 0, width, height);
  const as = type === "image/png" ? type : "image/jpeg";
  return new File([await canvas.convertToBlob({ type: as, quality: QUALITY })], name, { type: as });
}

function dataUri(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read: was it moved or changed?`));
    reader.readAsDataURL(file);
  });
}
