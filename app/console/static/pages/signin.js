// Typing the key, once per tab.
import { Problem, html, useLayoutEffect, useRef, useState } from "../lib/ui.js";
import { get, key } from "../lib/api.js";

export function SignIn({ enter, reason }) {
  const input = useRef(null);
  const [error, setError] = useState(reason);
  const [busy, setBusy] = useState(false);
  useLayoutEffect(() => {
    document.title = "Sign in · Tinsmith";
    input.current?.focus();
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    const typed = input.current.value.trim();
    setError(null);
    if (!typed) {
      setError({ message: "Type the key first." });
      return;
    }
    if (/[^\x21-\x7e]/.test(typed)) {
      setError({ message: "A key has no spaces and no letters beyond ASCII.", hint: "Copy it again, without what is around it." });
      return;
    }
    setBusy(true);
    key.set(typed);
    try {
      await get("auth/apikey/me");
      enter();
    } catch (problem) {
      key.clear();
      const wrong = { message: "The server does not accept this key.", hint: "It may be mistyped, expired or revoked." };
      setError(problem.status === 401 ? wrong : problem);
      setBusy(false);
    }
  };
  return html`<main class="signin">
    <form class="card" onSubmit=${submit}>
      <img src="icon.svg" alt="" width="40" height="40" />
      <h1>Sign in to Tinsmith</h1>
      <label for="key">API key</label>
      <input id="key" ref=${input} type="password" autocomplete="off" spellcheck=${false} placeholder="tml-…"
        aria-describedby="key-help" aria-invalid=${error ? "true" : undefined} />
      <${Problem} error=${error} what="You are not signed in" />
      <button type="submit" class="primary" disabled=${busy}>${busy ? "Asking the server …" : "Sign in"}</button>
      <p class="quiet" id="key-help">The server prints its first key when it starts, and keeps it in the
        file <code>dev_key</code> of its data folder. The key stays in this tab, and is forgotten when the tab is closed.</p>
    </form>
  </main>`;
}
