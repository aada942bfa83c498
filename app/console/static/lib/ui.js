// What every page is made of. Text goes into the page as text nodes only: Preact makes them, nothing here parses markup.
import { h, render, Fragment } from "../vendor/preact.js";
import { useState, useEffect, useLayoutEffect, useRef, useErrorBoundary } from "../vendor/preact-hooks.js";
import htm from "../vendor/htm.js";
import { age, time } from "./format.js";

export const html = htm.bind(h);
export { render, Fragment };
export { useState, useEffect, useLayoutEffect, useRef, useErrorBoundary };

export function Page({ title, about, actions, children }) {
  const heading = useRef(null);
  // Before the page is seen: later, on a slow machine, it would take the focus from somebody who has moved on already.
  useLayoutEffect(() => {
    document.title = `${title} · Tinsmith`;
    heading.current?.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }, [title]);
  return html`<div class="page">
    <header class="page-head">
      <div class="page-title">
        <h1 tabindex="-1" ref=${heading}>${title}</h1>
        ${about && html`<p class="about">${about}</p>`}
      </div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}
  </div>`;
}

export function Section({ title, about, actions, children, flush }) {
  return html`<section class=${flush ? "card flush" : "card"}>
    ${title && html`<header class="card-head">
      <div><h2>${title}</h2>${about && html`<p class="about">${about}</p>`}</div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>`}
    ${children}
  </section>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p><div>${children}</div></div>`;
}

// An error in words: what is wrong, what to do, and the number that the server's log has it under.
export function Problem({ error, what, retry }) {
  if (!error) return null;
  return html`<div class="problem" role="alert">
    <p><strong>${what ?? "That did not work"}.</strong> ${error.message}</p>
    ${error.hint && html`<p>${error.hint}</p>`}
    ${error.requestId && html`<p class="quiet">Request ${error.requestId}</p>`}
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

export function Loading({ what }) {
  return html`<p class="loading" role="status">Loading ${what ?? ""} …</p>`;
}

const TONES = {
  ready: "good", active: "good", running: "good", win: "good", public: "note",
  creating: "note", starting: "note", restarting: "warn", waiting: "note", paused: "warn",
  lost: "bad", failed: "bad", loss: "bad", errored: "bad", closed: "plain", finished: "plain", silent: "plain", tie: "plain",
};

export function Badge({ state, children }) {
  return html`<span class=${`badge ${TONES[state] ?? "plain"}`}>${children ?? state}</span>`;
}

export function Time({ value }) {
  if (!value) return html`<span class="quiet">–</span>`;
  return html`<time datetime=${value} title=${time(value)}>${age(value)}</time>`;
}

export function Fact({ label, children, wide }) {
  return html`<div class=${wide ? "fact wide" : "fact"}><dt>${label}</dt><dd>${children}</dd></div>`;
}

export function Tile({ label, value, note }) {
  return html`<div class="tile"><dt>${label}</dt><dd>${value}</dd>${note && html`<dd class="quiet note">${note}</dd>`}</div>`;
}

// Which sides of something that scrolls hide a part of it, as classes.
function useHidden() {
  const place = useRef(null);
  const [hidden, setHidden] = useState("");
  const look = () => {
    if (!place.current) return; // a last report may come after the page has changed
    const { scrollLeft, scrollWidth, clientWidth } = place.current;
    const sides = [scrollLeft > 1 && " more-left", scrollLeft + clientWidth < scrollWidth - 1 && " more-right"];
    setHidden(sides.filter(Boolean).join(""));
  };
  useEffect(() => {
    const watch = new ResizeObserver(look);
    watch.observe(place.current);
    watch.observe(place.current.firstElementChild);
    return () => watch.disconnect();
  }, []);
  return { place, hidden, look };
}

// A table that scrolls by itself on a narrow screen, so it must be reachable by keyboard, and shows that there is more.
export function Table({ caption, columns, children }) {
  const { place, hidden, look } = useHidden();
  return html`<div class=${`table-frame${hidden}`}><div class="table" role="region" aria-label=${caption} tabindex="0" ref=${place} onScroll=${look}>
    <table>
      <caption class="hidden">${caption}</caption>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.number ? "number" : ""}>
        ${column.hidden ? html`<span class="hidden">${column.name}</span>` : column.name}</th>`)}</tr></thead>
      <tbody>${children}</tbody>
    </table>
  </div></div>`;
}

export function Metadata({ value }) {
  const pairs = Object.entries(value ?? {});
  if (!pairs.length) return html`<span class="quiet">none</span>`;
  return html`<ul class="pairs">${pairs.map(([name, each]) => html`<li><span class="quiet">${name}</span> ${each}</li>`)}</ul>`;
}

export function Copy({ text, label }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      window.prompt("Copy this text", text); // the browser keeps the clipboard closed on plain http
    }
  };
  return html`<button type="button" class="small" onClick=${copy} aria-label=${label ?? `Copy ${text}`}>
    <span aria-live="polite">${done ? "Copied" : "Copy"}</span></button>`;
}

// A question before something that cannot be undone. `ask` is {title, body, yes, act}; Escape and Cancel mean no.
export function Confirm({ ask, close }) {
  const dialog = useRef(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (ask && !dialog.current.open) dialog.current.showModal();
    setError(null);
  }, [ask]);
  if (!ask) return null;
  const act = async () => {
    setBusy(true);
    try {
      await ask.act();
      close();
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  return html`<dialog ref=${dialog} aria-labelledby="confirm-title" onClose=${close}>
    <h2 id="confirm-title">${ask.title}</h2>
    <div class="dialog-body">${ask.body}</div>
    <${Problem} error=${error} />
    <div class="actions">
      <button type="button" autofocus onClick=${() => dialog.current.close()}>Cancel</button>
      <button type="button" class=${ask.gentle ? "primary" : "danger"} disabled=${busy} onClick=${act}>${ask.yes}</button>
    </div>
  </dialog>`;
}

export function Pager({ offset, limit, total, go }) {
  if (total <= limit) return null;
  return html`<nav class="pager" aria-label="Pages">
    <button type="button" disabled=${offset === 0} onClick=${() => go(Math.max(0, offset - limit))}>Newer</button>
    <span>${offset + 1}–${Math.min(offset + limit, total)} of ${total}</span>
    <button type="button" disabled=${offset + limit >= total} onClick=${() => go(offset + limit)}>Older</button>
  </nav>`;
}
