// Ask a server through the packages `openai` and `ai`, and print what each got as JSON.
// node ask.mjs URL TOKEN MESSAGE
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const [url, apiKey, content] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const messages = [{ role: "user", content }];

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const body = { model: models[0], messages, max_tokens: 16, temperature: 0 };
const plain = (await client.chat.completions.create(body)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...body, stream: true }))
  streamed += chunk.choices[0]?.delta?.content ?? "";

const model = createOpenAICompatible({ name: "jaxflow", baseURL, apiKey })(models[0]);
const settings = { model, messages, maxOutputTokens: 16, temperature: 0, maxRetries: 0 };
const aiPlain = (await generateText(settings)).text;
let aiStreamed = "";
for await (const part of streamText(settings).textStream) aiStreamed += part;

console.log(JSON.stringify({ models, answers: [plain, streamed, aiPlain, aiStreamed] }));
