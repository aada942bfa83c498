// Sessions: the stays of client programs, and what each of them made.
import { Badge, Copy, Empty, Fact, Loading, Metadata, Page, Problem, Section, Table, Time, html, useState } from "../lib/ui.js";
import { get, post, useData } from "../lib/api.js";
import { bytes, count, shortId } from "../lib/format.js";

const EVERY = 5000;

export function status(session) {
  if (!session.status) return { state: "silent", text: "fell silent" };
  if (session.status.type === "active") return { state: "active", text: "active" };
  const how = session.status.reason?.type ?? "finished";
  return { state: how === "errored" ? "errored" : "finished", text: { success: "finished", errored: "ended with an error", interrupted: "interrupted" }[how] ?? how };
}

function Row({ session }) {
  const { state, text } = status(session);
  return html`<tr>
    <th scope="row"><a href=${`#/sessions/${session.session_id}`} title=${session.session_id}>${session.display_name ?? shortId(session.session_id)}</a>
      ${session.display_name && html`<span class="under quiet">${shortId(session.session_id)}</span>`}</th>
    <td><${Badge} state=${state}>${text}<//>${session.status?.detail && html`<span class="under">${session.status.detail}</span>`}</td>
    <td><${Metadata} value=${session.user_metadata} /></td>
    <td class="number">${count(session.checkpoints_count)}</td>
    <td class="number">${bytes(session.checkpoint_storage_bytes)}</td>
    <td><${Time} value=${session.created_at} /></td>
  </tr>`;
}

export function Sessions() {
  const [words, setWords] = useState("");
  const [only, setOnly] = useState("all");
  const [cursors, setCursors] = useState([null]);
  const cursor = cursors.at(-1);
  const { data, error, loading, reload } = useData((signal) => post("sessions/search", {
    limit: 50,
    ...(words.trim() && { display_name: words.trim() }),
    ...(only === "active" && { statuses: [{ type: "active" }] }),
    ...(only === "over" && { statuses: [{ type: "client_finished" }] }),
    ...(cursor && { cursor }),
  }, signal), [words.trim(), only, cursor], EVERY);
  const change = (set) => (event) => { set(event.target.value); setCursors([null]); };
  const sessions = data?.sessions ?? [];
  const filtered = words.trim() || only !== "all";
  return html`<${Page} title="Sessions" about="A session is the stay of one client program. It ends when the program says so, or falls silent.">
    <${Problem} error=${error} what="The list is not up to date" retry=${reload} />
    <form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label for="words">Name holds</label><input id="words" type="search" value=${words} onInput=${change(setWords)} />
      <label for="only">Show</label>
      <select id="only" value=${only} onChange=${change(setOnly)}><option value="all">all</option><option value="active">active ones</option><option value="over">finished ones</option></select>
    </form>
    ${loading && html`<${Loading} what="the sessions" />`}
    ${data && !sessions.length && html`<${Section}><${Empty} title=${filtered ? "No session is like that" : "No session yet"}>
      <p>${filtered ? "Take some of the conditions away." : "One begins with the first request of a tinker.ServiceClient."}</p><//><//>`}
    ${sessions.length > 0 && html`<${Section} flush>
      <${Table} caption="Sessions" columns=${[{ name: "Session" }, { name: "State" }, { name: "Metadata" }, { name: "Checkpoints", number: true }, { name: "Size", number: true }, { name: "Began" }]}>
        ${sessions.map((session) => html`<${Row} key=${session.session_id} session=${session} />`)}<//>
      ${(cursors.length > 1 || data.next_cursor) && html`<nav class="pager" aria-label="Pages">
        <button type="button" disabled=${cursors.length === 1} onClick=${() => setCursors(cursors.slice(0, -1))}>Newer</button>
        <button type="button" disabled=${!data.next_cursor} onClick=${() => setCursors([...cursors, data.next_cursor])}>Older</button></nav>`}
    <//>`}
  <//>`;
}

export function Session({ id }) {
  const [failed, setFailed] = useState(null);
  const { data, error, loading, reload } = useData(async (signal) => {
    const [session, found] = await Promise.all([get(`sessions/${id}`, {}, signal), post("sessions/search", { session_id: id }, signal)]);
    const runs = await Promise.all(session.training_run_ids.slice(0, 50).map((run) => get(`training_runs/${run}`, {}, signal).catch(() => null)));
    return { ...session, summary: found.sessions[0], runs: runs.filter(Boolean) };
  }, [id], EVERY);
  const trace = async () => {
    try {
      const { status: state, url, error: why } = await get(`sessions/${id}/trace_export`);
      if (state !== "ready") throw Object.assign(new Error(why ?? "It is not ready."), { hint: "Try again in a moment." });
      location.assign(url);
    } catch (problem) {
      setFailed(problem);
    }
  };
  const found = data?.summary && status(data.summary);
  return html`<${Page} title=${`Session ${data?.display_name ?? shortId(id)}`} actions=${data && html`<button type="button" onClick=${trace}>Download the timeline</button>`}>
    <${Problem} error=${failed ?? error} what=${failed ? "There is no timeline" : "The session cannot be shown"} retry=${failed ? undefined : reload} />
    ${loading && html`<${Loading} what="the session" />`}
    ${data && html`<${Section}><dl class="facts">
        ${found && html`<${Fact} label="State"><${Badge} state=${found.state}>${found.text}<//><//>`}
        ${data.summary && html`<${Fact} label="Began"><${Time} value=${data.summary.created_at} /><//>`}
        <${Fact} label="Metadata"><${Metadata} value=${data.user_metadata} /><//>
        ${data.summary?.status?.detail && html`<${Fact} label="What its client said at the end" wide>${data.summary.status.detail}<//>`}
        <${Fact} label="Id" wide><code>${id}</code> <${Copy} text=${id} label="Copy the id" /><//>
      </dl><p class="quiet">The timeline shows when each request waited and ran. Open it in ui.perfetto.dev or chrome://tracing.</p><//>
    <${Section} title="Training runs" flush=${data.runs.length > 0}>
      ${data.runs.length === 0 ? html`<p class="quiet">It has created none.</p>` : html`<${Table} caption="Runs of the session"
        columns=${[{ name: "Run" }, { name: "State" }, { name: "Base model" }, { name: "Last request" }]}>
        ${data.runs.map((run) => html`<tr key=${run.training_run_id}><th scope="row"><a href=${`#/training_runs/${run.training_run_id}`}>${shortId(run.training_run_id)}</a></th>
          <td><${Badge} state=${run.state} /></td><td>${run.base_model}</td><td><${Time} value=${run.last_request_time} /></td></tr>`)}<//>`}
    <//>
    <${Section} title="Samplers">${data.sampler_ids.length === 0 ? html`<p class="quiet">It has opened none.</p>`
      : html`<ul class="ids">${data.sampler_ids.slice(0, 100).map((sampler) => html`<li><code>${sampler}</code></li>`)}</ul>`}<//>`}
  <//>`;
}
