// What stands under an answer: how soon its first word came, what was remembered and why the rest was computed.

import { el, plural } from "./dom.js";
import { TIERS, thumbnail, tierOf } from "./pictures.js";

const GLOSSES = [
  [/^new$/, "not seen before"], [/^diverged at token (\d+)/, "what is remembered goes on differently from there"],
  [/^no snapshot between/, "nothing is remembered that ends there"],
  [/^evicted/, "it was remembered, and made room for something else"], [/^other weights/, "the model has changed since"],
  [/^made elsewhere/, "remembered features were made in another way, and are not mixed"],
  [/^whole prompt/, "the very same prompt was answered before"],
];

/** One line for an answer, which opens to the rest. `pictures` are those of the prompt: { picture, page };
 * `pace` is what a token that is not remembered took, in ms. */
export function measurements(turn, pictures, pace) {
  const { report, usage, timings, firstMs, model } = turn.told;
  if (!report) return null;
  const saved = pace * usage.prompt_tokens_details.cached_tokens;
  const times = [firstMs !== null && `first word after ${duration(firstMs)}`, saved >= 1 && `saved ${duration(saved)}`].filter(Boolean).join(", ");
  const known = report.images.filter((image) => tierOf(image) !== "computed").length;
  const counts = [remembered(turn.told), ...(report.images.length ? [`${known} of ${plural(report.images.length, "picture")}`] : [])];
  const numbers = [`${remembered(turn.told)} remembered`, `${plural(usage.completion_tokens, "token")} written`,
    timings.predicted_per_second && `${timings.predicted_per_second.toFixed(0)} tokens/s`, model];
  const made = el("details", { class: "told", open: turn.open },
    el("summary", { title: "What was remembered, and why; what is saved is reckoned by what a computed token took here" },
      el("span", { class: "times", text: times }), times && " · ",
      el("span", { class: "counts", text: `remembered ${counts.join(", ")}` })),
    report.images.length ? el("ul", { class: "pictures", "aria-label": "Pictures, and where each came from" },
      ...report.images.map((image) => pictureItem(image, pictures))) : null,
    el("p", { class: "numbers", text: numbers.filter(Boolean).join(" · ") }),
    el("div", { class: "scroll" }, table(report, pictures)),
    el("p", { class: "small", text: Object.entries(report.milliseconds).map(([name, ms]) => `${name.replace("_", " ")} ${duration(ms)}`).join(" · ") }),
    ...report.notes.map((text) => el("p", { class: "small", text })));
  made.addEventListener("toggle", () => {
    if (made.open && !turn.open) made.scrollIntoView({ block: "nearest" });
    turn.open = made.open;
  });
  return made;
}

const remembered = ({ usage }) => `${usage.prompt_tokens_details.cached_tokens} of ${plural(usage.prompt_tokens, "prompt token")}`;

/** The one sentence for those who listen. */
export const summary = (told) => (told.usage ? `${remembered(told)} remembered` : "");

function pictureItem(image, pictures) {
  const tier = tierOf(image), { picture, page } = pictures[image.image] ?? {};
  const whole = image.reason === "whole prompt" && "with the whole prompt";
  const words = whole ? (tier === "memory" ? whole : `${whole}, ${TIERS[tier].from}`) : TIERS[tier].from;
  return el("li", { class: `seen ${tier}`, title: `${image.tokens} tokens; ${image.status}: ${image.reason}` },
    thumbnail(picture, page), el("span", { class: "tier", text: words }));
}

function table({ segments }, pictures) {
  const head = ["Part", "Tokens", "Was", "Because"].map((text) => el("th", { scope: "col", text }));
  return el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...segments.map((segment) => {
    const { kind, medium, start, end, status, reason, tier, features } = segment, { picture, page } = pictures[medium] ?? {};
    const glosses = [GLOSSES.find(([pattern]) => pattern.test(reason))?.[1], tier in TIERS && tier !== reason && `it was ${TIERS[tier].where}`,
      features && `features: ${features}`].filter(Boolean).map((text) => el("span", { class: "gloss", text }));
    return el("tr", { class: status }, el("td", { class: "part", text: medium === null ? kind : (picture?.label(page) ?? `${kind} ${medium + 1}`) }),
      el("td", { class: "number", text: `${start}–${end}` }), el("td", { text: status === "reused" ? "remembered" : status }),
      el("td", {}, reason, ...glosses));
  })));
}

function duration(ms) {
  if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
}
