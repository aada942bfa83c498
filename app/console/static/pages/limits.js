// What the project and this key may take, how much of it is used, and who has set it.
import { Table, Time, html } from "../lib/ui.js";
import { bytes, count, plain } from "../lib/format.js";

const rate = (value) => `${value < 1000 ? plain(value) : count(value)} /s`;
const LIMITS = {
  requests_per_second: ["Requests", "operations that begin", count, rate],
  training_tokens_per_second: ["Training", "tokens that are computed", count, rate],
  sampling_tokens_per_second: ["Sampling", "tokens of prompts, and drawn", count, rate],
  unfinished_operations: ["Unfinished requests", "queued or running", count],
  live_runs: ["Live runs", "that take work", count],
  lora_rank: ["Rank", "of an adapter", count],
  context_length: ["Context", "tokens of an example or a prompt", count],
  checkpoint_bytes: ["Storage", "of all checkpoints", bytes],
  training_token_budget: ["Training budget", "tokens in all, since it was set", count],
  sampling_token_budget: ["Sampling budget", "tokens in all, since it was set", count],
};
const SOURCES = { key: "this key", project: "the project", server: "the server, for every project" };

function Used({ one, title, form }) {
  if (one.used === undefined) return html`<span class="quiet">–</span>`;
  const most = one.burst ?? one.value;
  const share = most > 0 ? Math.min(1, one.used / most) : 1;
  return html`<meter class="bar" min="0" max="1" low="0.8" high="0.95" optimum="0" value=${share} aria-label=${`${title}: used of it`}></meter>
    <span class="under">${form(one.used)} of ${form(most)}</span>
    ${one.held > 0 && html`<span class="under quiet">${count(one.held)} held back</span>`}`;
}

function Row({ one }) {
  const [title, about, form, whole] = LIMITS[one.name];
  const none = one.value === "unlimited";
  return html`<tr>
    <th scope="row">${title} <span class="under quiet">${about}<br /><code>${one.name}</code></span></th>
    <td class="number">${none ? "none" : (whole ?? form)(one.value)}${one.burst !== undefined && html`<span class="under quiet">at once ${form(one.burst)}</span>`}</td>
    <td>${SOURCES[one.source]}${one.set_at && html`<span class="under quiet">set <${Time} value=${one.set_at} /></span>`}</td>
    <td class="number"><${Used} one=${one} title=${title} form=${form} /></td>
    <td class="number">${one.remaining === undefined ? html`<span class="quiet">–</span>` : form(Math.floor(one.remaining))}</td></tr>`;
}

export function Limits({ limits }) {
  const columns = [{ name: "Limit" }, { name: "Value", number: true }, { name: "Set for" }, { name: "Used", number: true }, { name: "Left now", number: true }];
  return html`<${Table} caption="Limits" columns=${columns}>${limits.map((one) => html`<${Row} key=${`${one.name} ${one.source}`} one=${one} />`)}<//>`;
}
