// The key, the project's other keys and limits as far as it may see them, and what was used.
import { Fact, Loading, Page, Problem, Section, Table, html } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { bytes, count, number, things } from "../lib/format.js";
import { Keys } from "./keys.js";
import { Limits } from "./limits.js";

const HOUR = 3600_000;
const DAYS = 7;

function hourOf(moment) {
  return new Date(Math.floor(moment / HOUR) * HOUR).toISOString().replace(".000Z", "Z");
}

// A part of the page that the key may not see: then it says so, and the rest is shown.
export async function ifAllowed(path, params, signal) {
  try {
    return { value: await get(path, params, signal) };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { error };
  }
}

function Refused({ error, what }) {
  if (error.status !== 403) return html`<${Problem} error=${error} what="This part cannot be shown" />`;
  return html`<p class="quiet">${what}: ${error.message}.${error.hint && html` Note: ${error.hint}.`}</p>`;
}

// The server would say the same, but it is asked every few seconds, and would note each refusal.
function NoKeys({ me }) {
  const narrowed = ["owner", "admin"].includes(me.role);
  return html`<p class="quiet">This key may not list the project's keys, nor make, rotate or revoke one:${" "}
    ${narrowed ? `it is narrowed to ${me.permissions.join(", ")}, without the permission keys. Sign in with a key that is not.`
      : `its role is ${me.role}. Ask somebody who has a key of role owner or admin.`}</p>`;
}

function Usage({ events }) {
  const days = new Map();
  for (const { bucket_start: start, event_info: info } of events) {
    const day = start.slice(0, 10);
    const row = days.get(day) ?? { training: 0, prefill: 0, cached: 0, sampled: 0, checkpoints: 0, storage: 0 };
    if (info.type === "training") row.training += info.token_count;
    if (info.type === "sampling_prefill") row[info.cached ? "cached" : "prefill"] += info.token_count;
    if (info.type === "sampling_sample") row.sampled += info.token_count;
    if (info.type === "checkpoint") row.checkpoints += info.count;
    if (info.type === "storage") row.storage += info.gigabyte_hours;
    days.set(day, row);
  }
  if (!days.size) return html`<p class="quiet">Nothing was used in the last ${DAYS} days.</p>`;
  const columns = ["Day (UTC)", "Tokens trained", "Prompt tokens", "of them cached", "Tokens drawn", "Checkpoints saved", "Storage, GB h"].map((name, place) => ({ name, number: place > 0 }));
  return html`<${Table} caption="Usage by the day" columns=${columns}>${[...days].sort().reverse().map(([day, row]) => html`<tr key=${day}><th scope="row">${day}</th>
    <td class="number">${count(row.training)}</td><td class="number">${count(row.prefill + row.cached)}</td><td class="number">${count(row.cached)}</td>
    <td class="number">${count(row.sampled)}</td><td class="number">${count(row.checkpoints)}</td><td class="number">${number(row.storage, 3)}</td></tr>`)}<//>`;
}

function Own({ me, stored }) {
  const now = stored.value?.data[0];
  return html`<dl class="facts">
    <${Fact} label="Name">${me.name}<//><${Fact} label="Begins with"><code>${me.note}</code><//>
    <${Fact} label="Project">${me.details.org_details.name}<//><${Fact} label="Role">${me.role}<//>
    <${Fact} label="It may">${me.permissions.join(", ") || "nothing"}<//>
    ${stored.value && html`<${Fact} label="Stored now">${now ? `${bytes(now.size_bytes)} in ${things(now.checkpoint_count, "checkpoint")}` : "nothing"}<//>`}</dl>`;
}

function Shown({ me, usage, stored, keys, limits, newName, reload }) {
  return html`<${Section} title="This key"><${Own} me=${me} stored=${stored} /><//>
    <${Section} title="Keys of the project">
      ${!keys && html`<${NoKeys} me=${me} />`}
      ${keys?.error && html`<${Refused} error=${keys.error} what="The keys are not shown" />`}
      ${keys?.value && html`<${Keys} keys=${keys.value.keys} me=${me} newName=${newName} reload=${reload} />`}<//>
    <${Section} title="Limits" about="What would pass one waits, or is refused with the reason. The operator sets them." flush=${Boolean(limits.value)}>
      ${limits.error ? html`<${Refused} error=${limits.error} what="The limits are not shown" />` : html`<${Limits} limits=${limits.value.limits} />`}<//>
    <${Section} title=${`Usage of the last ${DAYS} days`} flush=${usage.value?.data.length > 0}>
      ${usage.error ? html`<${Refused} error=${usage.error} what="The usage is not shown" />` : html`<${Usage} events=${usage.value.data} />`}<//>`;
}

export function Account({ newName }) {
  const { data, error, loading, reload } = useData(async (signal) => {
    const now = Date.now();
    const window = { starting_on: hourOf(now - DAYS * 24 * HOUR), ending_before: hourOf(now + HOUR) };
    const me = await get("auth/apikey/me", {}, signal);
    const [usage, stored, keys, limits] = await Promise.all([
      ifAllowed("billing/usage/events", window, signal), ifAllowed("billing/usage/checkpoints/current", {}, signal),
      me.permissions.includes("keys") ? ifAllowed("keys", {}, signal) : null, ifAllowed("limits", {}, signal),
    ]);
    return { me, usage, stored, keys, limits };
  }, [], 15_000);
  return html`<${Page} title="Keys and usage" about="What this key is, what the project may do, and what it used.">
    <${Problem} error=${error} what="The page is not up to date" retry=${reload} />
    ${loading && html`<${Loading} what="keys and usage" />`}
    ${newName !== null && html`<div class="problem note"><p>A client asks for a new key${newName ? html` called <strong>${newName}</strong>` : null}.${" "}
      ${!data || data.keys ? "Make it below, then paste it there." : "This key may not make it: ask somebody who has a key of role owner or admin."}</p></div>`}
    ${data && html`<${Shown} ...${data} newName=${newName} reload=${reload} />`}
  <//>`;
}
