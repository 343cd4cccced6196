// How one turn looks: a question with its pictures, an answer with what is told of it, and what can
// be done with either.

import { apiKey } from "./api.js";
import { copyButton } from "./copy.js";
import { button, el } from "./dom.js";
import { thumbnail } from "./pictures.js";
import { prose } from "./prose.js";
import { measurements } from "./report.js";
import { lineage } from "./talk.js";

/** The element of a turn. `acts`: edit, regenerate, branch, step(turn, by), settings. */
export function turnElement(turn, talk, acts, busy) {
  const mine = turn.role === "user";
  const body = mine ? question(turn) : answer(turn, talk, acts);
  const who = el("h2", { class: "who", text: mine ? "You" : turn.told.model });
  const element = el("article", { class: `turn ${turn.role}`, "data-turn": turn.id, "aria-busy": turn.running ? "true" : null },
    who, ...body);
  const tools = actions(turn, talk, acts, busy);
  if (tools) element.append(tools);
  return element;
}

function question(turn) {
  const parts = [];
  if (turn.pictures.length) {
    const items = turn.pictures.map((picture) => el("li", {}, thumbnail(picture), picture.pdf ? el("span", { class: "name", text: picture.name }) : null));
    parts.push(el("ul", { class: "shown", "aria-label": "Pictures" }, ...items));
  }
  if (turn.text) parts.push(el("p", { class: "asked", text: turn.text }));
  return parts;
}

/** What a token that was not remembered took in a conversation, pictures looked at included, in ms. */
function paceOf(talk) {
  const timings = talk.turns().map((turn) => turn.told?.timings).filter(Boolean);
  const sum = (name) => timings.reduce((all, one) => all + one[name], 0);
  return sum("prompt_n") ? sum("prompt_ms") / sum("prompt_n") : 0;
}

function answer(turn, talk, acts) {
  const parts = [];
  if (turn.thought) {
    const thought = el("details", { class: "thought" }, el("summary", { text: "Thought" }), el("p", { text: turn.thought }));
    parts.push(thought);
  }
  parts.push(el("div", { class: "said" }, ...(turn.text ? prose(turn.text) : [])));
  if (turn.running) parts.push(el("p", { class: "waiting" }, el("span", { class: "pulse", "aria-hidden": "true" }), turn.text ? "" : turn.waiting));
  if (turn.error) parts.push(trouble(turn.error, acts));
  if (turn.told.reason === "length") parts.push(note("Cut off: the longest answer allowed was reached. Settings say how long it may be."));
  if (turn.stopped) parts.push(note("Stopped."));
  if (turn.broken) parts.push(note("Cut off: the page was closed or loaded anew before the answer was whole."));
  const told = measurements(turn.told, picturesOf(turn), paceOf(talk), turn.open, (open) => (turn.open = open));
  if (told) parts.push(told);
  return parts;
}

const note = (text) => el("p", { class: "note", text });

function trouble(error, acts) {
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const box = el("div", { class: "trouble", role: "alert" }, el("p", { text: error.message + wait }));
  if (error.status === 401) {
    const text = apiKey() ? "Change the API key" : "Give an API key";
    box.append(button(text, acts.settings));
  }
  return box;
}

function actions(turn, talk, acts, busy) {
  const [place, count] = talk.place(turn);
  const row = el("div", { class: "acts" });
  if (count > 1) row.append(branches(turn, place, count, acts, busy));
  if (!busy) row.append(...deeds(turn, acts));
  return row.childNodes.length ? row : null;
}

function branches(turn, place, count, acts, busy) {
  const before = button("‹", () => acts.step(turn, -1), { "aria-label": "Branch before", disabled: busy || place === 1 });
  const after = button("›", () => acts.step(turn, 1), { "aria-label": "Next branch", disabled: busy || place === count });
  return el("span", { class: "branches", role: "group", "aria-label": `Branch ${place} of ${count}` },
    before, el("span", { text: `${place} / ${count}` }), after);
}

function deeds(turn, acts) {
  if (turn.role === "user") {
    const edit = button("Edit", () => acts.edit(turn), { class: "edit", title: "Ask in other words; the answer below is kept as a branch" });
    return turn.text ? [edit, copyButton(() => turn.text, "Copy the question")] : [edit];
  }
  const made = turn.text ? [copyButton(() => turn.text, "Copy the answer")] : [];
  made.push(button(turn.error || turn.stopped || turn.broken ? "Try again" : "Regenerate", () => acts.regenerate(turn)));
  if (turn.chosen) made.push(button("Branch", () => acts.branch(turn), { title: "Go on from here in another way" }));
  return made;
}

/** The pictures of the prompt that an answer stands behind, in order. */
function picturesOf(turn) {
  return lineage(turn).flatMap((one) => one.pictures ?? []).flatMap((picture) =>
    Array.from({ length: picture.images }, (_, page) => ({ picture, page: picture.pdf ? page : null })));
}
