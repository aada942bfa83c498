// Several runs in one plot: which setting was better?
import { Empty, Loading, Metadata, Page, Problem, Section, Table, html, useState } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { count, number, plain, shortId } from "../lib/format.js";
import { DASHES, Plot, smooth } from "../lib/plot.js";
import { MEASURES, column, verdict } from "../lib/series.js";

const MOST = 8;
const EVERY = 5000;

function overlay(runs, measure, calm) {
  const steps = [...new Set(runs.flatMap((run) => run.points.map((point) => point.step)))].sort((one, other) => one - other);
  const place = new Map(steps.map((step, index) => [step, index]));
  const lines = runs.map((run, index) => {
    const values = new Array(steps.length).fill(null);
    const own = column(run.points, measure);
    (calm ? smooth(own) : own).forEach((value, at) => { values[place.get(run.points[at].step)] = value; });
    const [dash, called] = DASHES[index];
    return { name: `${run.title} (${called})`, values, dash };
  });
  return { steps, lines };
}

// `all` is null until the server has told which runs there are; those that are chosen can be taken out before that, too.
function Chooser({ chosen, all }) {
  const rest = (all ?? []).filter((run) => !chosen.includes(run.training_run_id));
  const go = (ids) => { location.hash = `#/compare?runs=${ids.map(encodeURIComponent).join(",")}`; };
  return html`<div class="row">
    <label for="add">Add a run</label>
    <select id="add" disabled=${chosen.length >= MOST || !rest.length} onChange=${(event) => event.target.value && go([...chosen, event.target.value])}>
      <option value="">${rest.length || !all ? "Choose …" : "There are no others"}</option>
      ${rest.map((run) => html`<option value=${run.training_run_id}>${shortId(run.training_run_id)} · ${run.base_model} · ${count(run.metrics?.steps ?? 0)} steps</option>`)}
    </select>
    ${chosen.map((id) => html`<button type="button" class="small" onClick=${() => go(chosen.filter((one) => one !== id))}
      aria-label=${`Leave out ${shortId(id)}`}>${shortId(id)} ✕</button>`)}
  </div>`;
}

// A run with its steps, or with what keeps it from being shown: one that is gone must not take the others along.
async function told(id, signal) {
  try {
    const route = `training_runs/${encodeURIComponent(id)}`;
    const [run, series] = await Promise.all([get(route, {}, signal), get(`${route}/metrics`, {}, signal)]);
    return { ...run, points: series.points, title: shortId(id) };
  } catch (error) {
    if (signal.aborted) throw error;
    return { id, error };
  }
}

export function Compare({ chosen }) {
  const [measure, setMeasure] = useState("loss");
  const [calm, setCalm] = useState(true);
  const ids = chosen.slice(0, MOST);
  const { data, error, loading, reload } = useData(async (signal) => {
    const all = (await get("training_runs", { limit: 100, include_metrics: true }, signal)).training_runs;
    return { all, found: await Promise.all(ids.map((id) => told(id, signal))) };
  }, [ids], EVERY);
  const runs = (data?.found ?? []).filter((one) => !one.error);
  const missing = (data?.found ?? []).filter((one) => one.error);
  const best = runs.map((run) => verdict(column(run.points, "loss"))?.last ?? Infinity);
  const { steps, lines } = overlay(runs, measure, calm);
  const winner = best.indexOf(Math.min(...best));
  const summary = runs.length > 1 && Number.isFinite(best[winner])
    ? `The lowest loss per token now: ${runs[winner].title}, ${number(best[winner])}.` : "";
  const columns = [{ name: "Run" }, { name: "Rank", number: true }, { name: "Steps", number: true }, { name: "Learning rate", number: true },
    { name: "Loss, first", number: true }, { name: "Loss, now", number: true }, { name: "Lowest", number: true }, { name: "Metadata" }];
  return html`<${Page} title="Compare runs" about="Up to eight runs over each other, by optimizer step.">
    <${Problem} error=${error} what="The runs cannot be compared" retry=${reload} />
    ${loading && html`<${Loading} what="the runs" />`}
    <${Section}><${Chooser} chosen=${ids} all=${data?.all} /><//>
    ${missing.map((one) => html`<${Problem} key=${one.id} error=${one.error} what=${`${one.id} is left out of the comparison`} />`)}
    ${data && !ids.length && html`<${Section}><${Empty} title="No run is chosen"><p>Add runs above, or mark them in the list of <a href="#/training_runs">runs</a>.</p><//><//>`}
    ${runs.length > 0 && html`<${Section} title=${MEASURES[measure].name} about=${summary} actions=${html`
        <label><input type="checkbox" checked=${calm} onChange=${() => setCalm(!calm)} /> Smooth</label>
        <label for="measure" class="hidden">What to plot</label>
        <select id="measure" value=${measure} onChange=${(event) => setMeasure(event.target.value)}>
          ${Object.entries(MEASURES).map(([name, { name: title }]) => html`<option value=${name}>${title}</option>`)}</select>`}>
      ${lines.some((line) => line.values.some((value) => value !== null))
        ? html`<${Plot} title=${MEASURES[measure].name} steps=${steps} lines=${lines} summary=${summary || "One line for each run, each with dashes of its own."} together=${false} bare />`
        : html`<${Empty} title="Nothing was measured"><p>None of these runs has this number.</p><//>`}
    <//>
    <${Section} flush><${Table} caption="The runs in numbers" columns=${columns}>
      ${runs.map((run) => {
        const found = verdict(column(run.points, "loss"));
        return html`<tr key=${run.training_run_id}><th scope="row"><a href=${`#/training_runs/${run.training_run_id}`}>${run.title}</a>
            <span class="under quiet" title=${run.base_model}>${run.base_model.split("/").at(-1)}</span></th>
          <td class="number">${run.lora_rank ?? "–"}</td><td class="number">${count(run.points.at(-1)?.step ?? 0)}</td>
          <td class="number">${plain(run.points.findLast((point) => point.learning_rate !== undefined)?.learning_rate)}</td>
          <td class="number">${number(found?.first)}</td><td class="number">${number(found?.last)}</td><td class="number">${number(found?.lowest)}</td>
          <td class="facts-of"><${Metadata} value=${run.user_metadata} /></td></tr>`;
      })}
    <//><//>`}
  <//>`;
}
