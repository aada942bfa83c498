// A checkpoint against its base on the user's own examples: wins, losses, ties.
import { Badge, Empty, Page, Problem, Section, Table, Tile, html, useEffect, useRef, useState } from "../lib/ui.js";
import { get, useData } from "../lib/api.js";
import { count, csv, download, modelName, number, percent, things } from "../lib/format.js";
import { Lacks, useRights } from "../lib/rights.js";
import { evaluate, parseItems, signTest } from "../lib/scoring.js";

const MOST = 500;
const EXAMPLE = '{"prompt": "The capital of France is", "completion": " Paris."}\n{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}';
const VERDICTS = { win: "win", loss: "loss", tie: "tie" };

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function Summary({ results, matches }) {
  const done = results.filter(Boolean);
  const times = (verdict) => done.filter((one) => one.verdict === verdict).length;
  const [wins, losses, ties] = ["win", "loss", "tie"].map(times);
  const before = mean(done.map((one) => one.before));
  const after = mean(done.map((one) => one.after));
  const exact = (side) => done.filter((one) => one.match[side]).length;
  const chance = signTest(wins, losses);
  const sure = chance < 0.05 ? "which is hardly chance" : "which may be chance";
  const better = wins === losses ? "Neither is ahead" : `${wins > losses ? "After" : "Before"} is ahead: ${wins} to ${losses}, ${sure} (sign test, p ${number(chance, 2)})`;
  return html`<div role="status"><p class="verdict">${better}. The loss per token of the right answers went from ${number(before)} to ${number(after)}.</p>
    <dl class="tiles"><${Tile} label="Wins" value=${count(wins)} note="after is likelier" /><${Tile} label="Losses" value=${count(losses)} note="before is likelier" />
      <${Tile} label="Ties" value=${count(ties)} note="closer than 0.005" /><${Tile} label="Loss before" value=${number(before)} /><${Tile} label="Loss after" value=${number(after)} />
      ${matches && html`<${Tile} label="Exact answers" value=${`${exact(0)} → ${exact(1)}`} note=${`of ${done.length}: ${percent(exact(0) / done.length)} → ${percent(exact(1) / done.length)}`} />`}</dl></div>`;
}

function Row({ item, result, place, matches }) {
  const said = (side) => (result.match[side] === null ? "–" : html`<span title=${result.said[side]}>${result.match[side] ? "yes" : "no"}</span>`);
  return html`<tr><th scope="row" class="number">${place + 1}</th><td class="excerpt">${item.shown.slice(-120)}</td><td class="excerpt">${item.completion.slice(0, 80)}</td>
    <td class="number">${number(result.before)}</td><td class="number">${number(result.after)}</td><td class="number">${number(result.after - result.before, 3)}</td>
    <td><${Badge} state=${result.verdict}>${VERDICTS[result.verdict]}<//></td>
    ${matches && html`<td>${said(0)}</td><td>${said(1)}</td>`}</tr>`;
}

