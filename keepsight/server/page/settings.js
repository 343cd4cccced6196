// Settings: how answers are made, the key, and the look. The look outlives the page.

import { apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";
import { isKeeping } from "./keeping.js";
import { isShrinking, setShrinking } from "./photos.js";

const LOOK = "keepsight-look";
const LOOKS = ["system", "light", "dark"];
const chosen = { system: "", temperature: null, tokens: null };

/** What a request is told beside its messages. */
export function sampling() {
  const told = {};
  if (chosen.temperature !== null) told.temperature = chosen.temperature;
  if (chosen.tokens !== null) told.max_tokens = chosen.tokens;
  return told;
}

export const systemPrompt = () => chosen.system;

/** Make the dialog and the switch work. `onKey()`: the key has changed; `onKeep(on)`: whether to keep conversations. */
export function settings({ onKey, onKeep }) {
  const dialog = byId("settings");
  showLook(look());
  byId("open-settings").addEventListener("click", open);
  byId("theme").addEventListener("click", () => setLook(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showLook(look()));
  for (const radio of dialog.querySelectorAll("[name=look]")) {
    radio.addEventListener("change", () => setLook(radio.value));
  }
  dialog.addEventListener("close", () => {
    onKeep(byId("set-keep").checked);
    take(onKey);
    // The entry of the menu that opened it is hidden by now.
    const at = document.activeElement;
    if (at === document.body || dialog.contains(at)) byId(byId("open-menu").hidden ? "open-settings" : "open-menu").focus();
  });
  byId("settings-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.tagName === "INPUT") (event.preventDefault(), finish());
  });
  byId("settings-done").addEventListener("click", (event) => (event.preventDefault(), finish()));

  function finish() {
    if (byId("settings-form").reportValidity()) dialog.close();
  }

  function open() {
    byId("set-key").value = apiKey();
    byId("set-keep").checked = isKeeping();
    byId("set-photos").checked = isShrinking();
    dialog.querySelector(`[name=look][value=${look()}]`).checked = true;
    dialog.showModal();
  }
  return { open };
}

function take(onKey) {
  setShrinking(byId("set-photos").checked);
  chosen.system = byId("set-system").value.trim();
  chosen.temperature = number("set-temperature");
  chosen.tokens = number("set-tokens");
  const key = byId("set-key").value.trim();
  if (key === apiKey()) return;
  setApiKey(key);
  onKey();
}

function number(id) {
  const field = byId(id);
  return field.value === "" || !field.validity.valid ? null : field.valueAsNumber;
}

function look() {
  const kept = localStorage.getItem(LOOK);
  return LOOKS.includes(kept) ? kept : "system";
}

function isDark() {
  return look() === "system" ? matchMedia("(prefers-color-scheme: dark)").matches : look() === "dark";
}

function setLook(value) {
  if (value === "system") localStorage.removeItem(LOOK);
  else localStorage.setItem(LOOK, value);
  showLook(value);
}

function showLook(value) {
  if (value === "system") delete document.documentElement.dataset.look;
  else document.documentElement.dataset.look = value;
  const other = isDark() ? "light" : "dark";
  byId("theme").textContent = `Change to ${other}`;
}
