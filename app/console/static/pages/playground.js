// The base model and an adapter, side by side on the same prompt with the same seed.
import { Empty, Loading, Page, Problem, Section, html, useEffect, useRef, useState } from "../lib/ui.js";
import { events, get, useData } from "../lib/api.js";
import { modelName, number, percent } from "../lib/format.js";
import { Lacks, useRights } from "../lib/rights.js";

const TOP = 5;

// How likely a token was, in five steps. The number is written beside it, so the colour only repeats it.
function level(logprob) {
  const share = Math.exp(logprob);
  return share > 0.9 ? 0 : share > 0.5 ? 1 : share > 0.2 ? 2 : share > 0.05 ? 3 : 4;
}

function Tokens({ tokens }) {
  const [chosen, setChosen] = useState(null);
  const shown = chosen === null ? null : tokens[chosen];
  const visible = (text) => text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
  return html`<div class="tokens">
    <ol class="token-list" aria-label="Tokens and how likely each was">${tokens.map((token, place) => html`<li>
      <button type="button" class=${`token level-${level(token.logprob)}`} aria-pressed=${chosen === place}
        aria-label=${`${token.token}, ${percent(Math.exp(token.logprob), 1)}`} onClick=${() => setChosen(chosen === place ? null : place)}>
        <span>${visible(token.token)}</span><small>${percent(Math.exp(token.logprob))}</small></button></li>`)}</ol>
    ${shown && html`<div class="token-detail" role="status"><p><code>${visible(shown.token)}</code> logprob ${number(shown.logprob)}, probability ${percent(Math.exp(shown.logprob), 2)}</p>
      ${shown.top?.length > 0 && html`<table><caption>The likeliest tokens here</caption><tbody>${shown.top.map((other) => html`<tr>
        <th scope="row"><code>${visible(other.token)}</code></th><td class="number">${number(other.logprob)}</td><td class="number">${percent(Math.exp(other.logprob), 2)}</td></tr>`)}</tbody></table>`}</div>`}
  </div>`;
}

function Side({ title, answer, numbers }) {
  return html`<section class="card side" aria-label=${title}>
    <header class="card-head"><h2>${title}</h2>
      ${answer?.tokens.length > 0 && html`<p class="quiet">${answer.tokens.length} tokens, mean logprob ${number(answer.tokens.reduce((sum, token) => sum + token.logprob, 0) / answer.tokens.length)}</p>`}</header>
    <div class="answer" aria-live="polite" aria-busy=${answer?.busy ? "true" : "false"}>
      ${!answer && html`<p class="quiet">Its answer comes here.</p>`}
      ${answer?.busy && !answer.text && html`<p class="quiet">Waiting for its turn …</p>`}
      ${answer?.text && !numbers && html`<p class="said">${answer.text}</p>`}
      ${answer?.tokens.length > 0 && numbers && html`<${Tokens} tokens=${answer.tokens} />`}
      ${answer?.ended && html`<p class="quiet">${answer.ended === "length" ? "It was cut off at the most tokens." : "It ended by itself."}</p>`}
    </div>
    <${Problem} error=${answer?.error} what="There is no answer" />
  </section>`;
}

async function* answerOf(model, asked, signal) {
  const shared = { model, max_tokens: asked.most, temperature: asked.temperature, seed: asked.seed, stream: true };
  const path = asked.chat ? "oai/api/v1/chat/completions" : "oai/api/v1/completions";
  const messages = [...(asked.system ? [{ role: "system", content: asked.system }] : []), { role: "user", content: asked.prompt }];
  const body = asked.chat ? { ...shared, messages, logprobs: true, top_logprobs: TOP } : { ...shared, prompt: asked.prompt, logprobs: TOP };
  for await (const { data } of events("POST", path, { body, signal })) {
    if (data === "[DONE]") return;
    const told = JSON.parse(data);
    if (told.error) throw new Error(told.error.message);
    const [choice] = told.choices;
    if (choice) yield asked.chat ? chatPart(choice) : textPart(choice);
  }
}

function chatPart(choice) {
  const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top }));
  return { text: choice.delta?.content ?? "", tokens, ended: choice.finish_reason };
}

function textPart(choice) {
  const { tokens = [], token_logprobs: logprobs = [], top_logprobs: tops } = choice.logprobs ?? {};
  const others = (place) => Object.entries(tops?.[place] ?? {}).map(([token, logprob]) => ({ token, logprob })).sort((one, other) => other.logprob - one.logprob);
  return { text: choice.text ?? "", tokens: tokens.map((token, place) => ({ token, logprob: logprobs[place], top: others(place) })), ended: choice.finish_reason };
}

