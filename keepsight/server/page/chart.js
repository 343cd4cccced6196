// Two small drawings by hand: how full a tier is, and how much of each prompt was remembered.

import { el, svg } from "./dom.js";

/** A bar of what is used of a budget; without a budget the bar says nothing and is left out. */
export function gauge(used, budget, label) {
  const share = budget ? Math.min(1, used / budget) : 0;
  const width = used && share < 0.005 ? 0.5 : 100 * share;
  return svg("svg", { class: "gauge", viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("rect", { class: "track", width: 100, height: 4 }), svg("rect", { class: "fill", width, height: 4 }));
}

/** One column for each answer: its height the prompt, its filled part what was remembered. */
export function history(answers) {
  const shown = answers.slice(-48), step = 12, height = 64;
  const most = Math.max(...shown.map((one) => one.prompt));
  const columns = shown.flatMap(({ prompt, cached }, spot) => {
    const tall = (height * prompt) / most, full = (height * cached) / most;
    const x = 4 + spot * step;
    return [
      svg("rect", { class: "whole", x, y: height - tall, width: step - 4, height: tall }, svg("title", { text: `${cached} of ${prompt} tokens remembered` })),
      svg("rect", { class: "hit", x, y: height - full, width: step - 4, height: full }),
    ];
  });
  const width = Math.max(24 * step, shown.length * step + 8);
  const label = `Prompt tokens remembered, answer by answer: ${shown.map((a) => `${a.cached} of ${a.prompt}`).join(", ")}`;
  return el("figure", { class: "chart" },
    svg("svg", { viewBox: `0 0 ${width} ${height + 1}`, preserveAspectRatio: "xMinYMax meet", role: "img", "aria-label": label },
      ...columns, svg("line", { x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5 })),
    el("figcaption", {}, el("span", { class: "key hit", text: "remembered" }), el("span", { class: "key whole", text: "computed" }),
      el("span", { text: `tokens of the prompt, answer by answer; the tallest is ${most}` })));
}
