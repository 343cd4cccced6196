// Elements, built node by node: what a user, a file or the server says is only ever text here.

const ICONS = {
  add: "M12 5v14M5 12h14", send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z", close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM5 15V4h10", edit: "M4 20h4L19 9l-4-4L4 16z", again: "M20 12a8 8 0 1 1-2.5-5.8M20 3v5h-5",
  branch: "M6 4v16M6 14c8 0 12-2 12-9M15 8l3-4 3 4", trash: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13", menu: "M4 6h16M4 12h16M4 18h16",
  left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6", save: "M12 4v11M7 11l5 5 5-5M5 20h14", look: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  settings: "M4 7h9M17 7h3M15 5v4M4 17h3M11 17h9M9 15v4", talk: "M4 5h16v11H10l-4 4v-4H4z", memory: "M4 6h16v4H4zM4 14h16v4H4zM7 8h1M7 16h1",
};

/** An element. `props`: attributes; `text` and `on` (a record of listeners) are special. */
export function el(tag, props = {}, ...children) {
  return dressed(document.createElement(tag), props, children);
}

function dressed(made, { text, on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  if (text !== undefined) made.textContent = text;
  for (const [name, listener] of Object.entries(on)) made.addEventListener(name, listener);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function icon(name) {
  const [svg, path] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  return dressed(svg, { viewBox: "0 0 24 24", "aria-hidden": "true" }, [dressed(path, { d: ICONS[name] }, [])]);
}

/** A button with words, or with an icon whose name is read aloud and shown on hover. */
export function button(name, act, { icon: drawing, ...props } = {}) {
  if (!drawing) return el("button", { type: "button", text: name, on: { click: act }, ...props });
  return el("button", { type: "button", "aria-label": name, title: name, "data-icon": drawing, on: { click: act }, ...props }, icon(drawing));
}

export const byId = (id) => document.getElementById(id);

/** Say something to those who listen instead of looking. */
export const announce = (text) => (byId("status").textContent = text);

/** "1 picture", "2 pictures". */
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

export function bytes(count) {
  const power = count < 1 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10)), value = count / 1024 ** power;
  return `${power && value < 10 ? value.toFixed(1) : value.toFixed(0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** Show other words on a button for a moment. */
function flash(pressed, words, ms) {
  const before = [...pressed.childNodes];
  pressed.replaceChildren(words);
  announce(words);
  setTimeout(() => pressed.replaceChildren(...before), ms);
}

/** Ask once more before what cannot be taken back. */
export function twice(pressed, act) {
  if (pressed.dataset.asked) return act();
  pressed.dataset.asked = "yes";
  flash(pressed, "Really?", 4000);
  setTimeout(() => delete pressed.dataset.asked, 4000);
}

/** A button that copies what `text()` gives. */
export function copyButton(text, name) {
  const made = button(name, async () => flash(made, (await copied(text())) ? "Copied" : "Not allowed here", 1500), { icon: "copy" });
  return made;
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const before = document.activeElement, field = el("textarea", { class: "unseen" }); // over plain HTTP
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
