// One question about one picture, with OpenAI's Node client: npm install openai.
//
//     node examples/chat.mjs examples/picture.png
//
import { readFile } from "node:fs/promises";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.KEEPSIGHT_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.KEEPSIGHT_KEY ?? "none",
});
const model = (await client.models.list()).data[0].id;
const data = (await readFile(process.argv[2])).toString("base64");

const stream = await client.chat.completions.create({
  model,
  stream: true,
  stream_options: { include_usage: true },
  messages: [
    {
      role: "user",
      content: [
        { type: "image_url", image_url: { url: `data:image/png;base64,${data}` } },
        { type: "text", text: "What is in the picture?" },
      ],
    },
  ],
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
  if (chunk.usage) {
    const cached = chunk.usage.prompt_tokens_details.cached_tokens;
    console.log(`\n[${chunk.usage.prompt_tokens} tokens, ${cached} remembered]`);
  }
}

const response = await client.responses.create({
  model,
  input: [
    {
      role: "user",
      content: [
        { type: "input_image", image_url: `data:image/png;base64,${data}`, detail: "auto" },
        { type: "input_text", text: "What is in the picture?" },
      ],
    },
  ],
});
console.log(response.output_text);
