// Where a question is written: text, pictures, and the ways to bring them. Used at the foot of the
// page and, while a question is edited, in its place.

import { announce, button, el } from "./dom.js";
import { Picture, isUsable, thumbnail } from "./pictures.js";

/**
 * A composer. `options`: label, send (its word), onSend({text, pictures}), onCancel, onChange, model().
 * onSend gives back what is in the way, in words; what was typed then stays. With onStop there is a
 * button that stops an answer, in the place of the one that asks.
 */
export function composer(options) {
  const pictures = [...(options.pictures ?? [])];
  let sending = false;
  const tray = el("ul", { class: "tray", "aria-label": "Pictures for this question" });
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  const text = el("textarea", { id: options.id, rows: "1", enterkeyhint: "send", "aria-label": options.label, placeholder: options.placeholder });
  const chooser = el("input", { type: "file", accept: "image/*,application/pdf,.pdf,.heic,.heif", multiple: true, tabindex: "-1", class: "unseen", "aria-label": "Pictures or PDFs" });
  const hint = el("p", { class: "hint", hidden: true });
  const ask = button(options.send, () => send(), { icon: "send", class: "main" });
  const halt = button("Stop", () => options.onStop(), { icon: "stop", class: "main stop", hidden: true });
  const element = el("div", { class: "composer" }, hint, tray, trouble, el("div", { class: "line" },
    button("Add pictures or PDFs", () => chooser.click(), { icon: "add", class: "add" }), chooser, text,
    options.onCancel ? button("Cancel", options.onCancel) : null, ask, halt));
  text.value = options.text ?? "";

  function say(words) {
    trouble.textContent = words;
    trouble.hidden = !words;
  }

  /** Whether an answer comes, which can be stopped. */
  function busy(is) {
    const focused = document.activeElement === (is ? ask : halt);
    [ask.hidden, halt.hidden] = [is, !is];
    if (focused) (is ? halt : text).focus();
  }

  /** What the next question will do, with a way out of it; or nothing. */
  function advise(words, ...ways) {
    hint.hidden = !words && !ways.length;
    hint.replaceChildren(el("span", { text: words }), ...ways);
  }

  function draw() {
    tray.replaceChildren(...pictures.map((picture) => el("li", { class: `chip ${picture.state}` }, thumbnail(picture),
      el("span", { class: "name", text: picture.name }), el("span", { class: "words", text: picture.words }),
      button(`Remove ${picture.name}`, () => remove(picture), { icon: "close", class: "remove" }))));
    tray.hidden = !pictures.length;
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight + 2, 240)}px`;
  }

  function changed() {
    draw();
    options.onChange?.();
  }

  function remove(picture) {
    const spot = pictures.indexOf(picture);
    pictures.splice(spot, 1);
    say("");
    changed();
    announce(`${picture.name} removed`);
    (tray.querySelectorAll("button")[Math.min(spot, pictures.length - 1)] ?? text).focus();
  }

  async function add(files) {
    const refused = [...files].filter((file) => !isUsable(file)).map((file) => file.name);
    const found = [...files].filter(isUsable).map((file) => new Picture(file));
    say(refused.length ? `${refused.join(", ")}: neither a picture nor a PDF.` : "");
    pictures.push(...found);
    changed();
    if (found.length) announce(`${found.map((picture) => picture.name).join(", ")} added`);
    text.focus();
    await look(found);
    changed(); // the draft has them as they are sent
  }

  /** Until the server has said what it serves, pictures wait; look comes again then. */
  async function look(some = pictures) {
    if (!options.model()) return;
    await Promise.all(some.map(async (picture) => {
      picture.looked = picture.look(options.model());
      await picture.looked;
      draw();
      if (picture.state === "refused") announce(`${picture.name}: ${picture.words}`);
    }));
  }

  async function send(said = text.value.trim()) {
    if (!said && !pictures.length) return;
    const asked = [...pictures];
    if (sending) return;
    sending = true;
    await Promise.all(asked.map((picture) => picture.looked));
    sending = false;
    const broken = asked.filter((picture) => picture.state === "refused").map((picture) => picture.name);
    const words = broken.length ? `Remove ${broken.join(", ")} first: what cannot be read is not sent.` : options.onSend({ text: said, pictures: asked });
    say(words);
    if (words) return;
    if (text.value.trim() === said) text.value = ""; // a question to try leaves what is being written
    pictures.length = 0;
    changed();
  }

  /** Put back what was written before the page was loaded anew. */
  function restore(draft) {
    if (text.value || pictures.length) return;
    text.value = draft.text;
    pictures.push(...draft.pictures);
    draw();
    look();
  }

  text.addEventListener("input", changed);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send());
    if (event.key === "Escape" && options.onCancel) (event.stopPropagation(), options.onCancel());
  });
  chooser.addEventListener("change", () => (add([...chooser.files]), (chooser.value = "")));
  draw();
  requestAnimationFrame(draw);
  return { element, add, look, send, busy, advise, restore, contents: () => ({ text: text.value, pictures: [...pictures] }), focus: () => text.focus() };
}
