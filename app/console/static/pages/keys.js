// The project's keys: making one and replacing one (the new one is shown once), and revoking one.
import { Badge, Confirm, Copy, Problem, Table, Time, html, useLayoutEffect, useRef, useState } from "../lib/ui.js";
import { del, post } from "../lib/api.js";

const DAY = 86_400;
const ROLES = [["read-only", "read-only: look at everything"], ["member", "member: train, sample, save"],
  ["owner", "owner: also manage keys"], ["admin", "admin: operate the server"]];
const LIFETIMES = [["", "never"], [7 * DAY, "in a week"], [30 * DAY, "in 30 days"], [90 * DAY, "in 90 days"], [365 * DAY, "in a year"]];
const OVERLAPS = [[0, "at once"], [3600, "in an hour"], [DAY, "in a day"], [7 * DAY, "in a week"]];

const options = (choices) => choices.map(([value, text]) => html`<option value=${value}>${text}</option>`);

// The number by which a key knows itself is the beginning of its id.
const isOwn = (one, me) => Number.parseInt(one.key_id.slice(0, 13), 16) === me.key_id;

function Made({ made, close }) {
  const place = useRef(null);
  useLayoutEffect(() => place.current.focus(), [made]);
  return html`<div class="problem note" role="status" tabindex="-1" ref=${place}><p><strong>The key ${made.info.name}, shown this once:</strong></p>
    <p><code>${made.key}</code> <${Copy} text=${made.key} label="Copy the new key" /></p>
    <button type="button" class="small" onClick=${close}>I have kept it</button></div>`;
}

function Form({ me, newName, done }) {
  const roles = ROLES.slice(0, 1 + ROLES.findIndex(([name]) => name === me.role));
  const [name, setName] = useState(newName ?? "");
  const [role, setRole] = useState("member");
  const [lasts, setLasts] = useState("");
  const [scopes, setScopes] = useState([]);
  const [error, setError] = useState(null);
  const choose = (scope) => setScopes(scopes.includes(scope) ? scopes.filter((one) => one !== scope) : [...scopes, scope]);
  const make = async (event) => {
    event.preventDefault();
    setError(null);
    const body = { name: name.trim(), role };
    if (lasts) body.expires_in = Number(lasts);
    if (scopes.length) body.scopes = scopes;
    try {
      done(await post("keys", body));
      setName("");
      setScopes([]);
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<form onSubmit=${make}>
    <div class="fields">
      <div class="field"><label for="key-name">Name of a new key</label><input id="key-name" required maxlength="128" value=${name} onInput=${(event) => setName(event.target.value)} /></div>
      <div class="field"><label for="key-role">What it may do</label><select id="key-role" value=${role} onChange=${(event) => setRole(event.target.value)}>${options(roles)}</select></div>
      <div class="field narrow"><label for="key-lasts">It ends</label><select id="key-lasts" value=${lasts} onChange=${(event) => setLasts(event.target.value)}>${options(LIFETIMES)}</select></div>
      <div class="actions"><button type="submit" class="primary">Make a key</button></div>
    </div>
    <details class="narrowed"><summary>Narrow it down${scopes.length > 0 && ` to ${scopes.join(", ")}`}</summary>
      <fieldset class="row"><legend class="quiet">Only these permissions of its role; none marked: all of them.</legend>
        ${me.permissions.map((scope) => html`<label class="check-label"><input type="checkbox" checked=${scopes.includes(scope)} onChange=${() => choose(scope)} />${scope}</label>`)}</fieldset></details>
    <${Problem} error=${error} what="No key was made" />
  </form>`;
}

function State({ one }) {
  if (one.active) return html`<${Badge} state=${one.replaced_by ? "paused" : "active"}>${one.replaced_by ? "replaced" : "active"}<//>`;
  if (one.revoked_at) return html`<${Badge} state="lost">revoked<//><span class="under quiet"><${Time} value=${one.revoked_at} /></span>`;
  return html`<${Badge} state="closed">expired<//>${one.replaced_by && html`<span class="under quiet">replaced</span>`}`;
}

function Row({ one, own, rotate, revoke }) {
  return html`<tr>
    <th scope="row">${one.name}<span class="under quiet">${own ? "this key · " : ""}<code>${one.prefix}</code></span></th>
    <td>${one.role}${one.scopes && html`<span class="under quiet">only ${one.scopes.join(", ")}</span>`}</td>
    <td><${State} one=${one} /></td>
    <td class="nowrap"><${Time} value=${one.created_at} /></td>
    <td class="nowrap">${own ? "now" : one.last_used_at ? html`<${Time} value=${one.last_used_at} />` : html`<span class="quiet">never</span>`}</td>
    <td class="nowrap">${one.expires_at ? html`<${Time} value=${one.expires_at} />` : "never"}</td>
    <td>${one.active && html`<span class="actions tight">
      ${!one.replaced_by && html`<button type="button" class="small" aria-label=${`Rotate ${one.name}`} onClick=${rotate}>Rotate</button>`}
      <button type="button" class="small danger" aria-label=${`Revoke ${one.name}`} onClick=${revoke}>Revoke</button></span>`}</td></tr>`;
}

export function Keys({ keys, me, newName, reload }) {
  const [made, setMade] = useState(null);
  const [question, setQuestion] = useState(null);
  const [all, setAll] = useState(false);
  const overlap = useRef(null);
  const done = (answer) => {
    setMade(answer);
    reload();
  };
  const revoke = (one) => setQuestion({
    title: "Revoke this key?",
    body: html`<p>Programs that use <strong>${one.name}</strong> (<code>${one.prefix}…</code>) are refused from then on.</p>
      ${isOwn(one, me) && html`<p>It is the key that you are signed in with: the console asks for another one.</p>`}`,
    yes: "Revoke the key",
    act: async () => {
      await del(`keys/${encodeURIComponent(one.key_id)}`);
      reload();
    },
  });
  const rotate = (one) => setQuestion({
    title: "Rotate this key?",
    body: html`<p>A new key with the same rights takes the place of <strong>${one.name}</strong> (<code>${one.prefix}…</code>). It is shown once.</p>
      <p class="row"><label for="overlap">The old one ends</label><select id="overlap" ref=${overlap}>
        ${OVERLAPS.map(([value, text]) => html`<option value=${value} selected=${value === 3600}>${text}</option>`)}</select></p>`,
    yes: "Make the new key",
    gentle: true,
    act: async () => done(await post(`keys/${encodeURIComponent(one.key_id)}/rotate`, { overlap: Number(overlap.current.value) })),
  });
  const over = keys.filter((one) => !one.active).length;
  const shown = keys.filter((one) => all || one.active);
  const columns = [{ name: "Name" }, { name: "Role" }, { name: "State" }, { name: "Created" }, { name: "Last used" }, { name: "Expires" }, { name: "Actions", hidden: true }];
  return html`<div>
    ${made && html`<${Made} made=${made} close=${() => setMade(null)} />`}
    <${Form} me=${me} newName=${newName} done=${done} />
    <${Table} caption="Keys" columns=${columns}>${shown.map((one) => html`<${Row} key=${one.key_id} one=${one} own=${isOwn(one, me)}
      rotate=${() => rotate(one)} revoke=${() => revoke(one)} />`)}<//>
    ${over > 0 && html`<p class="more"><label class="check-label"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} />${" "}
      Show ${over === 1 ? "the one that is" : `the ${over} that are`} over</label></p>`}
    <${Confirm} ask=${question} close=${() => setQuestion(null)} />
  </div>`;
}
