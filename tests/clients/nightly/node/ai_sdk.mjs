// The loop of Vercel's AI SDK: URL KEY MODEL QUESTION. Prints JSON: the answer, the streamed one, what was asked, a structured result.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, key, name, question] = process.argv.slice(2);
const skies = { Paris: { sky: "sunny", degrees: 21 }, Tokyo: { sky: "snowy", degrees: 3 } };
const provider = createOpenAICompatible({ name: "toolkit", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true });
const asked = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      asked.push(city);
      return skies[city] ?? {};
    },
  }),
};
const common = { model: provider(name), tools, prompt: question, temperature: 0, maxRetries: 0, stopWhen: stepCountIs(6) };

const { text } = await generateText(common);
const stream = streamText(common);
let streamed = "";
for await (const part of stream.textStream) streamed += part;
const schema = z.object({ warm: z.boolean() });
// A model of this size has learned no JSON but that of calls: the logit bias keeps `<` from its answer.
const providerOptions = { toolkit: { logit_bias: { 31: -100 } } };
const structured = await generateText({ ...common, providerOptions, output: Output.object({ schema }) });
console.log(JSON.stringify({ text, streamed, asked, output: structured.output }));
