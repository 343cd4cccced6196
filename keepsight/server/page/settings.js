// Settings: how answers are made, the key, and the look. The look outlives the page.

import { apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";
import { isKeeping } from "./keep.js";
import { isShrinking, setShrinking } from "./pictures.js";

const LOOK = "keepsight-look";

const number = (id) => (byId(id).validity.valid && byId(id).value !== "" ? byId(id).valueAsNumber : undefined);

/** What a request is told beside its messages. */
export const sampling = () => ({ temperature: number("set-temperature"), max_tokens: number("set-tokens") });

export const systemPrompt = () => byId("set-system").value.trim();

const look = () => localStorage.getItem(LOOK) ?? "system";

function setLook(value) {
  if (value === "system") localStorage.removeItem(LOOK);
  else localStorage.setItem(LOOK, value);
  document.documentElement.dataset.look = value;
}

const isDark = () => (look() === "system" ? matchMedia("(prefers-color-scheme: dark)").matches : look() === "dark");

/** Make the dialog and the switch work; gives back what opens it. `onKey()`: the key has changed;
 * `onKeep(on)`: whether to keep conversations. */
export function settings({ onKey, onKeep }) {
  const dialog = byId("settings");
  const finish = () => byId("settings-form").reportValidity() && dialog.close();
  byId("look").addEventListener("click", () => setLook(isDark() ? "light" : "dark"));
  byId("set-look").addEventListener("change", (event) => setLook(event.target.value));
  byId("settings-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.tagName === "INPUT") (event.preventDefault(), finish());
  });
  byId("settings-done").addEventListener("click", (event) => (event.preventDefault(), finish()));
  dialog.addEventListener("close", () => {
    onKeep(byId("set-keep").checked);
    setShrinking(byId("set-photos").checked);
    const key = byId("set-key").value.trim();
    if (key === apiKey()) return;
    setApiKey(key);
    onKey();
  });
  return () => {
    byId("set-key").value = apiKey();
    byId("set-keep").checked = isKeeping();
    byId("set-photos").checked = isShrinking();
    byId("set-look").value = look();
    dialog.showModal();
  };
}