export function Playground({ checkpoint }) {
  const { me, may } = useRights();
  const { data, error, loading, reload } = useData(async (signal) => {
    const [models, base] = await Promise.all([get("oai/api/v1/models", {}, signal), get("get_server_capabilities", {}, signal)]);
    return { models: models.data.map((model) => model.id), bases: base.supported_models.map((model) => model.model_name) };
  }, []);
  const [sides, setSides] = useState([null, null]);
  const [answers, setAnswers] = useState([null, null]);
  const [form, setForm] = useState({ chat: true, system: "", prompt: "", most: 128, temperature: 0.7, seed: 1 });
  const [numbers, setNumbers] = useState(false);
  const cancel = useRef(null);
  useEffect(() => {
    if (data) setSides([data.bases[0] ?? null, checkpoint ?? data.models.find((name) => name.startsWith("tinker://")) ?? null]);
  }, [data, checkpoint]);
  useEffect(() => () => cancel.current?.abort(), []);
  const change = (name, read = (value) => value) => (event) => setForm({ ...form, [name]: read(event.target.value) });
  const busy = answers.some((answer) => answer?.busy);

  const ask = async (event) => {
    event.preventDefault();
    if (!may("sample")) return; // Ctrl+Enter sends the form without its button
    cancel.current?.abort();
    const mine = new AbortController();
    cancel.current = mine;
    await Promise.all(sides.map(async (model, side) => {
      const show = (more) => !mine.signal.aborted && setAnswers((before) => before.map((one, place) => (place === side ? { ...one, ...more } : one)));
      if (!model) {
        setAnswers((before) => before.map((one, place) => (place === side ? null : one)));
        return;
      }
      const said = { model, text: "", tokens: [], busy: true, ended: null, error: null };
      show(said);
      try {
        for await (const part of answerOf(model, form, mine.signal)) {
          said.text += part.text;
          said.tokens = [...said.tokens, ...part.tokens];
          said.ended = part.ended ?? said.ended;
          show(said);
        }
        show({ busy: false });
      } catch (problem) {
        if (problem.name !== "AbortError") show({ busy: false, error: problem });
      }
    }));
  };
  const stop = () => {
    cancel.current?.abort();
    setAnswers(answers.map((answer) => answer && { ...answer, busy: false, ended: answer.ended ?? null }));
  };
  // Whose answer stands there: the model that was asked, whatever is chosen for the next time.
  const shown = answers.map((answer, side) => modelName(answer?.model ?? sides[side]));
  const names = data ? [...new Set([...data.models, ...(checkpoint ? [checkpoint] : [])])] : [];
  const choose = (side, label) => html`<div class="field"><label for=${`model-${side}`}>${label}</label>
    <select id=${`model-${side}`} value=${sides[side] ?? ""} onChange=${(event) => setSides(sides.map((one, place) => (place === side ? event.target.value || null : one)))}>
      <option value="">none</option>${names.map((name) => html`<option value=${name} title=${name}>${modelName(name)}</option>`)}</select></div>`;
  return html`<${Page} title="Playground" about="The same prompt with the same seed, to two models side by side. What differs is the weights.">
    <${Problem} error=${error} what="The models cannot be listed" retry=${reload} />
    ${loading && html`<${Loading} what="the models" />`}
    ${data && !names.length && html`<${Section}><${Empty} title="Nothing to talk to"><p>The server serves no base model yet.</p><//><//>`}
    <${Lacks} id="may-not-sample" me=${me} permission="sample" what="ask a model" />
    ${data && names.length > 0 && html`<form class="card" onSubmit=${ask}>
      <div class="fields">${choose(0, "Left")}${choose(1, "Right")}
        <div class="field"><label for="mode">As</label><select id="mode" value=${form.chat ? "chat" : "text"} onChange=${(event) => setForm({ ...form, chat: event.target.value === "chat" })}>
          <option value="chat">a chat</option><option value="text">a plain text to continue</option></select></div>
      </div>
      ${form.chat && html`<div class="field"><label for="system">System message, if any</label><input id="system" value=${form.system} onInput=${change("system")} /></div>`}
      <div class="field"><label for="prompt">Prompt</label><textarea id="prompt" rows="3" required value=${form.prompt} onInput=${change("prompt")}
        onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form.requestSubmit()}></textarea></div>
      <div class="fields">
        <div class="field narrow"><label for="most">Most tokens</label><input id="most" type="number" min="1" max="100000" value=${form.most} onInput=${change("most", Number)} /></div>
        <div class="field narrow"><label for="temperature">Temperature</label><input id="temperature" type="number" min="0" max="2" step="0.1" value=${form.temperature} onInput=${change("temperature", Number)} /></div>
        <div class="field narrow"><label for="seed">Seed</label><input id="seed" type="number" min="0" value=${form.seed} onInput=${change("seed", Number)} /></div>
        <label class="check"><input type="checkbox" checked=${numbers} onChange=${() => setNumbers(!numbers)} /> Show each token with its probability</label>
        <div class="actions push">${busy && html`<button type="button" onClick=${stop}>Stop</button>`}<button type="submit" class="primary" disabled=${busy || !may("sample") || !sides.some(Boolean)}
          aria-describedby=${may("sample") ? undefined : "may-not-sample"}>${busy ? "Answering …" : "Ask both"}</button></div>
      </div>
    </form>
    ${!sides[1] && html`<p class="quiet">There is no checkpoint for sampling yet. Save one with <code>save_weights_for_sampler</code> to see what training changed.</p>`}
    <div class="sides"><${Side} title=${shown[0] ?? "No model on the left"} answer=${answers[0]} numbers=${numbers} />
      <${Side} title=${shown[1] ?? "No model on the right"} answer=${answers[1]} numbers=${numbers} /></div>`}
  <//>`;
}
