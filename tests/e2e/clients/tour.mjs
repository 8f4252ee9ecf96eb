// A tour of the API with OpenAI's own Node client. Prints one JSON object with what came back;
// tests/e2e/test_clients.py says what it must be.
//
//     node tour.mjs BASE_URL MODEL IMAGE_FILE
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, model, imageFile] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const image = `data:image/png;base64,${readFileSync(imageFile).toString("base64")}`;
const count = [{ role: "user", content: "Count from 3 to 9." }];
const describe = [
  {
    role: "user",
    content: [
      { type: "image_url", image_url: { url: image } },
      { type: "text", text: "Describe the image." },
    ],
  },
];
const chat = (messages, options = {}) =>
  client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 60, ...options });

async function collect(stream) {
  const seen = { text: "", reasons: [], roles: [], usage: null, chunks: 0 };
  for await (const chunk of stream) {
    seen.chunks += 1;
    if (chunk.usage) seen.usage = chunk.usage;
    for (const choice of chunk.choices) {
      seen.text += choice.delta.content ?? "";
      if (choice.delta.role) seen.roles.push(choice.delta.role);
      seen.reasons.push(choice.finish_reason);
    }
  }
  return seen;
}

async function errorOf(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return { type: error.constructor.name, status: error.status, param: error.param };
  }
}

const tool = {
  type: "function",
  function: {
    name: "paint",
    description: "Paint a shape.",
    strict: true,
    parameters: {
      type: "object",
      properties: { color: { enum: ["red", "green"] } },
      required: ["color"],
      additionalProperties: false,
    },
  },
};
const schema = {
  name: "count",
  strict: true,
  schema: {
    type: "object",
    properties: { n: { type: "integer", minimum: 0, maximum: 9 } },
    required: ["n"],
    additionalProperties: false,
  },
};

const result = {
  models: (await client.models.list()).data.map((entry) => entry.id),
  whole: await chat(count),
  stream: await collect(
    await chat(count, { stream: true, stream_options: { include_usage: true } }),
  ),
  image: await chat(describe),
  several: await chat(count, { n: 3, temperature: 1, seed: 5 }),
  logprobs: await chat(count, { logprobs: true, top_logprobs: 2, max_tokens: 5 }),
  schema: await chat(count, {
    response_format: { type: "json_schema", json_schema: schema }, max_tokens: 100,
  }),
  tools: await chat(count, {
    tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 250,
  }),
  completion: await client.completions.create({
    model, prompt: "Count from 3 to", max_tokens: 4, temperature: 0, echo: true, logprobs: 1,
  }),
  badParameter: await errorOf(chat(count, { temperature: 3 })),
  badModel: await errorOf(client.chat.completions.create({ model: "x", messages: count })),
};
// The client's own helper, which puts a stream together again.
const runner = client.chat.completions.stream({ model, messages: count, temperature: 0, max_tokens: 60 });
result.helper = await runner.finalContent();
console.log(JSON.stringify(result));
