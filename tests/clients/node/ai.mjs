// The Vercel AI SDK, through its OpenAI-compatible provider and through OpenAI's own (responses).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  generateObject, generateText, jsonSchema, Output, stepCountIs, streamObject, streamText,
  tool as aiTool,
} from "ai";
import { z } from "zod";
import {
  allCities, answer, assert, model, openaiURL, question, run, tool, toolSchema,
} from "./common.mjs";

const compatible = createOpenAICompatible({
  name: "mlx-mtp", baseURL: openaiURL, includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: openaiURL, apiKey: "none" });
const Reading = z.object({ city: z.enum(["Rome", "Oslo"]), degrees: z.enum(["1", "2"]) });
const description = tool.function.description;
const inputSchema = jsonSchema(toolSchema);
const calls = { get_weather: aiTool({ description, inputSchema }) };

function checksFor(chat) {
  const common = { model: chat, temperature: 0, maxRetries: 0 };
  return {
    async text() {
      const whole = await generateText({ ...common, prompt: question });
      assert.equal(whole.text, answer);
      assert(whole.usage.outputTokens > 0);
      const stream = streamText({ ...common, prompt: question });
      let text = "";
      for await (const piece of stream.textStream) text += piece;
      assert.equal(text, answer);
      assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    },
    async tools() {
      await allCities(async (prompt) => {
        const whole = await generateText({ ...common, prompt, tools: calls });
        assert.equal(whole.finishReason, "tool-calls");
        const [{ toolName, input }] = whole.toolCalls;
        return { name: toolName, arguments: input };
      });
      await allCities(async (prompt) => {
        const stream = streamText({ ...common, prompt, tools: calls });
        const [{ toolName, input }] = await stream.toolCalls;
        return { name: toolName, arguments: input };
      });
    },
    async toolLoop() {
      const execute = async (given) => ({ ...given, temperature: 21, sky: "sunny" });
      const tools = { get_weather: aiTool({ description, inputSchema, execute }) };
      const prompt = "What is the weather in Oslo in celsius?";
      const stream = streamText({ ...common, prompt, tools, stopWhen: stepCountIs(3) });
      assert.match(await stream.text, /21/);
      assert.equal((await stream.steps).length, 2);
    },
    async object() {
      const output = Output.object({ schema: Reading });
      const whole = await generateText({ ...common, prompt: question, output });
      Reading.parse(whole.output);
      const stream = streamText({ ...common, prompt: question, output });
      Reading.parse(await stream.output);
      const asked = { ...common, prompt: question, schema: Reading };
      Reading.parse((await generateObject(asked)).object);
      const streamed = streamObject(asked);
      // The stream is generated only as far as it is read.
      for await (const piece of streamed.partialObjectStream) assert.ok(piece);
      Reading.parse(await streamed.object);
    },
  };
}

await run({
  ...checksFor(compatible(model)),
  ...Object.fromEntries(
    Object.entries(checksFor(openai(model))).map(([name, check]) => [`responses ${name}`, check]),
  ),
});
