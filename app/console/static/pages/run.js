// One run: is it moving, did it get better, and what has it saved.
import { Badge, Copy, Empty, Fact, Loading, Metadata, Page, Problem, Section, Table, Tile, Time, html, useState } from "../lib/ui.js";
import { get, text, useData } from "../lib/api.js";
import { bytes, count, download, kindName, left, number, plain, seconds, shortId, short } from "../lib/format.js";
import { Plot, smooth } from "../lib/plot.js";
import { MEASURES, column, useSteps, verdict, verdictText } from "../lib/series.js";
import { stateOf } from "./queue.js";

const EVERY = 2500;
const RECENT = 20;

const ENDS = {
  lost: "Its live weights are gone: the process that held them ended, and nothing led back. Begin again from its last checkpoint.",
  closed: "It takes no more work: it was unloaded, or its session is over. Its checkpoints stay.",
  failed: "It could not be created.",
};

function Now({ run, state, queue, live }) {
  const waiting = (queue?.waiting ?? []).filter((one) => one.training_run_id === run.training_run_id);
  if (ENDS[state]) return html`<p class=${state === "closed" ? "now" : "now bad"}>${ENDS[state]}</p>`;
  if (!waiting.length) {
    return html`<p class="now">Nothing is asked of it right now. The last request came <${Time} value=${run.last_request_time} />:
      if you expected more, your program is busy with something else, or has ended.</p>`;
  }
  const [first] = waiting;
  const { state: tone, said } = stateOf(first);
  const held = waiting.some((one) => one.state === "paused_rate_limit");
  const last = waiting.at(-1);
  return html`<div class="now" aria-live="polite">
    <p><${Badge} state=${tone}>${said}<//>${" "}
      <strong>${kindName(first.kind)}${first.seq_id ? ` #${first.seq_id}` : ""}</strong>: ${first.reason}.
      ${held && html` <a href="#/keys">The limits</a>`}${!held && first.seconds_left !== undefined && html` ${first.seconds_left < 0.5 ? "It should be done any moment" : `Done in ${left(first.seconds_left)}`}, if it goes on as before.`}</p>
    ${waiting.length > 1 && html`<p class="quiet">${waiting.length - 1} more ${waiting.length === 2 ? "waits" : "wait"} behind it.${" "}
      ${!held && last.seconds_left !== undefined && last.seconds_left >= 0.5 && `All are done in ${left(last.seconds_left)}.`} <a href="#/queue">The queue</a></p>`}
    ${!live && html`<p class="quiet">New numbers do not arrive just now; the console keeps trying.</p>`}
  </div>`;
}

function Tiles({ points }) {
  const done = points.filter((point) => point.done);
  const last = done.at(-1);
  const recent = done.slice(-RECENT);
  const average = (name) => recent.reduce((sum, point) => sum + point[name] / point.merged, 0) / recent.length;
  const every = recent.length > 1 ? (new Date(recent.at(-1).time) - new Date(recent[0].time)) / 1000 / (recent.at(-1).step - recent[0].step) : null;
  return html`<dl class="tiles">
    <${Tile} label="Steps" value=${count(last?.step ?? 0)} />
    <${Tile} label="Tokens" value=${short(points.reduce((sum, point) => sum + point.tokens, 0))} />
    <${Tile} label="Loss per token" value=${number(points.findLast((point) => point.loss_per_token !== undefined)?.loss_per_token)} />
    <${Tile} label="Gradient norm" value=${number(last?.grad_norm, 3)} />
    <${Tile} label="Learning rate" value=${plain(last?.learning_rate)} />
    <${Tile} label="A step every" value=${seconds(every)}
      note=${recent.length ? `its requests ran ${seconds(average("run_seconds"))} and queued ${seconds(average("waited_seconds"))}; the two overlap` : null} />
  </dl>`;
}

function Plots({ points }) {
  const [calm, setCalm] = useState(false);
  const [log, setLog] = useState(false);
  const steps = points.map((point) => point.step);
  const losses = column(points, "loss");
  const shown = Object.keys(MEASURES).filter((name) => column(points, name).some((value) => value !== null));
  const said = (name, values) => {
    const known = values.filter((value) => value !== null);
    const form = name === "rate" ? plain : (value) => number(value, 3);
    return `${form(known.at(-1))} now, between ${form(Math.min(...known))} and ${form(Math.max(...known))}.`;
  };
  const lines = (name, values) => calm && name === "loss"
    ? [{ name: "each step", values, faint: true, thin: true }, { name: "smoothed", values: smooth(losses) }]
    : [{ name: MEASURES[name].name, values }];
  return html`<div>
    <div class="switches">
      <label><input type="checkbox" checked=${calm} onChange=${() => setCalm(!calm)} /> Smooth the loss</label>
      <label><input type="checkbox" checked=${log} onChange=${() => setLog(!log)} /> Logarithmic loss and norm</label>
    </div>
    <div class="plots">${shown.map((name) => {
      const values = column(points, name);
      const positive = values.every((value) => value === null || value > 0);
      return html`<${Plot} key=${name} title=${MEASURES[name].name} steps=${steps} lines=${lines(name, values)}
        summary=${said(name, values)} log=${log && positive && (name === "loss" || name === "norm")} />`;
    })}</div>
    <details class="numbers"><summary>The numbers as a table</summary>
      <${Table} caption="Steps of the run" columns=${["Step", "Loss per token", "Gradient norm", "Learning rate", "Tokens", "Waited", "Ran", "When"]
        .map((name, place) => ({ name, number: place < 7 }))}>
        ${points.slice(-50).reverse().map((point) => html`<tr key=${point.step}>
          <th scope="row" class="number">${point.step}${point.done ? "" : " (open)"}</th>
          <td class="number">${number(point.loss_per_token)}</td><td class="number">${number(point.grad_norm)}</td>
          <td class="number">${plain(point.learning_rate)}</td><td class="number">${count(point.tokens)}</td>
          <td class="number">${seconds(point.waited_seconds)}</td><td class="number">${seconds(point.run_seconds)}</td>
          <td><${Time} value=${point.time} /></td></tr>`)}
      <//>
      ${points.length > 50 && html`<p class="quiet">The last 50 of ${count(points.length)}; all are in the CSV.</p>`}
    </details>
  </div>`;
}

export function Failures({ failed, withRun }) {
  return html`<ul class="failures">${failed.map((one) => html`<li key=${one.request_id}>
    <p><strong>${kindName(one.kind)}${one.seq_id ? ` #${one.seq_id}` : ""}</strong>
      ${withRun && one.training_run_id && html`${" of "}<a href=${`#/training_runs/${one.training_run_id}`}>${shortId(one.training_run_id)}</a>`}
      ${" · "}<${Time} value=${one.time} />${` · the ${one.category === "user" ? "request" : "server"} is at fault`}</p>
    <p>${one.message}${one.hint && html`<br /><span class="quiet">${one.hint}</span>`}</p>
  </li>`)}</ul>`;
}

function Saved({ run, checkpoints }) {
  if (!checkpoints.length) return html`<${Empty} title="No checkpoint yet"><p>Call <code>save_state</code> or <code>save_weights_for_sampler</code> in your program.</p><//>`;
  return html`<${Table} caption="Checkpoints of the run" columns=${[{ name: "Checkpoint" }, { name: "Kind" }, { name: "Size", number: true }, { name: "Saved" }]}>
    ${checkpoints.map((one) => html`<tr key=${one.checkpoint_id}>
      <th scope="row"><a href=${`#/checkpoints/${run}/${one.checkpoint_id}`}>${one.checkpoint_id}</a></th>
      <td>${one.checkpoint_type}</td><td class="number">${bytes(one.size_bytes)}</td><td><${Time} value=${one.time} /></td></tr>`)}
  <//>`;
}

export function Run({ id }) {
  const { points, state, error: broken, live } = useSteps(id);
  const { data, error, loading, reload } = useData(async (signal) => {
    const [run, queue, saved] = await Promise.all([
      get(`training_runs/${id}`, {}, signal), get("queue", {}, signal), get(`training_runs/${id}/checkpoints`, {}, signal),
    ]);
    return { run, queue, saved: saved.checkpoints };
  }, [id], EVERY);
  const [failed, setFailed] = useState(null);
  const save = () => text(`training_runs/${id}/metrics`, { format: "csv" })
    .then((table) => download(`${id.replaceAll(":", "-")}.csv`, table, "text/csv")).catch(setFailed);
  const run = data?.run;
  const now = state ?? run?.state;
  const sampler = run?.last_sampler_checkpoint?.tinker_path;
  const actions = html`
    <a class="button" href=${`#/compare?runs=${encodeURIComponent(id)}`}>Compare</a>
    ${sampler && html`<a class="button" href=${`#/playground?checkpoint=${encodeURIComponent(sampler)}`}>Try it</a>`}
    <button type="button" onClick=${save}>Download CSV</button>`;
  const wrong = (data?.queue.failed ?? []).filter((one) => one.training_run_id === id);
  return html`<${Page} title=${`Run ${shortId(id)}`} actions=${actions}>
    <${Problem} error=${failed ?? error ?? (broken?.status === 404 ? null : broken)} what="Something is not up to date" retry=${reload} />
    ${loading && html`<${Loading} what="the run" />`}
    ${run && html`<${Section}>
      <dl class="facts">
        <${Fact} label="State"><${Badge} state=${now} /><//>
        <${Fact} label="Base model">${run.base_model}<//>
        <${Fact} label="LoRA rank">${run.lora_rank ?? "–"}<//>
        <${Fact} label="Created"><${Time} value=${run.created_time} /><//>
        <${Fact} label="Session"><a href=${`#/sessions/${id.split(":")[0]}`}>${shortId(id.split(":")[0])}</a><//>
        <${Fact} label="Metadata"><${Metadata} value=${run.user_metadata} /><//>
        <${Fact} label="Id" wide><code>${id}</code> <${Copy} text=${id} label="Copy the id" /><//>
      </dl>
      <${Now} run=${run} state=${now} queue=${data.queue} live=${live} />
    <//>`}
    ${points && points.length === 0 && html`<${Section}><${Empty} title="No training step yet">
      <p>Numbers appear here with the first <code>forward_backward</code>, while this page is open.</p><//><//>`}
    ${points && points.length > 0 && html`<${Section} title="Did it get better?" about=${verdictText(verdict(column(points, "loss")))}>
      <${Tiles} points=${points} /><${Plots} points=${points} /><//>`}
    ${wrong.length > 0 && html`<${Section} title="What failed in the last day"><${Failures} failed=${wrong} /><//>`}
    ${data && html`<${Section} title="Checkpoints"><${Saved} run=${id} checkpoints=${data.saved} /><//>`}
  <//>`;
}
