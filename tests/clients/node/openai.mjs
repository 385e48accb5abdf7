// openai-node: chats, stream helper, parse, completions, responses, models, errors.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  allCities, answer, assert, model, named, openaiURL, question, run, tool,
} from "./common.mjs";

const client = new OpenAI({ baseURL: openaiURL, apiKey: "none", maxRetries: 0 });
const asked = { model, temperature: 0, messages: [{ role: "user", content: question }] };
const Reading = z.object({ city: z.enum(["Rome", "Oslo"]), degrees: z.enum(["1", "2"]) });

function callOf(message) {
  assert.equal(message.tool_calls.length, 1);
  const { name, arguments: text } = message.tool_calls[0].function;
  return { name, arguments: JSON.parse(text) };
}

function weather(content) {
  return { model, temperature: 0, tools: [tool], messages: [{ role: "user", content }] };
}

await run({
  async models() {
    const page = await client.models.list();
    assert.deepEqual(page.data.map((card) => card.id), [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat() {
    const whole = await client.chat.completions.create(asked);
    assert.equal(whole.choices[0].message.content, answer);
    let text = "";
    let usage;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, answer);
    assert.equal(usage.total_tokens, whole.usage.total_tokens);
  },
  async streamHelper() {
    const stream = client.chat.completions.stream(asked);
    assert.equal(await stream.finalContent(), answer);
  },
  async tools() {
    await allCities(async (content) => {
      const whole = await client.chat.completions.create(weather(content));
      assert.equal(whole.choices[0].finish_reason, "tool_calls");
      return callOf(whole.choices[0].message);
    });
    await allCities(async (content) => {
      const stream = client.chat.completions.stream(weather(content));
      return callOf((await stream.finalChatCompletion()).choices[0].message);
    });
  },
  async forcedTool() {
    const forced = { ...asked, tools: [tool], tool_choice: named, parallel_tool_calls: false };
    const whole = await client.chat.completions.create(forced);
    assert.equal(typeof callOf(whole.choices[0].message).arguments.city, "string");
  },
  async toolRunner() {
    let city;
    const runner = client.chat.completions.runTools({
      ...weather("What is the weather in Oslo in celsius?"),
      tools: [{
        type: "function",
        function: {
          ...tool.function,
          parse: JSON.parse,
          function: (given) => {
            city = given.city;
            return JSON.stringify({ ...given, temperature: 21, sky: "sunny" });
          },
        },
      }],
    });
    assert.match(await runner.finalContent(), /21/);
    assert.equal(city, "Oslo");
  },
  async parse() {
    const form = { response_format: zodResponseFormat(Reading, "reading") };
    const whole = await client.chat.completions.parse({ ...asked, ...form });
    Reading.parse(whole.choices[0].message.parsed);
    const response = await client.responses.parse({
      model, temperature: 0, input: question, text: { format: zodTextFormat(Reading, "reading") },
    });
    Reading.parse(response.output_parsed);
  },
  async completions() {
    const fields = { model, temperature: 0, prompt: "Once upon a", max_tokens: 8 };
    const whole = await client.completions.create(fields);
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
      text += chunk.choices[0]?.text ?? "";
    }
    assert.equal(text, whole.choices[0].text);
  },
  async responses() {
    const fields = { model, temperature: 0, input: question };
    assert.equal((await client.responses.create(fields)).output_text, answer);
    const stream = client.responses.stream(fields);
    assert.equal((await stream.finalResponse()).output_text, answer);
    await allCities(async (input) => {
      const { type, function: f } = tool;
      const stream = client.responses.stream({
        model, temperature: 0, input, tools: [{ type, strict: false, ...f }],
      });
      const [item] = (await stream.finalResponse()).output;
      return { name: item.name, arguments: JSON.parse(item.arguments) };
    });
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), (error) => {
      return error instanceof OpenAI.BadRequestError && error.param === "temperature";
    });
    await assert.rejects(client.models.retrieve("no/such"), OpenAI.NotFoundError);
  },
});
