// Where a question is written: text, pictures, and the ways to bring them. Used at the foot of the
// page and, while a question is edited, in its place.

import { announce, button, el } from "./dom.js";
import { sorted, thumbnail } from "./pictures.js";

/**
 * A composer. `options`: label, send (its word), onSend({text, pictures}), onCancel, onChange, model().
 * onSend gives back what is in the way, in words; what was typed then stays. With onStop there is a
 * button that stops an answer, in the place of the one that asks.
 */
export function composer(options) {
  const pictures = [...(options.pictures ?? [])];
  const tray = el("ul", { class: "tray", "aria-label": "Pictures for this question", hidden: true });
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  const text = el("textarea", {
    id: options.id, rows: "1", enterkeyhint: "send", "aria-label": options.label, placeholder: options.placeholder,
  });
  const chooser = el("input", {
    type: "file", accept: "image/*,application/pdf,.pdf,.heic,.heif", multiple: true, tabindex: "-1",
    class: "unseen", "aria-label": "Pictures or PDFs",
  });
  const hint = el("p", { class: "hint", hidden: true });
  const ask = el("button", { class: "main send", text: options.send });
  const halt = button("Stop", () => options.onStop(), { class: "stop", title: "Escape", hidden: true });
  const form = el("form", { class: "composer" }, hint, tray, trouble,
    el("div", { class: "line" },
      button("Add", () => chooser.click(), { class: "add", "aria-label": "Add pictures or PDFs", title: "Add pictures or PDFs" }),
      chooser, text,
      options.onCancel ? button("Cancel", options.onCancel) : null,
      ask, halt));
  text.value = options.text ?? "";

  function say(words) {
    trouble.textContent = words;
    trouble.hidden = !words;
  }

  /** Whether an answer comes, which can be stopped. */
  function busy(is) {
    const focused = document.activeElement === (is ? ask : halt);
    ask.hidden = is;
    halt.hidden = !is;
    if (focused) (is ? halt : text).focus();
  }

  /** What the next question will do, with a way out of it; or nothing. */
  function advise(words, ...ways) {
    hint.hidden = !words;
    hint.replaceChildren(...(words ? [el("span", { text: words }), ...ways] : []));
  }

  const changed = () => options.onChange?.();

  function drawTray() {
    tray.replaceChildren(...pictures.map((picture) => chip(picture, remove)));
    tray.hidden = !pictures.length;
  }

  function remove(picture) {
    const spot = pictures.indexOf(picture);
    pictures.splice(spot, 1);
    drawTray();
    changed();
    announce(`${picture.name} removed`);
    (tray.querySelectorAll("button")[Math.min(spot, pictures.length - 1)] ?? text).focus();
  }

  async function add(files) {
    const { pictures: found, refused } = sorted(files);
    say(refused.length ? `${refused.join(", ")}: neither a picture nor a PDF.` : "");
    pictures.push(...found);
    drawTray();
    changed();
    if (found.length) announce(`${found.map((p) => p.name).join(", ")} added`);
    text.focus();
    await look(found);
    changed(); // the draft has them as they are sent
  }

  /** Until the server has said what it serves, pictures wait; lookAgain comes then. */
  function look(some) {
    if (!options.model()) return Promise.resolve();
    return Promise.all(some.map((picture) => picture.look(options.model()).then(drawTray)));
  }

  function send() {
    const said = text.value.trim();
    if (!said && !pictures.length) return;
    const broken = pictures.filter((picture) => picture.state === "refused").map((picture) => picture.name);
    const trouble = broken.length ? `Remove ${broken.join(", ")} first: what cannot be read is not sent.`
      : options.onSend({ text: said, pictures: [...pictures] });
    say(trouble);
    if (trouble) return;
    text.value = "";
    pictures.length = 0;
    drawTray();
    fit();
    changed();
  }

  /** What is written and not yet asked. */
  const contents = () => ({ text: text.value, pictures: [...pictures] });

  /** Put back what was written before the page was loaded anew. */
  function restore(draft) {
    if (text.value || pictures.length) return;
    text.value = draft.text;
    pictures.push(...draft.pictures);
    drawTray();
    fit();
    look(draft.pictures);
  }

  function fit() {
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight + 2, 240)}px`;
  }

  form.addEventListener("submit", (event) => (event.preventDefault(), send()));
  text.addEventListener("input", () => (fit(), changed()));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send());
    if (event.key === "Escape" && options.onCancel) (event.stopPropagation(), options.onCancel());
  });
  text.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  chooser.addEventListener("change", () => (add([...chooser.files]), (chooser.value = "")));
  drawTray();
  requestAnimationFrame(fit);
  const lookAgain = (all) => look(pictures.filter((picture) => all || ["refused", "unknown", "looking"].includes(picture.state)));
  return { form, add, lookAgain, busy, advise, contents, restore, focus: () => text.focus() };
}

function chip(picture, remove) {
  return el("li", { class: `chip ${picture.state}` }, thumbnail(picture),
    el("span", { class: "name", text: picture.name }),
    el("span", { class: "words", text: picture.words }),
    button("×", () => remove(picture), { "aria-label": `Remove ${picture.name}`, class: "remove" }));
}
