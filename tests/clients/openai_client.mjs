// OpenAI's client for Node: chat and responses, whole and streamed, with history that comes back.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const url = process.env.KEEPSIGHT_URL;
const bytes = readFileSync(process.env.KEEPSIGHT_PICTURE);
const picture = `data:image/png;base64,${bytes.toString("base64")}`;
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });

function check(truth, what) {
  if (!truth) throw new Error(`not so: ${what}`);
  console.log("ok:", what);
}

const question = {
  role: "user",
  content: [
    { type: "image_url", image_url: { url: picture } },
    { type: "text", text: "What is in the picture?" },
  ],
};
const first = await client.chat.completions.create({
  model: "demo",
  messages: [question],
  max_tokens: 12,
});
check(first.usage.prompt_tokens > 0, "usage");
const again = await client.chat.completions.create({
  model: "demo",
  messages: [question, first.choices[0].message, { role: "user", content: "And now?" }],
  max_tokens: 12,
  metadata: { run: "1" },
});
check(again.usage.prompt_tokens_details.cached_tokens > 0, "cached tokens");

let told;
const look = {
  type: "function",
  function: {
    name: "look",
    description: "Look closer.",
    strict: true,
    parameters: {
      type: "object",
      properties: { where: { type: "string" } },
      required: ["where"],
      additionalProperties: false,
    },
    function: () => "A ring.",
    parse: JSON.parse,
  },
};
const runner = client.chat.completions.runTools({
  model: "demo",
  messages: [question],
  tools: [look],
  stop: [" ", "."], // what ends by its length is an error to this runner
  stream: true,
  stream_options: { include_usage: true },
});
runner.on("totalUsage", (usage) => (told = usage));
await runner.done();
check(told.completion_tokens > 0, "a stream with tools");

const response = await client.responses.create({
  model: "demo",
  input: [
    {
      role: "user",
      content: [
        { type: "input_image", image_url: picture, detail: "auto" },
        { type: "input_text", text: "What is in the picture?" },
      ],
    },
  ],
  max_output_tokens: 12,
});
const next = await client.responses.create({
  model: "demo",
  input: "And now?",
  previous_response_id: response.id,
  max_output_tokens: 12,
});
check(next.usage.input_tokens > response.usage.input_tokens, "the response before");
const stream = client.responses.stream({ model: "demo", input: "Hello!", max_output_tokens: 8 });
for await (const _ of stream);
check((await stream.finalResponse()).usage.output_tokens > 0, "a stream of events");
