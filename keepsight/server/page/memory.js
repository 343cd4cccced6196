// The memory view: bytes in each tier, how much of each prompt was remembered, the pictures held.

import { call } from "./api.js";
import { announce, button, bytes, el, plural, twice } from "./dom.js";
import { TIERS, behind, thumbnail } from "./pictures.js";

/** The view in `room`. `about`: model(), answers() -> [{ prompt, cached }]. */
export function memoryView(room, about) {
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });

  async function draw() {
    const parts = [];
    try {
      const [stats, images] = await Promise.all([call("v1/cache/stats"), call("v1/cache/images?stored=true")]);
      parts.push(tiers(stats), history(about.answers()), held(images.data));
      trouble.hidden = true;
    } catch (error) {
      say(error);
    }
    const focused = room.contains(document.activeElement) && (document.activeElement.dataset.focus ?? "refresh");
    room.replaceChildren(head(), trouble, ...parts);
    if (focused) (room.querySelector(`[data-focus="${focused}"]`) ?? room.querySelector("[data-focus]")).focus();
  }

  function say(error) {
    trouble.textContent = error.message;
    trouble.hidden = false;
  }

  async function act(words, path, body) {
    try {
      await call(path, body);
      await draw();
      announce(words);
    } catch (error) {
      say(error);
    }
  }

  function head() {
    const forget = button("Forget everything", () => twice(forget, () => act("All is forgotten", "v1/cache/reset", {})), { class: "danger" });
    return el("div", { class: "head" }, el("h2", { text: "What is remembered" }),
      el("div", { class: "row" }, button("Refresh", draw, { "data-focus": "refresh" }), forget));
  }

  function held(images) {
    return section("Pictures held", images.length ? el("ul", { class: "held" }, ...images.map(item)) : el("p", { class: "small", text: "None." }));
  }

  /** By its key, so also what another page brought, or this one before it was loaded again. */
  function item({ key, kind, tokens, bytes: size, tier, pinned }) {
    const known = behind(key), name = known ? known.picture.label(known.page) : `${kind ?? "picture"} ${key.slice(0, 8)}`;
    const told = [tokens !== null && plural(tokens, "token"), bytes(size), tier !== "memory" && TIERS[tier]?.where, pinned && "pinned"];
    const word = pinned ? "Unpin" : "Pin", body = { model: about.model(), images: [key] };
    return el("li", {}, thumbnail(known?.picture, known?.page), el("span", { class: "name", text: name }),
      el("span", { class: "small", text: told.filter(Boolean).join(", ") }),
      el("span", { class: "row" },
        button(word, () => act(`${name} ${word.toLowerCase()}ned`, "v1/cache/pin", { ...body, pinned: !pinned }),
          { "aria-label": `${word} ${name}`, "data-focus": `pin-${key}` }),
        button("Delete", () => act(`${name} deleted`, "v1/cache/delete", body), { "aria-label": `Delete ${name} from the memory`, "data-focus": `delete-${key}` })));
  }

  return draw;
}

const section = (title, ...children) => el("section", {}, el("h3", { text: title }), ...children);

const meter = (value, max, label) => el("meter", { value, max, "aria-label": label });

function history(answers) {
  const rows = answers.slice(-12).map(({ prompt, cached }) => {
    const text = `${cached} of ${plural(prompt, "token")}`;
    return el("li", {}, meter(cached, prompt, text), el("span", { class: "small", text }));
  });
  return section("Prompts remembered, answer by answer",
    rows.length ? el("ol", { class: "answers" }, ...rows) : el("p", { class: "small", text: "No answer yet on this page." }));
}

function tiers({ features, prefix, store, files, everyone }) {
  const stores = !store ? [] : Array.isArray(store.tiers) ? store.tiers : [store];
  const rows = [
    tier("Pictures, in memory", "memory", features, features.packages, "picture"),
    tier("Prompts, in memory", "memory", prefix, prefix.snapshots, "snapshot"),
    tier("Prompts, in host memory", "host", prefix.host, prefix.host?.snapshots, "snapshot"),
    ...stores.map((one) => tier(one.tier === "remote" ? "Remote store" : "On disk", one.tier ?? "disk", one, one.entries, "thing")),
    tier("Uploaded files", "files", files, files.files, "file"),
  ];
  return section("Bytes in each tier", el("dl", { class: "tiers" }, ...rows.flat()),
    el("p", { class: "small", text: everyone ? "Of everybody who uses this server." : "Of your key." }));
}

function tier(name, kind, told, count, word) {
  if (!told || (!told.bytes && told.budget === 0)) return [];
  const size = told.budget ? `${bytes(told.bytes)} of ${bytes(told.budget)}` : bytes(told.bytes ?? 0);
  return [el("dt", { text: name }), el("dd", { class: kind }, told.budget ? meter(told.bytes, told.budget, `${name}: ${size}`) : null,
    el("span", { text: size }), el("span", { class: "small", text: count === undefined ? "" : plural(count, word) }),
    told.broken ? el("span", { class: "trouble", text: told.broken }) : null)];
}
