// The calls of Ollama's JavaScript client: each works, or the server refuses it by name. Node reads this from standard
// input, in the folder that has the packages.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const host = process.env.SERVER;
const ollama = new Ollama({ host });
const model = "chatty";
const HELLO = "Hello, here is a short text of a model that follows a script.";
const messages = [{ role: "user", content: "hi" }];
const asked = [{ role: "user", content: "What is the weather in 'Oslo'?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "Weather of a city", parameters } }];
const weather = { name: "weather", arguments: { city: "Oslo" }, index: 0 };
const schema = { type: "object", properties: { age: { type: "integer" } }, required: ["age"] };

async function all(stream) {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
}

async function refusal(name, call) {
  try {
    await call();
  } catch (error) {
    assert.equal(error.name, "ResponseError", String(error));
    assert.ok(error.status_code >= 400 && error.error.toLowerCase().includes(name), `${name}: ${error.error}`);
    return;
  }
  assert.fail(`not refused: ${name}`);
}

const steps = {
  async generates() {
    const whole = await ollama.generate({ model, prompt: "hi" });
    assert.equal(whole.response, HELLO);
    const parts = await all(ollama.generate({ model, prompt: "hi", stream: true }));
    assert.ok(parts.length > 3);
    assert.equal(parts.map((part) => part.response).join(""), HELLO);
    const { done, done_reason, eval_count } = parts.at(-1);
    assert.deepEqual([done, done_reason, eval_count], [true, "stop", whole.eval_count]);
  },
  async chats() {
    const whole = await ollama.chat({ model, messages });
    assert.equal(whole.message.content, HELLO);
    const parts = await all(ollama.chat({ model, messages, stream: true }));
    assert.equal(parts.map((part) => part.message.content).join(""), HELLO);
    assert.equal(parts.at(-1).eval_count, whole.eval_count);
  },
  async "calls tools"() {
    const { message } = await ollama.chat({ model, messages: asked, tools });
    assert.deepEqual(message.tool_calls.map((call) => call.function), [weather]);
    const result = { role: "tool", tool_name: "weather", content: "sun" };
    const answer = await ollama.chat({ model, messages: [...asked, message, result], tools });
    assert.equal(answer.message.content, "The result is sun.");
    const parts = await all(ollama.chat({ model, messages: asked, tools, stream: true }));
    const calls = parts.flatMap((part) => part.message.tool_calls ?? []);
    assert.deepEqual(calls.map((call) => call.function), [weather]);
  },
  async "writes objects"() {
    const { message } = await ollama.chat({ model, messages, format: schema });
    assert.equal(typeof JSON.parse(message.content).age, "number");
    assert.equal(typeof JSON.parse((await ollama.generate({ model, prompt: "hi", format: "json" })).response), "object");
  },
  async thinks() {
    const thinking = { model, messages: [{ role: "user", content: "Think." }], think: true };
    const { message } = await ollama.chat(thinking);
    assert.deepEqual([message.thinking, message.content], ["I think.", HELLO]);
    const parts = await all(ollama.chat({ ...thinking, stream: true }));
    assert.equal(parts.map((part) => part.message.thinking ?? "").join(""), "I think.");
  },
  async "uses options"() {
    const answer = await ollama.generate({ model, prompt: "hi", options: { num_predict: 5, num_ctx: 2048, seed: 1 } });
    assert.deepEqual([answer.done_reason, answer.eval_count], ["length", 5]);
  },
  async embeds() {
    const { embeddings } = await ollama.embed({ model, input: ["foo", "bar"] });
    assert.equal(embeddings.length, 2);
    assert.equal((await ollama.embeddings({ model, prompt: "foo" })).embedding.length, embeddings[0].length);
  },
  async lists() {
    const { models } = await ollama.list();
    assert.ok(models.every((each) => each.name === each.model && each.size >= 0 && each.digest));
    assert.ok((await ollama.ps()).models.length > 0);
    assert.ok((await ollama.show({ model: models[0].name })).capabilities.includes("completion"));
    assert.match((await ollama.version()).version, /^\d+\.\d+/);
  },
  async "is aborted"() {
    const stream = await ollama.generate({ model, prompt: "Write 1000 lines.", stream: true });
    const reading = (async () => {
      for await (const part of stream) stream.abort();
    })();
    await assert.rejects(reading, { name: "AbortError" });
    assert.equal((await ollama.generate({ model, prompt: "hi" })).response, HELLO);
  },
  async refuses() {
    await refusal("pushed", () => ollama.push({ model }));
    await refusal("created", () => ollama.create({ model: "mine", from: model }));
    await refusal("copied", () => ollama.copy({ source: model, destination: "mine" }));
    await refusal("deleted", () => ollama.delete({ model }));
    assert.equal((await ollama.pull({ model })).status, "success");
    await refusal("absent", () => ollama.pull({ model: "absent" }));
    await refusal("images", () => ollama.generate({ model, prompt: "hi", images: ["aGk="] }));
    await refusal("colour", () => ollama.generate({ model, prompt: "hi", options: { colour: 1 } }));
    await refusal("colour", () => ollama.generate({ model, prompt: "hi", stream: true, options: { colour: 1 } }));
  },
};

for (const [step, run] of Object.entries(steps)) {
  try {
    await run();
    console.log(`passed  ${step}`);
  } catch (error) {
    process.exitCode = 1;
    console.log(`FAILED  ${step}: ${error.stack ?? error}`);
  }
}
