// Elements, built node by node: what a user or a file name says is always text. What a model says goes
// through prose.js.

/** An element. `props`: attributes; `class`, `text`, and `on` (a record of listeners) are special. */
export function el(tag, props = {}, ...children) {
  return dressed(document.createElement(tag), props, children);
}

/** The same for drawings. */
export function svg(tag, props = {}, ...children) {
  return dressed(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function dressed(made, { text, on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  if (text !== undefined) made.textContent = text;
  for (const [name, listener] of Object.entries(on)) made.addEventListener(name, listener);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button. */
export function button(text, act, props = {}) {
  return el("button", { type: "button", text, on: { click: act }, ...props });
}

/** The element of index.html with this id. */
export const byId = (id) => document.getElementById(id);

/** Say something to those who listen instead of looking. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Bytes for people. */
export function bytes(count) {
  let value = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" ? value : value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/** "1 picture", "2 pictures". */
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Ask once more before what cannot be taken back. */
export function twice(pressed, act) {
  if (pressed.dataset.asked) return act();
  const words = pressed.textContent;
  pressed.dataset.asked = "yes";
  pressed.textContent = "Really?";
  setTimeout(() => (delete pressed.dataset.asked, (pressed.textContent = words)), 4000);
}
