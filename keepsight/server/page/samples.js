// Pictures and questions to begin with, where a demo model is served: it knows one coloured shape.

import { button, el } from "./dom.js";

const SIDE = 128;
const SAMPLES = [
  { name: "red circle", colour: "#d62728", question: "Describe the picture.", path: (pen) => pen.arc(64, 64, 25, 0, 2 * Math.PI) },
  { name: "blue square", colour: "#1f5ac8", question: "What color is the shape in the picture?", path: (pen) => pen.rect(42, 42, 44, 44) },
  { name: "green triangle", colour: "#2c963c", question: "Where is the shape in the picture?",
    path: (pen) => [[64, 38], [88, 84], [40, 84]].forEach(([x, y]) => pen.lineTo(x, y)) },
];

/** Buttons for `model`; none for other models. `ask(file, question)` is called with the one that is chosen. */
export async function samples(model, ask) {
  if (!/^demo(-\w+)?$/.test(model)) return [];
  return Promise.all(SAMPLES.map(async (sample) => {
    const file = await drawn(sample);
    const made = button("", () => ask(file, sample.question), { class: "sample" });
    made.append(el("img", { class: "thumb", src: URL.createObjectURL(file), alt: sample.name }), el("span", { text: sample.question }));
    return made;
  }));
}

async function drawn({ name, colour, path }) {
  const canvas = new OffscreenCanvas(SIDE, SIDE), pen = canvas.getContext("2d");
  pen.fillStyle = "#fafafa";
  pen.fillRect(0, 0, SIDE, SIDE);
  pen.beginPath();
  path(pen);
  pen.fillStyle = colour;
  pen.fill();
  return new File([await canvas.convertToBlob({ type: "image/png" })], `${name}.png`, { type: "image/png" });
}
