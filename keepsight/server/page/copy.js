// Copying text, also where a page may not write to the clipboard by itself (plain HTTP from elsewhere).

import { announce, button, el } from "./dom.js";

/** Put text on the clipboard; whether that was possible. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByHand(text);
  }
}

function copyByHand(text) {
  const before = document.activeElement;
  const field = el("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}

/** A button that copies what `text()` gives, and says for a moment whether it did. */
export function copyButton(text, label) {
  const made = button("Copy", async () => {
    const words = (await copy(text())) ? "Copied" : "Not allowed here";
    made.textContent = words;
    announce(words);
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, { class: "copy", "aria-label": label, title: label });
  return made;
}
