// The server's API. The key is sent as a header with each request and kept in this tab only: no cookie, so no other page
// can use it, and it is gone with the tab.
import { useCallback, useEffect, useRef, useState } from "../vendor/preact-hooks.js";

const KEY = "tinsmith.key";
const root = new URL("../", new URL(".", document.baseURI));

export class ApiError extends Error {
  constructor(status, message, { hint, code, field, requestId } = {}) {
    super(message);
    Object.assign(this, { status, hint, code, field, requestId });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

let refused = () => {};
export function onRefused(listener) {
  refused = listener;
}

export function address(path, params) {
  const prefix = path.startsWith("oai/") ? "" : "api/v1/";
  const url = new URL(prefix + path, root);
  for (const [name, value] of Object.entries(params ?? {})) {
    if (value !== undefined && value !== null) url.searchParams.set(name, value);
  }
  return url;
}

async function send(method, path, { params, body, signal, accept = "application/json" } = {}) {
  const headers = { "X-API-Key": key.get() ?? "", Accept: accept };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    const text = body === undefined ? undefined : JSON.stringify(body);
    answer = await fetch(address(path, params), { method, headers, body: text, signal, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.", { hint: "Is it running, and can this machine reach it?" });
  }
  if (!answer.ok) throw await problem(answer);
  return answer;
}

async function problem(answer) {
  const found = await answer.json().catch(() => ({}));
  const error = found.error && typeof found.error === "object" ? found.error : {};
  const message = error.message ?? found.detail ?? `The server answered ${answer.status}.`;
  const known = { hint: error.hint, code: error.code, field: error.field ?? error.param };
  known.requestId = error.request_id ?? answer.headers.get("x-request-id");
  const made = new ApiError(answer.status, message, known);
  if (answer.status === 401) refused(made);
  return made;
}

export const get = async (path, params, signal) => (await send("GET", path, { params, signal })).json();
export const text = async (path, params) => (await send("GET", path, { params, accept: "*/*" })).text();
export const put = (path, body) => send("PUT", path, { body });
export const del = (path) => send("DELETE", path);

export async function post(path, body, signal) {
  const answer = await send("POST", path, { body, signal });
  return answer.status === 204 || answer.headers.get("content-length") === "0" ? null : answer.json();
}

// Where a checkpoint's archive can be fetched without a key. The answer redirects to a signed address; its body is not
// read here, so that the browser itself downloads it, to disk. The address is asked for relative to this one: an absolute
// one begins with the server's `public_url`, and another origin than this page's the browser does not let us ask.
export async function archive(path) {
  const cancel = new AbortController();
  const answer = await send("GET", path, { params: { relative: true }, accept: "*/*", signal: cancel.signal });
  cancel.abort();
  return answer.url;
}

// Server-sent events of a GET or POST: {name, data}. EventSource cannot send the key, so the stream is read by hand.
export async function* events(method, path, options) {
  const answer = await send(method, path, { ...options, accept: "text/event-stream" });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n");
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        const named = lines.find((line) => line.startsWith("event: "));
        if (data) yield { name: named?.slice(7) ?? "message", data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What `load` gives, at once and when `reload` is called, whether the page is looked at or not; and again every `every`
// milliseconds while it is looked at: what becomes due in a hidden tab is loaded when the tab is seen again. Old data
// stays when a try fails.
export function useData(load, parts, every = 0) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const [tick, setTick] = useState(0);
  const reload = useCallback(() => setTick((value) => value + 1), []);
  const last = useRef(null);
  const name = JSON.stringify(parts);
  useEffect(() => {
    const cancel = new AbortController();
    let timer = 0;
    let overdue = false;
    if (last.current !== name) setState({ data: null, error: null, loading: true });
    last.current = name;
    const run = async () => {
      overdue = false;
      try {
        const data = await load(cancel.signal);
        if (!cancel.signal.aborted) setState({ data, error: null, loading: false });
      } catch (error) {
        if (!cancel.signal.aborted) setState((before) => ({ data: before.data, error, loading: false }));
      }
      if (every && !cancel.signal.aborted) timer = setTimeout(due, every);
    };
    const due = () => {
      overdue = document.hidden;
      if (!overdue) run();
    };
    const seen = () => {
      if (overdue && !document.hidden) run();
    };
    document.addEventListener("visibilitychange", seen);
    run();
    return () => {
      cancel.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [name, tick, every]);
  return { ...state, reload };
}
