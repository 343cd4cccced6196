// How one turn looks: a question with its pictures, an answer with what is told of it, and what can
// be done with either.

import { apiKey } from "./api.js";
import { button, copyButton, el } from "./dom.js";
import { thumbnail } from "./pictures.js";
import { prose } from "./prose.js";
import { measurements } from "./report.js";
import { lineage } from "./talk.js";

/** The element of a turn. `acts`: edit, again, branch, step(turn, by), settings. */
export function turnElement(turn, talks, acts, busy) {
  const mine = turn.role === "user";
  return el("article", { class: `turn ${turn.role}`, "aria-busy": turn.running ? "true" : null },
    el("h2", { class: mine ? "unseen" : "who", text: mine ? "You" : turn.told.model }),
    ...(mine ? question(turn) : answer(turn, talks, acts)),
    el("div", { class: "acts" }, branches(turn, acts, busy), ...(busy ? [] : deeds(turn, acts))));
}

function question({ pictures, text }) {
  const items = pictures.map((picture) => el("li", {}, thumbnail(picture), picture.pdf ? el("span", { class: "name", text: picture.name }) : null));
  return [items.length ? el("ul", { class: "shown", "aria-label": "Pictures" }, ...items) : null, text ? el("p", { class: "asked", text }) : null];
}

function answer(turn, talks, acts) {
  const { text, thought, error, told } = turn;
  const notes = [[told.reason === "length", "Cut off: the longest answer allowed was reached. Settings say how long it may be."],
    [turn.stopped, "Stopped."], [turn.broken, "Cut off: the page was closed or loaded anew before the answer was whole."]];
  return [
    thought ? el("details", { class: "thought" }, el("summary", { text: "Thought" }), el("p", { text: thought })) : null,
    el("div", { class: "said" }, text ? prose(text) : null),
    turn.running ? el("p", { class: "waiting", text: text ? "" : "Looking…" }) : null,
    error ? trouble(error, acts) : null,
    ...notes.filter(([is]) => is).map(([, words]) => el("p", { class: "note", text: words })),
    measurements(turn, lineage(turn).flatMap((one) => one.pictures ?? []).flatMap((picture) => picture.pages()), paceOf(talks)),
  ];
}

/** What a token that was not remembered took where most were computed, pictures looked at included, in ms. */
function paceOf(talks) {
  const timings = talks.flatMap((talk) => talk.turns()).map((turn) => turn.told?.timings).filter(Boolean);
  const most = timings.toSorted((a, b) => b.prompt_n - a.prompt_n)[0];
  return most?.prompt_n ? most.prompt_ms / most.prompt_n : 0;
}

function trouble({ message, status, retryAfter }, acts) {
  return el("div", { class: "trouble", role: "alert" }, el("p", { text: message + (retryAfter ? ` Try again in ${retryAfter} s.` : "") }),
    status === 401 ? button(apiKey() ? "Change the API key" : "Give an API key", acts.settings) : null);
}

function branches(turn, acts, busy) {
  const { children } = turn.parent, place = children.indexOf(turn) + 1;
  if (children.length < 2) return null;
  return el("span", { class: "branches", role: "group", "aria-label": `Branch ${place} of ${children.length}` },
    button("Branch before", () => acts.step(turn, -1), { icon: "left", disabled: busy || place === 1 }),
    el("span", { text: `${place} / ${children.length}` }),
    button("Next branch", () => acts.step(turn, 1), { icon: "right", disabled: busy || place === children.length }));
}

function deeds(turn, acts) {
  const copy = turn.text ? copyButton(() => turn.text, `Copy the ${turn.role === "user" ? "question" : "answer"}`) : null;
  if (turn.role === "user") return [button("Edit", () => acts.edit(turn), { icon: "edit", class: "edit" }), copy];
  return [copy, button(turn.error || turn.stopped || turn.broken ? "Try again" : "Regenerate", () => acts.again(turn), { icon: "again" }),
    turn.chosen ? button("Branch", () => acts.branch(turn), { icon: "branch" }) : null];
}
