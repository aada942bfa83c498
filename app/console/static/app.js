// The console's frame: who is signed in, which page is shown, the way to the others.
import { Fragment, Problem, html, render, useEffect, useErrorBoundary, useLayoutEffect, useState } from "./lib/ui.js";
import { get, key, onRefused } from "./lib/api.js";
import { Account } from "./pages/account.js";
import { Audit } from "./pages/audit.js";
import { Checkpoint, Checkpoints } from "./pages/checkpoints.js";
import { Compare } from "./pages/compare.js";
import { Evaluate } from "./pages/evaluate.js";
import { Playground } from "./pages/playground.js";
import { Queue } from "./pages/queue.js";
import { Run } from "./pages/run.js";
import { Runs } from "./pages/runs.js";
import { Session, Sessions } from "./pages/sessions.js";
import { SignIn } from "./pages/signin.js";
import { System } from "./pages/system.js";

const MENU = [
  ["Train", [["training_runs", "Runs"], ["compare", "Compare"], ["queue", "Queue"], ["sessions", "Sessions"]]],
  ["Use", [["checkpoints", "Checkpoints"], ["playground", "Playground"], ["evaluate", "Evaluation"]]],
  ["Server", [["keys", "Keys and usage"], ["audit", "Audit log"], ["system", "System health"]]],
];

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  return { page: parts[0] ?? "training_runs", rest: parts.slice(1), params: new URLSearchParams(query ?? "") };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function Shown({ page, rest, params }) {
  const id = rest[0];
  switch (page) {
    case "training_runs":
      return id ? html`<${Run} key=${id} id=${id} />` : html`<${Runs} />`;
    case "compare":
      return html`<${Compare} chosen=${(params.get("runs") ?? "").split(",").filter(Boolean)} />`;
    case "queue":
      return html`<${Queue} />`;
    case "sessions":
      return id ? html`<${Session} key=${id} id=${id} />` : html`<${Sessions} />`;
    case "checkpoints":
      return id ? html`<${Checkpoint} key=${rest.join("/")} run=${id} name=${rest.slice(1).join("/")} />` : html`<${Checkpoints} />`;
    case "playground":
      return html`<${Playground} checkpoint=${params.get("checkpoint")} />`;
    case "evaluate":
      return html`<${Evaluate} checkpoint=${params.get("checkpoint")} />`;
    case "keys":
      return html`<${Account} newName=${params.get("new_key") === "true" ? (params.get("key_name") ?? "") : null} />`;
    case "audit":
      return html`<${Audit} day=${params.get("day")} />`;
    case "system":
      return html`<${System} />`;
    default:
      return html`<div class="page"><h1>No such page</h1><p>Choose one from the menu.</p></div>`;
  }
}

function Guarded(props) {
  const [error, reset] = useErrorBoundary();
  if (error) {
    return html`<${Problem} error=${{ message: "This page has failed to show itself.", hint: String(error.message) }}
      what="The console is at fault" retry=${reset} />`;
  }
  return html`<${Shown} ...${props} />`;
}

function Theme() {
  const dark = () => document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const [theme, setTheme] = useState(dark());
  const change = () => {
    const next = theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("tinsmith.theme", next);
    } catch {
      // It then lasts as long as the page.
    }
    setTheme(next);
  };
  return html`<button type="button" class="ghost" onClick=${change}>${theme === "dark" ? "Light" : "Dark"}<span class="roomy"> theme</span></button>`;
}

function Menu({ page, open, close }) {
  return html`<nav class=${open ? "menu open" : "menu"} id="menu" aria-label="Pages" onClick=${close}>
    ${MENU.map(([group, pages]) => html`<${Fragment}>
      <h2>${group}</h2>
      <ul>${pages.map(([name, title]) => html`<li>
        <a href=${`#/${name}`} aria-current=${page === name ? "page" : undefined}>${title}</a></li>`)}</ul>
    <//>`)}
  </nav>`;
}

function Frame({ leave, project }) {
  const [shown, setShown] = useState(route());
  const [open, setOpen] = useState(false);
  useLayoutEffect(() => {  // before the page is seen: an address that is chosen at once must not be missed
    const changed = () => setShown(route());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const skip = (event) => {
    event.preventDefault();
    document.querySelector("#content h1")?.focus();
  };
  return html`<${Fragment}>
    <a class="skip" href="#content" onClick=${skip}>Skip to the page</a>
    <header class="top">
      <button type="button" class="ghost menu-button" aria-expanded=${open} aria-controls="menu" onClick=${() => setOpen(!open)}>Menu</button>
      <a class="brand" href="#/training_runs"><img src="icon.svg" alt="" width="24" height="24" /> Tinsmith</a>
      <span class="spacer"></span>
      ${project && html`<span class="project" title=${`Key ${project.note}`}>
        <span class="quiet">Project</span> ${project.details.org_details.name}</span>`}
      <${Theme} />
      <button type="button" class="ghost" onClick=${leave}>Sign out</button>
    </header>
    <div class="frame">
      <${Menu} page=${shown.page} open=${open} close=${() => setOpen(false)} />
      <main id="content"><${Guarded} key=${[shown.page, ...shown.rest].join("/")} ...${shown} /></main>
    </div>
  <//>`;
}

function App() {
  const [signed, setSigned] = useState(Boolean(key.get()));
  const [reason, setReason] = useState(null);
  const [project, setProject] = useState(null);
  const leave = (why = null) => {
    key.clear();
    setProject(null);
    setReason(why);
    setSigned(false);
  };
  useEffect(() => onRefused(leave), []);
  useEffect(() => {
    if (signed) get("auth/apikey/me").then(setProject, () => {});
  }, [signed]);
  if (!signed) return html`<${SignIn} reason=${reason} enter=${() => { setReason(null); setSigned(true); }} />`;
  return html`<${Frame} project=${project} leave=${() => leave()} />`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
