// OpenAI's package for Node: URL KEY MODEL QUESTION. Prints JSON: the answer of runTools, the streamed one, what was asked, a parsed result.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, key, model, question] = process.argv.slice(2);
const skies = { Paris: { sky: "sunny", degrees: 21 }, Tokyo: { sky: "snowy", degrees: 3 } };
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const asked = [];
const common = () => ({
  model,
  temperature: 0,
  messages: [{ role: "user", content: question }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather of a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: ({ city }) => {
          asked.push(city);
          return JSON.stringify(skies[city] ?? {}).replaceAll(":", ": ").replaceAll(",", ", ");
        },
      },
    },
  ],
});

const text = await client.chat.completions.runTools(common()).finalContent();
const streamed = await client.chat.completions.runTools({ ...common(), stream: true }).finalContent();
const schema = z.object({ warm: z.boolean() });
const { messages } = common();
const response_format = zodResponseFormat(schema, "report");
const parsed = await client.chat.completions.parse({ model, temperature: 0, messages, response_format });
const response = await client.responses.create({ model, temperature: 0, input: question });
console.log(JSON.stringify({ text, streamed, asked, output: parsed.choices[0].message.parsed, response: response.output_text }));
