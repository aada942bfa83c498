// Before and after on examples: how likely each model finds the right answer, and whether it gives it by itself.
import { post } from "./api.js";

const BATCH = 8;
const SPARE_TOKENS = 8;
const EVEN = 0.005;

// Lines of JSON to items {prompt | messages, completion}. Throws with the number of the line that is wrong.
export function parseItems(text) {
  const items = [];
  text.split(/\r?\n/).forEach((line, place) => {
    if (!line.trim()) return;
    const at = `Line ${place + 1}`;
    let value;
    try {
      value = JSON.parse(line);
    } catch {
      throw new Error(`${at} is not JSON. Each line must be one object.`);
    }
    items.push(itemOf(value, at));
  });
  if (!items.length) throw new Error("There is no line in it.");
  return items;
}

function itemOf(value, at) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error(`${at} is not an object.`);
  const filled = (text) => typeof text === "string" && text.length > 0;
  if (Array.isArray(value.messages)) {
    const messages = value.messages.map(({ role, content }) => ({ role, content }));
    const last = messages.pop();
    if (last?.role !== "assistant" || !filled(last.content)) throw new Error(`${at}: the last of the messages must be the assistant's, with text.`);
    if (!messages.length || !messages.every((one) => ["system", "user", "assistant"].includes(one.role) && typeof one.content === "string")) {
      throw new Error(`${at}: messages need a role (system, user or assistant) and a text as content.`);
    }
    return { messages, completion: last.content, shown: messages.at(-1).content };
  }
  if (typeof value.prompt !== "string" || !filled(value.completion)) throw new Error(`${at} needs "prompt" and "completion", or "messages".`);
  return { prompt: value.prompt, completion: value.completion, shown: value.prompt };
}

// Scores each item under both models: calls `told(place, result)` as they come.
export async function evaluate({ items, models, matches, signal, told }) {
  for (let begin = 0; begin < items.length && !signal.aborted; begin += BATCH) {
    const some = items.slice(begin, begin + BATCH);
    const plain = some.map(({ prompt, messages, completion }) => ({ prompt, messages, completion }));
    const { items: tokens } = await post("tokenize", { model: models[0], items: plain }, signal);
    const scored = await Promise.all(models.map((model) => score(model, tokens, signal)));
    const said = matches ? await Promise.all(models.map((model) => answers(model, tokens, signal))) : models.map(() => tokens.map(() => null));
    some.forEach((item, place) => {
      const [before, after] = scored.map((one) => one[place]);
      const match = said.map((one) => (one[place] === null ? null : one[place].trim() === item.completion.trim()));
      told(begin + place, { before, after, match, said: said.map((one) => one[place]), verdict: compare(before, after) });
    });
  }
}

export function compare(before, after) {
  if (Math.abs(before - after) < EVEN) return "tie";
  return after < before ? "win" : "loss";
}

// Mean negative logprob of the completion's tokens; null if there is nothing to score.
async function score(model, tokens, signal) {
  const prompts = tokens.map((one) => [...one.prompt_tokens, ...one.completion_tokens]);
  const { choices } = await post("oai/api/v1/completions", { model, prompt: prompts, max_tokens: 0, echo: true, logprobs: 0 }, signal);
  return choices.map((choice, place) => {
    const own = choice.logprobs.token_logprobs.slice(-tokens[place].completion_tokens.length).filter((value) => value !== null);
    return own.length ? -own.reduce((sum, value) => sum + value, 0) / own.length : null;
  });
}

async function answers(model, tokens, signal) {
  const most = Math.max(...tokens.map((one) => one.completion_tokens.length)) + SPARE_TOKENS;
  const body = { model, prompt: tokens.map((one) => one.prompt_tokens), max_tokens: most, temperature: 0 };
  return (await post("oai/api/v1/completions", body, signal)).choices.map((choice) => choice.text);
}

// How often a fair coin would give a split at least as uneven: two-sided sign test, ties left out.
export function signTest(wins, losses) {
  const all = wins + losses;
  if (!all) return 1;
  let term = 1;
  let tail = 0;
  for (let k = 0; k <= Math.min(wins, losses); k += 1) {
    tail += term / 2 ** all;
    term = (term * (all - k)) / (k + 1);
  }
  return Math.min(1, 2 * tail);
}
