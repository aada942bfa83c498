// Checkpoints: what is kept, for how long, who may read it; fetching it, and letting it go.
import { Badge, Confirm, Copy, Empty, Fact, Loading, Metadata, Page, Pager, Problem, Section, Table, Time, html, useState } from "../lib/ui.js";
import { archive, del, get, post, put, useData } from "../lib/api.js";
import { bytes, shortId, things } from "../lib/format.js";

const LIMIT = 50;
const EVERY = 6000;
const PERIODS = [["never", null], ["in a day", 86400], ["in a week", 604800], ["in 30 days", 2592000], ["in a year", 31536000]];

const runOf = (one) => one.tinker_path.slice("tinker://".length).split("/")[0];
const routeOf = (one) => `training_runs/${runOf(one)}/checkpoints/${one.checkpoint_id}`;

// What can be done with one checkpoint, as buttons. `reload` shows what came of it; `gone` is called once it is deleted.
function Actions({ one, ask, failed, reload, gone }) {
  const route = routeOf(one);
  const name = html`<code>${one.tinker_path}</code>`;
  const fetchIt = async () => {
    try {
      location.assign(await archive(`${route}/archive`));
    } catch (error) {
      failed(error);
    }
  };
  const publish = () => ask({
    title: one.public ? "Keep it to this project again?" : "Let every project read it?",
    body: one.public
      ? html`<p>Other projects can no longer load or sample ${name}. What they made from it meanwhile stays theirs.</p>`
      : html`<p>Every project of this server will be able to load, sample and ask about ${name}, by its path.</p>`,
    yes: one.public ? "Keep to the project" : "Publish",
    gentle: true,
    act: async () => {
      await (one.public ? del(`${route}/publish`) : post(`${route}/publish`));
      reload();
    },
  });
  const remove = () => ask({
    title: "Delete this checkpoint?",
    body: html`<p>${name}</p><p>${bytes(one.size_bytes)} are freed. Its files are gone for good, and samplers that use it stop working.</p>`,
    yes: "Delete for good",
    act: async () => {
      await del(route);
      (gone ?? reload)();
    },
  });
  const expire = async (event) => {
    const [, ttl] = PERIODS[event.target.value];
    try {
      await put(`${route}/ttl`, { ttl_seconds: ttl });
      reload();
    } catch (error) {
      failed(error);
    }
  };
  const called = one.checkpoint_id;
  return html`<div class="actions tight">
    <button type="button" class="small" onClick=${fetchIt} aria-label=${`Download ${called}`}>Download</button>
    <button type="button" class="small" onClick=${publish} aria-label=${`${one.public ? "Unpublish" : "Publish"} ${called}`}>${one.public ? "Unpublish" : "Publish"}</button>
    <select class="small" aria-label=${`When ${called} expires`} onChange=${expire}>
      <option value="" selected disabled>Expires …</option>
      ${PERIODS.map(([text], place) => html`<option value=${place}>${text}</option>`)}
    </select>
    <button type="button" class="small danger" onClick=${remove} aria-label=${`Delete ${called}`}>Delete</button>
  </div>`;
}

