// @anthropic-ai/sdk: messages, stream helper, tools, counting, both kinds of key, errors.
import Anthropic from "@anthropic-ai/sdk";
import { allCities, answer, assert, model, question, run, tool, toolSchema, url } from "./common.mjs";

const byKey = new Anthropic({ baseURL: url, apiKey: "none", authToken: null, maxRetries: 0 });
const client = new Anthropic({ baseURL: url, apiKey: null, authToken: "none", maxRetries: 0 });
const asked = {
  model, max_tokens: 60, temperature: 0, messages: [{ role: "user", content: question }],
};
const tools = [{
  name: tool.function.name, description: tool.function.description, input_schema: toolSchema,
}];

function callOf(message) {
  assert.equal(message.stop_reason, "tool_use");
  assert.equal(message.content.length, 1);
  const [{ name, input }] = message.content;
  return { name, arguments: input };
}

function weather(content) {
  return { ...asked, tools, max_tokens: 100, messages: [{ role: "user", content }] };
}

await run({
  async message() {
    for (const each of [client, byKey]) {
      const message = await each.messages.create(asked);
      assert.equal(message.content[0].text, answer);
      assert.equal(message.stop_reason, "end_turn");
    }
  },
  async stream() {
    const kinds = new Set();
    for await (const event of await client.messages.create({ ...asked, stream: true })) {
      kinds.add(event.type);
    }
    assert(kinds.has("message_start") && kinds.has("message_stop"));
    assert.equal(await client.messages.stream(asked).finalText(), answer);
  },
  async tools() {
    await allCities(async (content) => callOf(await client.messages.create(weather(content))));
    await allCities(async (content) => {
      return callOf(await client.messages.stream(weather(content)).finalMessage());
    });
  },
  async forcedTool() {
    const choice = { type: "tool", name: tool.function.name, disable_parallel_tool_use: true };
    const message = await client.messages.create({ ...asked, tools, tool_choice: choice });
    assert.equal(typeof callOf(message).arguments.city, "string");
  },
  async countTokens() {
    const counted = await client.messages.countTokens({ model, messages: asked.messages });
    const { usage } = await client.messages.create(asked);
    assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },
  async errors() {
    await assert.rejects(client.messages.create({ ...asked, model: "no" }), Anthropic.NotFoundError);
    await assert.rejects(
      client.messages.create({ ...asked, max_tokens: 0 }), Anthropic.BadRequestError,
    );
  },
});
