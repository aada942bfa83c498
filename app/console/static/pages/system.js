// The server itself: does it answer, what does it serve, how much room is left.
import { Badge, Fact, Loading, Page, Problem, Section, Time, html } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { bytes, count, percent, seconds, short } from "../lib/format.js";
import { MODEL_STATES } from "./queue.js";

const EVERY = 3000;

function Model({ model, ready, facts }) {
  const busy = model.wall_seconds ? model.busy_seconds / model.wall_seconds : null;
  const memory = model.memory;
  return html`<article class="model">
    <h3>${model.model_name} <${Badge} state=${ready?.state ?? model.state}>${MODEL_STATES[ready?.state ?? model.state]}<//></h3>
    ${ready?.detail && html`<p>${ready.detail}</p>`}
    <dl class="facts">
      <${Fact} label="Context">${count(facts?.max_context_length)} tokens<//>
      <${Fact} label="Training, last minute">${short(model.tokens_per_second)} tokens/s<//>
      <${Fact} label="Trained since the start">${short(model.tokens)} tokens, ${count(model.steps)} steps<//>
      <${Fact} label="Worker busy">${percent(busy)}<//>
      <${Fact} label="Waiting">${count(model.waiting.training)} training, ${count(model.waiting.samples)} samples<//>
      <${Fact} label="Live runs">${count(model.waiting.adapters)}<//>
      ${memory && html`<${Fact} label="Memory of the device">${bytes(memory.total)}, ${bytes(memory.base)} for the base model<//>`}
    </dl>
  </article>`;
}

function Setting({ name, value }) {
  const shown = typeof value === "number" && !/timeout|retention|seconds|grace/.test(name) ? count(value) : typeof value === "string" ? value : value === 0 ? "off" : seconds(value);
  return html`<${Fact} label=${name.replaceAll("_", " ")}>${shown}<//>`;
}

export function System() {
  const { data, error, loading, reload } = useData(async (signal) => {
    const health = get("readyz", {}, signal).catch((problem) => (problem.status === 503 ? null : Promise.reject(problem)));
    const [system, ready, work, can] = await Promise.all([get("system", {}, signal), health, get("throughput", {}, signal), get("get_server_capabilities", {}, signal)]);
    return { system, ready, work, can };
  }, [], EVERY);
  const { system, ready, work, can } = data ?? {};
  const tight = system?.disk && system.disk.free / system.disk.total < 0.1;
  return html`<${Page} title="System health">
    <${Problem} error=${error} what="The server's state is not known" retry=${reload} />
    ${loading && html`<${Loading} what="the state of the server" />`}
    ${data && html`<${Section} title=${ready ? "Everything answers" : "Not everything answers"} about=${ready ? "The worker of every base model has answered just now." : "At least one base model cannot take work; see below. Accepted work is kept, and goes on when it can."}>
      <dl class="facts">
        <${Fact} label="Version">${system.version}<//><${Fact} label="Started"><${Time} value=${system.started} /><//>
        <${Fact} label="Engine">${system.engine}<//><${Fact} label="Sampler">${system.sampler}<//>
        <${Fact} label="Database">${system.database}<//><${Fact} label="Checkpoints in">${system.checkpoints_in === "s3" ? "an object storage" : "the data folder"}<//>
        ${system.disk && html`<${Fact} label="Disk of the data folder"><${Badge} state=${tight ? "failed" : "ready"}>${tight ? "nearly full" : "room left"}<//> ${bytes(system.disk.free)} free of ${bytes(system.disk.total)}<//>`}
      </dl><//>
    <${Section} title="Base models">${work.models.map((model) => html`<${Model} key=${model.model_name} model=${model}
      ready=${ready?.models.find((one) => one.model_name === model.model_name)} facts=${can.supported_models.find((one) => one.model_name === model.model_name)} />`)}<//>
    <${Section} title="Limits and times" about="Settings that explain what a client sees; docs/settings.md has all.">
      <dl class="facts">${Object.entries(system.settings).map(([name, value]) => html`<${Setting} key=${name} name=${name} value=${value} />`)}</dl><//>
    <${Section} title="Where this server is not the hosted service"><ul class="list">${can.notes.map((note) => html`<li>${note}</li>`)}</ul><//>`}
  <//>`;
}
