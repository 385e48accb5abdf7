// The questions that all scripts ask, and their report: one line of JSON.
import assert from "node:assert/strict";

export const { url, model, question, answer, cities, tool, weather } = JSON.parse(process.argv[2]);
export const openaiURL = `${url}/v1`;
export const toolSchema = tool.function.parameters;
export const named = { type: "function", function: { name: tool.function.name } };

export function weatherQuestion(city) {
  return `What is the weather in ${city} in celsius?`;
}

// Asks about all cities at the same time, and expects a call for each.
export async function allCities(ask) {
  const calls = await Promise.all(cities.map((city) => ask(weatherQuestion(city))));
  calls.forEach((call, index) => {
    assert.equal(call.name, tool.function.name);
    assert.deepEqual(call.arguments, { city: cities[index], unit: "celsius" });
  });
}

// Runs the checks in turn, and prints the names of those that passed.
export async function run(checks) {
  const passed = [];
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
    } catch (error) {
      error.message = `${name}: ${error.message}`;
      throw error;
    }
    passed.push(name);
  }
  console.log(JSON.stringify({ passed }));
}

export { assert };
