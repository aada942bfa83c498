// What happened to the things of the project, a day at a time.
import { Empty, Loading, Page, Problem, Section, Table, html } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { time, timeOfDay } from "../lib/format.js";
import { ifAllowed } from "./account.js";

const today = () => new Date().toISOString().slice(0, 10);

// Keys have names for people. A key that may not list them, or one that the list does not have, is shown by its id.
async function keyNames(signal) {
  const me = await get("auth/apikey/me", {}, signal);
  const found = me.permissions.includes("keys") ? await ifAllowed("keys", {}, signal) : {};
  return new Map((found.value?.keys ?? []).map((one) => [one.key_id, one.name]));
}

function Value({ value, names }) {
  if (names.has(value)) return html`<span title=${value}>${names.get(value)}</span>`;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// What a pair is called: the name of a key is not its id.
const label = (name, value, names) => (names.has(value) ? name.replace(/_id$/, "") : name).replaceAll("_", " ");

function Details({ entry, names }) {
  const pairs = Object.entries(entry.event_details).filter(([name]) => !["model_id", "kind", "name"].includes(name) || !entry.tinker_path);
  return html`<ul class="pairs">${pairs.map(([name, value]) => html`<li><span class="quiet">${label(name, value, names)}</span> <${Value} value=${value} names=${names} /></li>`)}</ul>`;
}

export function Audit({ day }) {
  const chosen = day && /^\d{4}-\d\d-\d\d$/.test(day) ? day : today();
  const { data, error, loading, reload } = useData(async (signal) => {
    const [{ entries: found }, names] = await Promise.all([get("audit", { day: chosen }, signal), keyNames(signal)]);
    return { entries: found, names };
  }, [chosen], 15_000);
  const entries = [...(data?.entries ?? [])].reverse();
  return html`<${Page} title="Audit log" about="Who did what to sessions, checkpoints and keys of the project. Days and times are UTC.">
    <${Problem} error=${error} what="The log cannot be shown" retry=${reload} />
    <form class="filters" onSubmit=${(event) => event.preventDefault()}><label for="day">Day</label>
      <input id="day" type="date" value=${chosen} max=${today()} onChange=${(event) => { if (event.target.value) location.hash = `#/audit?day=${event.target.value}`; }} /></form>
    ${loading && html`<${Loading} what="the day" />`}
    ${data && !entries.length && html`<${Section}><${Empty} title="Nothing happened on this day"><p>Choose another one.</p><//><//>`}
    ${entries.length > 0 && html`<${Section} flush><${Table} caption="Events of the day" columns=${[{ name: "When" }, { name: "Event" }, { name: "Details" }]}>
      ${entries.map((entry) => html`<tr><td class="nowrap"><time datetime=${entry.timestamp} title=${`${time(entry.timestamp)} where you are`}>${timeOfDay(entry.timestamp)}</time></td><th scope="row">${entry.event.replaceAll("_", " ")}</th><td class="details"><${Details} entry=${entry} names=${data.names} /></td></tr>`)}<//><//>`}
  <//>`;
}
