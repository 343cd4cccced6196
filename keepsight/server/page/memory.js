// The memory view: bytes in each tier, how much of each prompt was remembered, the pictures held.

import { call, text } from "./api.js";
import { gauge, history } from "./chart.js";
import { announce, button, bytes, el, plural, twice } from "./dom.js";
import { behind, thumbnail } from "./pictures.js";
import { TIERS } from "./tiers.js";

/** The view in `room`. `about`: model(), answers() -> [{prompt, cached}]. */
export function memoryView(room, about) {
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });

  function say(error) {
    trouble.textContent = error?.message ?? "";
    trouble.hidden = !error;
  }

  async function draw() {
    try {
      const [stats, images, counted] = await Promise.all([call("v1/cache/stats"), call("v1/cache/images?stored=true"), counters()]);
      const focused = room.contains(document.activeElement) && (document.activeElement.dataset.focus ?? "refresh");
      room.replaceChildren(head(), trouble, tiers(stats), hits(counted), held(images.data));
      if (focused) (room.querySelector(`[data-focus="${focused}"]`) ?? room.querySelector("[data-focus]")).focus();
      say(null);
    } catch (error) {
      room.replaceChildren(head(), trouble);
      say(error);
    }
  }

  async function act(words, deed) {
    try {
      await deed();
      await draw();
      announce(words);
    } catch (error) {
      say(error);
    }
  }

  function head() {
    const forget = button("Forget everything", () => twice(forget, () => act("All is forgotten", forgetAll)), { class: "danger" });
    return el("div", { class: "head" }, el("h2", { text: "What is remembered" }),
      el("div", { class: "row" }, button("Refresh", draw, { "data-focus": "refresh" }), forget));
  }

  async function forgetAll() {
    await call("v1/cache/reset", {});
  }

  function hits(counted) {
    const answers = about.answers();
    return section("Hits over time",
      answers.length ? history(answers) : el("p", { class: "small", text: "No answer yet on this page." }),
      counted && el("p", { class: "small", text: counted }));
  }

  function held(images) {
    if (!images.length) return section("Pictures held", el("p", { class: "small", text: "None." }));
    return section("Pictures held", el("ul", { class: "held" }, ...images.map(item)));
  }

  function item(image) {
    const known = behind(image.key);
    const label = known ? known.picture.label(known.page) : `${image.kind ?? "picture"} ${image.key.slice(0, 8)}`;
    const size = [image.tokens === null ? null : plural(image.tokens, "token"), bytes(image.bytes),
      image.tier === "memory" ? null : TIERS[image.tier]?.where, image.pinned ? "pinned" : null].filter(Boolean).join(", ");
    return el("li", {}, thumbnail(known?.picture, known?.page),
      el("span", { class: "name", text: label }), el("span", { class: "small", text: size }),
      tools(image, label));
  }

  /** By its key, so also what another page brought, or this one before it was loaded again. */
  function tools({ key, pinned }, name) {
    const send = (path, more) => call(path, { model: about.model(), images: [key], ...more });
    const word = pinned ? "Unpin" : "Pin";
    const pin = button(word, () => act(`${name} ${word.toLowerCase()}ned`, () => send("v1/cache/pin", { pinned: !pinned })),
      { "aria-label": `${word} ${name}`, "data-focus": `pin-${key}` });
    const forget = button("Delete", () => act(`${name} deleted`, () => send("v1/cache/delete", {})),
      { "aria-label": `Delete ${name} from the memory`, "data-focus": `delete-${key}` });
    return el("span", { class: "row" }, pin, forget);
  }

  return { draw };
}

function section(title, ...children) {
  return el("section", {}, el("h3", { text: title }), ...children);
}

/** What was remembered since the server started, for those who may know that of everybody. */
async function counters() {
  try {
    const told = await text("metrics");
    const read = (name) => Number(new RegExp(`^keepsight_${name}_total ([0-9.e+]+)$`, "m").exec(told)?.[1] ?? 0);
    const tokens = `${read("prefix_cache_hits")} of ${plural(read("prefix_cache_queries"), "prompt token")}`;
    const pictures = `${read("mm_cache_hits")} of ${plural(read("mm_cache_queries"), "picture")}`;
    return `Since the server started, for everybody: ${tokens} remembered, ${pictures} not looked at again.`;
  } catch {
    return null; // not with this key
  }
}

function tiers({ features, prefix, store, files, everyone }) {
  const rows = [
    tier("Pictures, in memory", "memory", features, counted(features.packages, "picture")),
    tier("Prompts, in memory", "memory", prefix, counted(prefix.snapshots, "snapshot")),
    tier("Prompts, in host memory", "host", prefix.host, counted(prefix.host?.snapshots, "snapshot")),
    ...stores(store),
    tier("Uploaded files", "files", files, counted(files.files, "file")),
  ];
  const whose = everyone ? "Of everybody who uses this server." : "Of your key.";
  return section("Bytes in each tier", el("dl", { class: "tiers" }, ...rows.flat()), el("p", { class: "small", text: whose }));
}

function stores(store) {
  if (!store) return [];
  const all = Array.isArray(store.tiers) ? store.tiers : [store];
  return all.map((one) => tier(one.tier === "remote" ? "Remote store" : "On disk", one.tier ?? "disk", one,
    counted(one.entries, "thing"), one.broken));
}

const counted = (count, word) => (count === undefined ? "" : plural(count, word));

function tier(name, kind, told, count, broken) {
  if (!told || (!told.bytes && told.budget === 0)) return [];
  const size = told.budget ? `${bytes(told.bytes)} of ${bytes(told.budget)}` : bytes(told.bytes ?? 0);
  return [el("dt", { text: name }),
    el("dd", { class: kind }, told.budget ? gauge(told.bytes, told.budget, `${name}: ${size}`) : null,
      el("span", { text: size }), el("span", { class: "small", text: count }),
      broken ? el("span", { class: "trouble", text: broken }) : null)];
}
