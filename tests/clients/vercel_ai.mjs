// Vercel's AI SDK: its OpenAI providers (chat, responses) and the one for compatible servers.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.KEEPSIGHT_URL;
const image = readFileSync(process.env.KEEPSIGHT_PICTURE);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "keepsight",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});

function check(truth, what) {
  if (!truth) throw new Error(`not so: ${what}`);
  console.log("ok:", what);
}

const look = tool({
  description: "Look closer.",
  inputSchema: z.object({ where: z.string() }),
  execute: async () => "A ring.",
});
const asked = {
  role: "user",
  content: [
    { type: "text", text: "What is in the picture?" },
    { type: "image", image },
  ],
};
const models = {
  chat: openai.chat("demo"),
  responses: openai.responses("demo"),
  compatible: compatible("demo"),
};
for (const [name, model] of Object.entries(models)) {
  const options = { model, maxRetries: 0, maxOutputTokens: 12, stopWhen: stepCountIs(3) };
  const first = await generateText({ ...options, messages: [asked] });
  check(first.usage.inputTokens > 0, `${name}: usage`);
  const more = [asked, ...first.response.messages, { role: "user", content: "And now?" }];
  const again = await generateText({ ...options, messages: more });
  check(again.usage.cachedInputTokens > 0, `${name}: cached tokens`);
  await generateText({ ...options, messages: [asked], tools: { look } });
  const { object } = await generateObject({
    model,
    maxRetries: 0,
    maxOutputTokens: 200,
    messages: [asked],
    schema: z.object({ colour: z.enum(["red", "green", "blue"]), sides: z.int().min(0).max(9) }),
  });
  check(["red", "green", "blue"].includes(object.colour), `${name}: an object`);
  const stream = streamText({ ...options, messages: [asked], tools: { look } });
  for await (const _ of stream.textStream);
  check((await stream.usage).outputTokens > 0, `${name}: usage of a stream`);
}