export function Evaluate({ checkpoint }) {
  const { me, may } = useRights();
  const { data, error, reload } = useData(async (signal) => (await get("oai/api/v1/models", {}, signal)).data.map((model) => model.id), []);
  const [models, setModels] = useState([null, null]);
  const [items, setItems] = useState([]);
  const [source, setSource] = useState("");
  const [typed, setTyped] = useState("");
  const [matches, setMatches] = useState(true);
  const [results, setResults] = useState([]);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const cancel = useRef(null);
  useEffect(() => {
    if (data) setModels([data.find((name) => !name.startsWith("tinker://")) ?? null, checkpoint ?? data.find((name) => name.startsWith("tinker://")) ?? null]);
  }, [data, checkpoint]);
  // The verdict is one on two models: with another one chosen it would stand under a name that it is not about.
  useEffect(() => {
    setResults([]);
    return () => cancel.current?.abort();
  }, models);

  const read = (text, name) => {
    setResults([]);
    setProblem(null);
    try {
      const found = parseItems(text);
      setItems(found.slice(0, MOST));
      setSource(`${things(Math.min(found.length, MOST), "example")} of ${name}${found.length > MOST ? `; the other ${found.length - MOST} are left out` : ""}.`);
    } catch (wrong) {
      setItems([]);
      setSource("");
      setProblem(wrong);
    }
  };
  const pick = async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    const text = await file.text();
    target.value = ""; // so that the same file can be chosen again, after it was changed
    read(text, file.name);
  };
  const run = async (event) => {
    event.preventDefault();
    if (!may("sample")) return;
    const mine = new AbortController();
    cancel.current = mine;
    setProblem(null);
    setResults(new Array(items.length).fill(null));
    setBusy(true);
    try {
      const told = (place, result) => !mine.signal.aborted && setResults((before) => before.map((one, at) => (at === place ? result : one)));
      await evaluate({ items, models, matches, signal: mine.signal, told });
    } catch (wrong) {
      if (wrong.name !== "AbortError") setProblem(wrong);
    } finally {
      setBusy(false);
    }
  };
  const save = () => download("evaluation.csv", csv([
    ["item", "prompt", "completion", "loss_before", "loss_after", "verdict", "answer_before", "answer_after", "exact_before", "exact_after"],
    ...results.map((one, place) => one && [place + 1, items[place].shown, items[place].completion, one.before, one.after, one.verdict, ...one.said, ...one.match.map(String)]).filter(Boolean),
  ]), "text/csv");
  const done = results.filter(Boolean).length;
  const names = data ? [...new Set([...data, ...(checkpoint ? [checkpoint] : [])])] : [];
  const choose = (side, label) => html`<div class="field"><label for=${`side-${side}`}>${label}</label>
    <select id=${`side-${side}`} value=${models[side] ?? ""} onChange=${(event) => setModels(models.map((one, place) => (place === side ? event.target.value || null : one)))}>
      <option value="">choose …</option>${names.map((name) => html`<option value=${name} title=${name}>${modelName(name)}</option>`)}</select></div>`;
  const columns = [{ name: "Item", number: true }, { name: "Prompt" }, { name: "Right answer" }, { name: "Loss before", number: true }, { name: "Loss after", number: true },
    { name: "Change", number: true }, { name: "Verdict" }, ...(matches ? [{ name: "Exact before" }, { name: "after" }] : [])];
  return html`<${Page} title="Evaluation" about="Did training help? Your examples, scored before and after. They go to this server only, and nothing is trained on them.">
    <${Problem} error=${error} what="The models cannot be listed" retry=${reload} />
    <${Lacks} id="may-not-sample" me=${me} permission="sample" what="score examples" />
    <form class="card" onSubmit=${run}>
      <div class="fields">${choose(0, "Before")}${choose(1, "After")}</div>
      <div class="field"><label for="file">Examples, one JSON object in each line (JSONL)</label>
        <input id="file" type="file" accept=".jsonl,.json,.txt,application/jsonl" onChange=${pick} /></div>
      <details><summary>Or type them here</summary>
        <div class="field"><label for="typed">Examples</label><textarea id="typed" rows="5" placeholder=${EXAMPLE} value=${typed} onInput=${(event) => setTyped(event.target.value)}></textarea></div>
        <button type="button" class="small" onClick=${() => read(typed, "the text above")}>Read them</button></details>
      <p class="quiet">A line has <code>prompt</code> and <code>completion</code>, or <code>messages</code> whose last one is the assistant's; chats are written with the model's own template.</p>
      ${source && html`<p role="status">${source}</p>`}
      <${Problem} error=${problem} what="The examples cannot be scored" />
      <div class="fields"><label class="check"><input type="checkbox" checked=${matches} onChange=${() => setMatches(!matches)} /> Also let both answer (temperature 0), and count exact answers</label>
        <div class="actions push">${busy && html`<button type="button" onClick=${() => cancel.current?.abort()}>Stop</button>`}
          <button type="submit" class="primary" disabled=${busy || !may("sample") || !items.length || !models[0] || !models[1]}
            aria-describedby=${may("sample") ? undefined : "may-not-sample"}>${busy ? `Scoring ${done} of ${items.length} …` : "Score them"}</button></div></div>
    </form>
    ${done > 0 && html`<${Section} title="Before and after" actions=${html`<button type="button" onClick=${save}>Download CSV</button>`}><${Summary} results=${results} matches=${matches} /><//>
    <${Section} flush><${Table} caption="Each example" columns=${columns}>${results.map((result, place) => result && html`<${Row} key=${place} item=${items[place]} result=${result} place=${place} matches=${matches} />`)}<//><//>`}
    ${done === 0 && !busy && html`<${Section}><${Empty} title="Nothing is scored yet"><p>The loss is the mean negative logprob of the right answer's tokens: lower means that the model finds it likelier.</p><//><//>`}
  <//>`;
}
