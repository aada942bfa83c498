// One training step with the generated types: `training_step.js URL KEY MODEL`; prints what came out as JSON.

import createClient from "openapi-fetch";

import type { components, paths } from "./schema.js";

type Schemas = components["schemas"];

const TOKENS = [72, 101, 108, 108, 111];
const TARGETS = [101, 108, 108, 111, 33];

const [url, key, baseModel] = process.argv.slice(2);
if (url === undefined || key === undefined || baseModel === undefined) {
  throw new Error("give URL KEY MODEL");
}
const client = createClient<paths, "application/json">({ baseUrl: url, headers: { "X-API-Key": key } });

/** The data of an answer, or an exception that says what was answered instead. */
function expect<T>(answer: { data?: T; error?: unknown }): T {
  if (answer.data === undefined) {
    throw new Error(`refused: ${JSON.stringify(answer.error)}`);
  }
  return answer.data;
}

/** The result behind a promise. */
async function waitFor(answer: { data?: Schemas["UntypedPromise"]; error?: unknown }) {
  const { request_id } = expect(answer);
  for (;;) {
    const polled = await client.POST("/api/v1/retrieve_future", { body: { request_id } });
    if (polled.error !== undefined && "queue_state" in polled.error) {
      continue;
    }
    const result = expect(polled);
    if ("error" in result) {
      throw new Error(`failed: ${result.error}`);
    }
    return result;
  }
}

const session = expect(
  await client.POST("/api/v1/create_session", { body: { tags: ["generated-typescript"] } }),
).session_id;

const created = await waitFor(
  await client.POST("/api/v1/create_model", {
    body: { session_id: session, model_seq_id: 0, base_model: baseModel, lora_config: { rank: 4, seed: 7 } },
  }),
);
if (!("type" in created) || created.type !== "create_model") {
  throw new Error(`a model was due, not ${JSON.stringify(created)}`);
}
const model_id = created.model_id;

const batch = {
  model_id,
  seq_id: 1,
  data: [
    {
      model_input: TOKENS,
      loss_fn_inputs: { target_tokens: TARGETS, weights: TARGETS.map(() => 1) },
    },
  ],
};
const refused = await client.POST("/api/v1/forward_backward", { body: { ...batch, loss_fn: "no_such_loss" } });
if (refused.error === undefined) {
  throw new Error("a loss that does not exist was taken");
}
const trained = await waitFor(
  await client.POST("/api/v1/forward_backward", { body: { ...batch, loss_fn: "cross_entropy" } }),
);
if (!("loss_fn_outputs" in trained)) {
  throw new Error(`a loss was due, not ${JSON.stringify(trained)}`);
}

const stepped = await waitFor(
  await client.POST("/api/v1/optim_step", { body: { model_id, seq_id: 2, adam_params: { learning_rate: 1e-3 } } }),
);
if (!("metrics" in stepped) || "loss_fn_outputs" in stepped) {
  throw new Error(`metrics were due, not ${JSON.stringify(stepped)}`);
}

const sampler = expect(
  await client.POST("/api/v1/create_sampling_session", {
    body: { session_id: session, sampling_session_seq_id: 0, base_model: baseModel },
  }),
);
const sampled = await waitFor(
  await client.POST("/api/v1/asample", {
    body: {
      sampling_session_id: sampler.sampling_session_id,
      prompt: TOKENS,
      sampling_params: { max_tokens: 6, temperature: 0, stop: [] },
    },
  }),
);
if (!("sequences" in sampled)) {
  throw new Error(`samples were due, not ${JSON.stringify(sampled)}`);
}

console.log(
  JSON.stringify({
    refused: refused.error.error.field,
    loss: trained.metrics["loss:sum"],
    logprobs: trained.loss_fn_outputs[0]?.["logprobs"]?.data,
    grad_norm: stepped.metrics?.["grad_norm"],
    tokens: sampled.sequences[0]?.tokens,
  }),
);