export function Checkpoints() {
  const [offset, setOffset] = useState(0);
  const [question, setQuestion] = useState(null);
  const [failed, setFailed] = useState(null);
  const { data, error, loading, reload } = useData(async (signal) => {
    const [page, stored] = await Promise.all([get("checkpoints", { limit: LIMIT, offset }, signal), get("billing/usage/checkpoints/current", {}, signal)]);
    return { ...page, stored: stored.data[0] };
  }, [offset], EVERY);
  const again = () => { setFailed(null); reload(); };
  const list = data?.checkpoints ?? [];
  const columns = [{ name: "Checkpoint" }, { name: "Kind" }, { name: "Size", number: true }, { name: "Saved" }, { name: "Expires" }, { name: "Readers" }, { name: "Actions", hidden: true }];
  const about = data?.stored ? `${things(data.stored.checkpoint_count, "checkpoint")} of this project, unnamed ones included, take ${bytes(data.stored.size_bytes)}.` : undefined;
  return html`<${Page} title="Checkpoints" about=${about}>
    <${Problem} error=${failed ?? error} what=${failed ? "That did not work" : "The list is not up to date"} retry=${again} />
    ${loading && html`<${Loading} what="the checkpoints" />`}
    ${data && !list.length && html`<${Section}><${Empty} title="No checkpoint yet">
      <p>Save one in your program: <code>training_client.save_weights_for_sampler("first")</code>.</p><//><//>`}
    ${list.length > 0 && html`<${Section} flush>
      <${Table} caption="Checkpoints" columns=${columns}>${list.map((one) => html`<tr key=${one.tinker_path}>
        <th scope="row"><a href=${`#/checkpoints/${runOf(one)}/${one.checkpoint_id}`}>${one.checkpoint_id}</a>
          <span class="under quiet">run <a href=${`#/training_runs/${runOf(one)}`}>${shortId(runOf(one))}</a></span></th>
        <td>${one.checkpoint_type}</td><td class="number">${bytes(one.size_bytes)}</td><td><${Time} value=${one.time} /></td>
        <td>${one.expires_at ? html`<${Time} value=${one.expires_at} />` : "never"}</td>
        <td>${one.public ? html`<${Badge} state="public">every project<//>` : "this project"}</td>
        <td><${Actions} one=${one} ask=${setQuestion} failed=${setFailed} reload=${again} /></td></tr>`)}<//>
      <${Pager} offset=${offset} limit=${LIMIT} total=${data.cursor.total_count} go=${setOffset} />
    <//>`}
    <${Confirm} ask=${question} close=${() => setQuestion(null)} />
  <//>`;
}

export function Checkpoint({ run, name }) {
  const [question, setQuestion] = useState(null);
  const [failed, setFailed] = useState(null);
  const { data, error, loading, reload } = useData(async (signal) => {
    const { checkpoints } = await get(`training_runs/${run}/checkpoints`, {}, signal);
    const one = checkpoints.find((each) => each.checkpoint_id === name);
    if (!one) throw Object.assign(new Error(`The run has no checkpoint ${name}.`), { hint: "It may have expired, or been deleted." });
    return one;
  }, [run, name]);
  const again = () => { setFailed(null); reload(); };
  return html`<${Page} title=${`Checkpoint ${name.split("/").at(-1)}`}>
    <${Problem} error=${failed ?? error} what=${failed ? "That did not work" : "There is nothing to show"} />
    ${loading && html`<${Loading} what="the checkpoint" />`}
    ${data && html`<${Section}>
      <dl class="facts">
        <${Fact} label="Kind">${data.checkpoint_type}<//>
        <${Fact} label="Size">${bytes(data.size_bytes)}<//>
        <${Fact} label="Saved"><${Time} value=${data.time} /><//>
        <${Fact} label="Expires">${data.expires_at ? html`<${Time} value=${data.expires_at} />` : "never"}<//>
        <${Fact} label="Readers">${data.public ? "every project" : "this project"}<//>
        <${Fact} label="Run"><a href=${`#/training_runs/${run}`}>${shortId(run)}</a><//>
        <${Fact} label="Metadata"><${Metadata} value=${data.user_metadata} /><//>
        <${Fact} label="Path" wide><code>${data.tinker_path}</code> <${Copy} text=${data.tinker_path} label="Copy the path" /><//>
      </dl>
      <div class="row">
        <${Actions} one=${data} ask=${setQuestion} failed=${setFailed} reload=${again} gone=${() => { location.hash = "#/checkpoints"; }} />
        ${data.checkpoint_type !== "external" && html`
          <a class="button small" href=${`#/playground?checkpoint=${encodeURIComponent(data.tinker_path)}`}>Try it</a>
          <a class="button small" href=${`#/evaluate?checkpoint=${encodeURIComponent(data.tinker_path)}`}>Evaluate it</a>`}
      </div>
    <//>`}
    <${Confirm} ask=${question} close=${() => setQuestion(null)} />
  <//>`;
}
