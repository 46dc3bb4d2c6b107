// The first steps of the Vercel AI SDK with each of its providers. Node reads this from standard input, in the folder
// that has the packages.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { createOllama } from "ai-sdk-ollama";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `${process.env.SERVER}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ baseURL, name: "pagewire", includeUsage: true, supportsStructuredOutputs: true });
const ollama = createOllama({ baseURL: process.env.SERVER });
const models = {
  "openai responses": openai("chatty"),
  "openai chat": openai.chat("chatty"),
  "openai completion": openai.completion("chatty"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("chatty"),
  ollama: ollama("chatty"),
  "openai-compatible": compatible("chatty"),
  "openai-compatible completion": compatible.completionModel("chatty"),
};
const HELLO = "Hello, here is a short text of a model that follows a script.";
const tools = {
  weather: tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sun in ${city}`,
  }),
};
const asked = { prompt: "What is the weather in 'Oslo'?", tools, stopWhen: isStepCount(3) };

async function parts(stream) {
  const seen = [];
  for await (const part of stream) {
    if (part.type === "error") throw part.error;
    seen.push(part);
  }
  return seen;
}

const steps = {
  async generates(model) {
    const { text, usage, finishReason } = await generateText({ model, prompt: "hi", maxOutputTokens: 100, maxRetries: 0 });
    assert.equal(text, HELLO);
    assert.equal(finishReason, "stop");
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  },
  async streams(model) {
    const result = streamText({ model, prompt: "hi", maxOutputTokens: 100, maxRetries: 0, onError() {} });
    const deltas = (await parts(result.stream)).filter((part) => part.type === "text-delta");
    assert.ok(deltas.length > 1);
    assert.equal(deltas.map((part) => part.text).join(""), HELLO);
    const usage = await result.usage;
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
    assert.equal(await result.finishReason, "stop");
  },
  async "is cut off"(model) {
    const { finishReason } = await generateText({ model, prompt: "hi", maxOutputTokens: 16, maxRetries: 0 });
    assert.equal(finishReason, "length");
  },
  async "calls a tool"(model) {
    const { text, steps } = await generateText({ model, ...asked, maxRetries: 0 });
    assert.deepEqual(steps[0].toolCalls.map((call) => [call.toolName, call.input]), [["weather", { city: "Oslo" }]]);
    assert.equal(text, "The result is sun in Oslo.");
  },
  async "streams a call of a tool"(model) {
    const result = streamText({ model, ...asked, maxRetries: 0, onError() {} });
    const seen = await parts(result.stream);
    // Ollama's API has no parts of calls.
    assert.ok(model === models.ollama || seen.some((part) => part.type === "tool-input-delta"));
    const calls = seen.filter((part) => part.type === "tool-call");
    assert.deepEqual(calls.map((call) => [call.toolName, call.input]), [["weather", { city: "Oslo" }]]);
    assert.equal(await result.text, "The result is sun in Oslo.");
  },
  async "must call a tool"(model) {
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const { toolCalls } = await generateText({ model, prompt: "hi", tools, toolChoice, maxRetries: 0 });
      assert.equal(toolCalls[0].toolName, "weather");
    }
  },
  async "writes an object"(model) {
    const schema = z.object({ name: z.string(), age: z.number().int() });
    const { output } = await generateText({ model, prompt: "hi", output: Output.object({ schema }), maxRetries: 0 });
    assert.equal(typeof output.age, "number");
  },
};

let failed = 0;
for (const [name, model] of Object.entries(models)) {
  for (const [step, run] of Object.entries(steps)) {
    if (name === "ollama" && step === "must call a tool") continue; // Ollama's API has no tool_choice
    if (name.includes("completion") && !["generates", "streams", "is cut off"].includes(step)) continue;
    try {
      await run(model);
      console.log(`passed  ${name} ${step}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED  ${name} ${step}: ${error} ${error.responseBody ?? error.cause ?? ""}`);
    }
  }
}
for (const model of [openai.embedding("chatty"), compatible.embeddingModel("chatty"), ollama.embedding("chatty")]) {
  const { embeddings } = await embedMany({ model, values: ["foo", "bar"], maxRetries: 0 });
  assert.equal(embeddings.length, 2);
  assert.ok(embeddings.every((embedding) => embedding.every(Number.isFinite)));
}
process.exitCode = failed ? 1 : 0;
