// All runs: how each is, and whether it gets better.
import { Badge, Empty, Loading, Metadata, Page, Pager, Problem, Section, Table, Time, html, useState } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { count, number, shortId, short } from "../lib/format.js";
import { Sparkline } from "../lib/plot.js";
import { part, verdict } from "../lib/series.js";

const LIMIT = 25;
const EVERY = 4000;

function Change({ losses }) {
  const found = verdict(losses);
  if (!found) return html`<span class="quiet">–</span>`;
  const arrow = { better: "↓", worse: "↑", same: "→" }[found.way];
  if (found.change === null) return html`<span class="quiet">${arrow} ${number(Math.abs(found.last - found.first), 3)}</span>`;
  const said = part(found).replace("more than", ">");
  return html`<span class=${`change ${found.way}`}>${arrow} ${said}${" "}
    <span class="hidden">${{ better: "better", worse: "worse", same: "unchanged" }[found.way]}</span></span>`;
}

function Row({ run, waiting, chosen, choose }) {
  const metrics = run.metrics;
  const losses = metrics?.losses ?? [];
  const id = run.training_run_id;
  const label = `Loss of ${shortId(id)}: ${number(losses[0])} at the beginning, ${number(losses.at(-1))} now`;
  return html`<tr>
    <td><input type="checkbox" aria-label=${`Compare ${shortId(id)}`} checked=${chosen} onChange=${choose} /></td>
    <th scope="row"><a href=${`#/training_runs/${id}`} title=${id}>${shortId(id)}</a>
      <span class="under">${Object.keys(run.user_metadata ?? {}).length ? html`<${Metadata} value=${run.user_metadata} />` : null}</span></th>
    <td><${Badge} state=${run.state} />
      ${waiting ? html` <a class="badge note" href="#/queue">${waiting} waiting</a>` : null}</td>
    <td><span title=${run.base_model}>${run.base_model.split("/").at(-1)}</span><span class="under quiet">rank ${run.lora_rank ?? "–"}</span></td>
    <td class="number">${count(metrics?.steps ?? 0)}</td>
    <td class="number">${short(metrics?.tokens ?? 0)}</td>
    <td class="number">${number(losses.at(-1))}<span class="under"><${Change} losses=${losses} /></span></td>
    <td><${Sparkline} values=${losses} label=${label} /></td>
    <td><${Time} value=${run.last_request_time} /></td>
  </tr>`;
}

export function FirstSteps() {
  const root = new URL("../", document.baseURI).href.replace(/\/$/, "");
  return html`<${Empty} title="No training run yet">
    <p>Begin one from Python, with the address of this server and your key:</p>
    <pre tabindex="0">${`import tinker

service = tinker.ServiceClient(base_url="${root}", api_key="tml-…")
training = service.create_lora_training_client(base_model=…, rank=32)`}</pre>
    <p>Or run <code>make demo</code> beside the server: it fine-tunes on a few poems while you watch.</p>
  <//>`;
}

export function Runs() {
  const [offset, setOffset] = useState(0);
  const [chosen, setChosen] = useState([]);
  const { data, error, loading, reload } = useData(async (signal) => {
    const [page, queue] = await Promise.all([
      get("training_runs", { limit: LIMIT, offset, include_metrics: true }, signal),
      get("queue", {}, signal),
    ]);
    const waiting = {};
    for (const one of queue.waiting) waiting[one.training_run_id] = (waiting[one.training_run_id] ?? 0) + 1;
    return { ...page, waiting };
  }, [offset], EVERY);
  const choose = (id) => setChosen(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  const runs = data?.training_runs ?? [];
  const columns = [{ name: "Compare", hidden: true }, { name: "Run" }, { name: "State" }, { name: "Base model" },
    { name: "Steps", number: true }, { name: "Tokens", number: true }, { name: "Loss per token", number: true },
    { name: "Course" }, { name: "Last request" }];
  const compare = html`<a class="button" aria-disabled=${chosen.length < 2 ? "true" : undefined}
    href=${chosen.length < 2 ? undefined : `#/compare?runs=${chosen.map(encodeURIComponent).join(",")}`}>
    ${chosen.length < 2 ? "Choose two to compare" : `Compare ${chosen.length} runs`}</a>`;
  return html`<${Page} title="Runs" about="Every training run of the project, the newest first." actions=${runs.length > 1 && compare}>
    <${Problem} error=${error} what="The list is not up to date" retry=${reload} />
    ${loading && html`<${Loading} what="the runs" />`}
    ${data && !runs.length && html`<${Section}><${FirstSteps} /><//>`}
    ${runs.length > 0 && html`<${Section} flush>
      <${Table} caption="Training runs" columns=${columns}>
        ${runs.map((run) => html`<${Row} key=${run.training_run_id} run=${run} waiting=${data.waiting[run.training_run_id]}
          chosen=${chosen.includes(run.training_run_id)} choose=${() => choose(run.training_run_id)} />`)}
      <//>
      <${Pager} offset=${offset} limit=${LIMIT} total=${data.cursor.total_count} go=${setOffset} />
    <//>`}
  <//>`;
}
