// Who waits for what, since when, why, and about how long.
import { Badge, Empty, Loading, Page, Problem, Section, Table, Time, html } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { count, kindName, left, shortId, short, things } from "../lib/format.js";
import { Failures } from "./run.js";

const EVERY = 2000;

export const MODEL_STATES = { ready: "ready", starting: "loading", restarting: "restarting", failed: "failed" };

function Models({ models }) {
  return html`<ul class="models">${models.map((model) => html`<li key=${model.model_name}>
    <p><strong>${model.model_name}</strong> <${Badge} state=${model.state}>${MODEL_STATES[model.state]}<//></p>
    ${model.detail && html`<p>${model.detail}</p>`}
    <p class="quiet">${things(model.training_waiting, "training request")} and ${things(model.samples_waiting, "sample")} of all projects
      have not begun; training ran at ${short(model.tokens_per_second)} tokens per second in the last minute.</p>
  </li>`)}</ul>`;
}

function Owner({ one }) {
  if (one.training_run_id) return html`<a class="nowrap" href=${`#/training_runs/${one.training_run_id}`} title=${one.training_run_id}>run ${shortId(one.training_run_id)}</a>`;
  if (one.sampling_session_id) return html`<span title=${one.sampling_session_id}>sampler ${shortId(one.sampling_session_id)}</span>`;
  return "a request without a session";
}

// How an operation is, for its badge: what a client's poll calls it is said below, since its log has that word.
export function stateOf(one) {
  if (one.state === "paused_rate_limit") return { state: "paused", said: "held back" };
  if (one.state !== "active") return { state: "paused", said: "paused" };
  return one.running ? { state: "running", said: "running" } : { state: "waiting", said: "waiting" };
}

function Left({ one }) {
  if (one.state === "paused_rate_limit") return html`<a class="wraps" href="#/keys">when its limit allows</a>`;
  return one.seconds_left === undefined ? html`<span class="quiet">not known yet</span>` : left(one.seconds_left);
}

function Row({ one }) {
  const { state, said } = stateOf(one);
  return html`<tr>
    <th scope="row">${kindName(one.kind)}${one.seq_id ? html` <span class="quiet">#${one.seq_id}</span>` : null}</th>
    <td><${Owner} one=${one} /><span class="under quiet">${one.base_model ?? ""}</span></td>
    <td><${Badge} state=${state}>${said}<//>${one.state !== "active" && html`<span class="under quiet"><code class="nowrap">${one.state}</code></span>`}</td>
    <td class="number">${one.place}</td>
    <td class="why">${one.reason}</td>
    <td class="nowrap"><${Time} value=${one.accepted} /></td>
    <td class="number"><${Left} one=${one} /></td>
  </tr>`;
}

export function Queue() {
  const { data, error, loading, reload } = useData((signal) => get("queue", {}, signal), [], EVERY);
  const columns = [{ name: "Request" }, { name: "For" }, { name: "State" }, { name: "Place", number: true }, { name: "Why it waits" },
    { name: "Accepted" }, { name: "Done in", number: true }];
  const waiting = data?.waiting ?? [];
  const running = waiting.filter((one) => one.running).length;
  const about = data && (data.total ? `${things(data.total, "request")} of this project ${data.total === 1 ? "has" : "have"} no result yet; ${running} ${running === 1 ? "is" : "are"} running.` : undefined);
  return html`<${Page} title="Queue" about="What was accepted and has no result yet. Projects get equal shares of the server, and so do the runs of a project.">
    <${Problem} error=${error} what="The queue is not up to date" retry=${reload} />
    ${loading && html`<${Loading} what="the queue" />`}
    ${data && html`<${Section} title="Waiting and running" about=${about} flush=${waiting.length > 0}>
      ${waiting.length === 0
        ? html`<${Empty} title="Nothing waits"><p>Every request has its result. If your program seems to hang, it is not waiting for this server: look at its own output.</p><//>`
        : html`<${Table} caption="Requests without a result" columns=${columns}>${waiting.map((one) => html`<${Row} key=${one.request_id} one=${one} />`)}<//>`}
      ${data.total > waiting.length && html`<p class="quiet pad">The oldest ${count(waiting.length)} of ${count(data.total)} are shown.</p>`}
    <//>
    <${Section} title="Base models" about="What each has to do, of all projects together."><${Models} models=${data.models} /><//>
    <${Section} title="Failed in the last 24 hours">
      ${data.failed.length ? html`<${Failures} failed=${data.failed} withRun />` : html`<p class="quiet">Nothing failed.</p>`}
    <//>`}
  <//>`;
}
