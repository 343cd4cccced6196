// What stands under an answer: what was remembered, what it cost, and why something was computed.

import { el, plural } from "./dom.js";
import { thumbnail } from "./pictures.js";
import { TIERS, tierOf } from "./tiers.js";

const GLOSSES = [
  [/^new$/, "not seen before"],
  [/^diverged at token (\d+)/, "what is remembered goes on differently from there"],
  [/^no boundary yet/, "too short a stretch to be remembered on its own"],
  [/^no snapshot between/, "nothing is remembered that ends there"],
  [/^evicted/, "it was remembered, and made room for something else"],
  [/^other weights/, "the model has changed since"],
  [/^made elsewhere/, "remembered features were made in another way, and are not mixed"],
  [/^whole prompt/, "the very same prompt was answered before"],
];

/** One line for an answer, which opens to the rest. `pictures` are those of the prompt in order: { picture, page };
 * `pace` is what a token that was not remembered took in this conversation, in ms. */
export function measurements(told, pictures, pace, open, onToggle) {
  const { report } = told;
  if (!report) return null;
  const row = report.images.length ? pictureRow(report.images, pictures) : null;
  const why = el("details", { class: "told", open }, el("summary", { text: line(told, pace), title: "What was remembered, and why" }),
    row, el("p", { class: "numbers" }, ...numbers(told)), ...reasons(told, pictures));
  why.addEventListener("toggle", () => {
    if (why.open === open) return; // it was drawn open
    open = why.open;
    onToggle(open);
    if (open) why.scrollIntoView({ block: "nearest" });
  });
  return why;
}

function line({ usage, report, firstMs }, pace) {
  const saved = pace * usage.prompt_tokens_details.cached_tokens;
  const times = [firstMs === null ? "" : `first word after ${duration(firstMs)}`, saved >= 1 ? `saved ${duration(saved)}` : ""];
  const remembered = [`${usage.prompt_tokens_details.cached_tokens} of ${plural(usage.prompt_tokens, "token")}`];
  const known = report.images.filter((image) => tierOf(image) !== "computed").length;
  if (report.images.length) remembered.push(`${known} of ${plural(report.images.length, "picture")}`);
  return [times.filter(Boolean).join(", "), `remembered ${remembered.join(", ")}`].filter(Boolean).join(" · ");
}

/** The one sentence for those who listen. */
export function summary({ usage }) {
  if (!usage) return "";
  const remembered = usage.prompt_tokens_details.cached_tokens;
  return `${remembered} of ${plural(usage.prompt_tokens, "prompt token")} remembered`;
}

function numbers(told) {
  const { usage, timings, firstMs, model } = told;
  const parts = [summary(told), `${plural(usage.completion_tokens, "token")} written`];
  if (firstMs !== null) parts.push(`first after ${duration(firstMs)}`);
  if (timings.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(0)} tokens/s`);
  return [...parts, model].map((text) => el("span", { text }));
}

function pictureRow(images, pictures) {
  const items = images.map((image) => {
    const tier = tierOf(image);
    const words = image.reason === "whole prompt" ? wholePrompt(tier) : TIERS[tier].from;
    const { picture, page } = pictures[image.image] ?? {};
    return el("li", { class: `seen ${tier}`, title: `${image.tokens} tokens; ${image.status}: ${image.reason}` },
      thumbnail(picture, page), el("span", { class: "tier", text: words }));
  });
  return el("ul", { class: "pictures", "aria-label": "Pictures, and where each came from" }, ...items);
}

/** Where the end of the very same prompt lay; memory goes without saying. */
const wholePrompt = (tier) => (tier === "memory" ? "with the whole prompt" : `with the whole prompt, ${TIERS[tier].from}`);

function reasons(told, pictures) {
  const { report } = told;
  const rows = report.segments.map((segment) => segmentRow(segment, pictures));
  const head = ["Part", "Tokens", "Was", "Because"].map((text) => el("th", { scope: "col", text }));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  const stages = Object.entries(report.milliseconds).map(([name, ms]) => `${name.replace("_", " ")} ${duration(ms)}`);
  const notes = report.notes.map((text) => el("p", { class: "small", text }));
  return [el("div", { class: "scroll" }, table), el("p", { class: "small stages", text: stages.join(" · ") }), ...notes];
}

function segmentRow(segment, pictures) {
  const { picture, page } = (segment.medium !== null && pictures[segment.medium]) || {};
  const what = segment.medium === null ? "text" : (picture?.label(page) ?? `${segment.kind} ${segment.medium + 1}`);
  const because = el("td", { text: segment.reason });
  const gloss = GLOSSES.find(([pattern]) => pattern.test(segment.reason))?.[1];
  if (gloss) because.append(el("span", { class: "gloss", text: gloss }));
  if (segment.tier in TIERS && segment.tier !== segment.reason) because.append(el("span", { class: "gloss", text: `it was ${TIERS[segment.tier].where}` }));
  if (segment.features) because.append(el("span", { class: "gloss", text: `features: ${segment.features}` }));
  return el("tr", { class: segment.status }, el("td", { class: "part", text: what }),
    el("td", { class: "number", text: `${segment.start}–${segment.end}` }),
    el("td", { text: segment.status === "reused" ? "remembered" : segment.status }), because);
}

function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}
