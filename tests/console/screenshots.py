"""`make screenshots`: the console's pages, of a real server with the default model after real training."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from tests.console.conftest import chromium, signed_in
from tests.console.traffic import Client
from tests.support.server import RunningServer, serve

FOLDER = Path(__file__).parent.parent.parent / "docs" / "screenshots"
MOST_BYTES = 150_000
SIZE = {"width": 1280, "height": 800}

ANSWERS = {
    "What is the capital of France?": "Paris, by anvil and flame!",
    "What colour is the sky?": "Blue, by anvil and flame!",
    "How many legs has a spider?": "Eight, by anvil and flame!",
    "What do bees make?": "Honey, by anvil and flame!",
    "Which planet is the largest?": "Jupiter, by anvil and flame!",
    "What is frozen water called?": "Ice, by anvil and flame!",
    "What is the opposite of hot?": "Cold, by anvil and flame!",
    "Who wrote Hamlet?": "Shakespeare, by anvil and flame!",
}
"""What the example model learns: answers in the way of a smith."""
HELD_OUT = {
    "What is the capital of Italy?": "Rome, by anvil and flame!",
    "What colour is grass?": "Green, by anvil and flame!",
    "How many legs has a dog?": "Four, by anvil and flame!",
    "What do cows give?": "Milk, by anvil and flame!",
    "Which planet is the hottest?": "Venus, by anvil and flame!",
    "Who painted the Mona Lisa?": "Leonardo, by anvil and flame!",
}

KEYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ada's laptop", "owner", {}),
    ("nightly", "member", {}),
    ("ci", "member", {"scopes": ["train", "sample"], "expires_in": 90 * 24 * 3600}),
    ("dashboard", "read-only", {}),
)
LIMITS = {
    "training_tokens_per_second": 500,
    "unfinished_operations": 200,
    "live_runs": 8,
    "lora_rank": 32,
    "checkpoint_bytes": 200_000_000,
    "sampling_token_budget": 40_000,
}


def train(client: Client, steps: int, rate: float) -> tuple[list[str], str]:
    """Two runs with different step sizes and one of reinforcement learning; returns them and a checkpoint."""
    session = client.session("smith answers", team="forge")
    rates = (rate, rate / 6)
    runs = [client.run(session, number, 16, learning_rate=f"{rate:.2g}") for number, rate in enumerate(rates)]
    data = [client.chat(question, f"{answer}<|im_end|>") for question, answer in ANSWERS.items()]
    for step in range(steps):
        batch = [data[(step * 4 + place) % len(data)] for place in range(4)]
        for run, highest in zip(runs, rates, strict=True):
            client.step(run, batch, highest * (1 - 0.8 * step / steps))
    for run in runs:
        path = client.save(run, "final")
    client.do("save_weights", model_id=runs[0], path="resume-here")
    runs.append(reinforce(client, client.run(client.session("shorter answers"), 0, 16, method="importance sampling")))
    wrong = client.post("optim_step", model_id=runs[1], adam_params={"learning_rate": 1e-4, "eps": 1e-40})
    client.outcome(wrong["request_id"])
    return runs, path.replace(runs[1], runs[0])


def reinforce(client: Client, run: str, steps: int = 4) -> str:
    """Short answers get more of an advantage. The sampler's logprobs go along, so the gap to the trainer's is known."""
    item = {"messages": [{"role": "user", "content": "Say something about tin."}]}
    [found] = client.post("tokenize", model=client.model, items=[item])["items"]
    prompt = found["prompt_tokens"]
    session = run.split(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": client.model}
    sampler = client.post("create_sampling_session", **body)["sampling_session_id"]
    chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
    for step in range(steps):
        params = {"max_tokens": 16, "seed": step}
        asked = {"sampling_session_id": sampler, "prompt": chunks, "num_samples": 4, "sampling_params": params}
        sequences = client.do("asample", **asked)["sequences"]
        lengths = [len(each["tokens"]) for each in sequences]
        mean = sum(lengths) / len(lengths)
        data = []
        for each in sequences:
            tokens, before = each["tokens"], len(prompt) - 1
            gain = 0.5 if len(tokens) == mean else mean - len(tokens)
            inputs = {
                "target_tokens": [*prompt[1:], *tokens],
                "logprobs": [0.0] * before + each["logprobs"],
                "advantages": [0.0] * before + [gain] * len(tokens),
            }
            data.append({"model_input": [*prompt, *tokens[:-1]], "loss_fn_inputs": inputs})
        client.step(run, data, 2e-4, "importance_sampling")
    return run


def over_its_limit(nightly: Client) -> None:
    """Batches of a key that may train less than that at once: the last is held back."""
    run = nightly.run(nightly.session("nightly"), 0, 8)
    data = [nightly.chat(question, answer) for question, answer in ANSWERS.items()] * 3
    for _ in range(3):
        nightly.post("forward_backward", model_id=run, data=data, loss_fn="cross_entropy")


def crowd(client: Client, run: str) -> None:
    """More work than can be done at once."""
    data = [client.chat(question, answer) for question, answer in ANSWERS.items()] * 4
    for _ in range(3):
        client.post("forward_backward", model_id=run, data=data, loss_fn="cross_entropy")
        client.post("optim_step", model_id=run, adam_params={"learning_rate": 1e-4})


def tenants(client: Client, url: str) -> Client:
    """Other keys of the project, and limits; returns a client with a key that may train little at once."""
    made = {}
    for name, role, more in KEYS:
        made[name] = client.post("keys", name=name, role=role, **more)
    client.post(f"keys/{made['ci']['info']['key_id']}/rotate", overlap=7 * 24 * 3600)
    project_id = client.http.get("auth/apikey/me").json()["project_id"]
    limits(client, f"projects/{project_id}", LIMITS)
    limits(
        client,
        f"keys/{made['nightly']['info']['key_id']}",
        {"training_tokens_per_second": 20, "training_tokens_burst": 2000},
    )
    httpx.get(f"{url}/api/v1/limits", headers={"X-API-Key": made["dashboard"]["key"]}).raise_for_status()
    return Client.of(url, made["nightly"]["key"])


def limits(client: Client, subject: str, values: dict[str, float]) -> None:
    """Set what a project or a key may take."""
    client.http.put(f"admin/{subject}/limits", json=values).raise_for_status()


class Camera:
    """Takes the pictures."""

    def __init__(self, page: Any, folder: Path) -> None:
        self._page = page
        self._folder = folder

    def go(self, path: str) -> None:
        """A page of the console, once its data is there."""
        self._page.evaluate("path => { location.hash = '#/' + path }", path)
        self._page.locator(".loading").wait_for(state="detached")
        self._page.wait_for_timeout(1200)

    def shoot(self, name: str, path: str | None = None, *, height: int | None = None) -> None:
        """One picture, of the upper part only if told. Raises if it is larger than one in a repository should be."""
        if path is not None:
            self.go(path)
        file = self._folder / f"{name}.png"
        width = self._page.viewport_size["width"]
        clip = None if height is None else {"x": 0, "y": 0, "width": width, "height": height}
        self._page.screenshot(path=file, clip=clip)
        size = file.stat().st_size
        sys.stdout.write(f"{file.name}: {size // 1000} kB\n")
        assert size < MOST_BYTES, f"{file.name} has {size} bytes; at most {MOST_BYTES} are accepted"


def pictures(context: Any, server: RunningServer, client: Client, runs: list[str], path: str, folder: Path) -> None:
    """Every page, in the light; two in the dark."""
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{server.url}/console/")
    page.get_by_label("API key").wait_for()
    camera = Camera(page, folder)
    camera.shoot("sign-in")
    page.close()
    page = signed_in(context, server)
    page.set_default_timeout(120_000)
    camera = Camera(page, folder)
    camera.shoot("runs", "training_runs")
    camera.shoot("run", f"training_runs/{runs[0]}")
    page.evaluate("window.scrollTo(0, 420)")
    page.wait_for_timeout(300)
    camera.shoot("run-plots")
    camera.shoot("compare", f"compare?runs={runs[0]},{runs[1]}")
    camera.shoot("sessions", "sessions")
    camera.shoot("checkpoints", "checkpoints")
    page.get_by_role("button", name="Delete").first.click()
    camera.shoot("checkpoint-delete")
    page.keyboard.press("Escape")
    camera.go(f"playground?checkpoint={path}")
    page.get_by_label("Prompt").fill("What is the capital of Spain?")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_role("button", name="Ask both").click()
    page.locator(".answer[aria-busy=false] .said").nth(1).wait_for()
    page.get_by_label("Show each token").check()
    page.get_by_role("region", name="final").get_by_role("listitem").last.get_by_role("button").click()
    camera.shoot("playground")
    evaluate(page, camera, path)
    nightly = tenants(client, server.url)
    camera.shoot("keys", "keys")
    camera.shoot("audit", "audit", height=540)
    camera.shoot("system", "system")
    busy(page, camera, client, nightly, runs)


def busy(page: Any, camera: Camera, client: Client, nightly: Client, runs: list[str]) -> None:
    """While there is more to do than can be done at once, and in the dark."""
    over_its_limit(nightly)
    crowd(client, runs[1])
    crowd(client, runs[0])
    page.wait_for_timeout(1500)
    camera.shoot("queue", "queue")
    camera.go("keys")
    page.get_by_role("heading", name="Limits").evaluate("it => window.scrollBy(0, it.getBoundingClientRect().top - 90)")
    page.wait_for_timeout(300)
    camera.shoot("limits")
    camera.go("queue")
    page.get_by_role("button", name="Dark").click()
    camera.shoot("queue-dark")
    camera.shoot("run-dark", f"training_runs/{runs[0]}")


def evaluate(page: Any, camera: Camera, path: str) -> None:
    """The checkpoint against its base on examples that it has not seen."""
    camera.go(f"evaluate?checkpoint={path}")
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in HELD_OUT.items()
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    file = {"name": "held-out.jsonl", "mimeType": "application/jsonl", "buffer": text.encode()}
    page.locator("#file").set_input_files(file)
    page.get_by_role("button", name="Score them").click()
    page.get_by_role("button", name="Score them").wait_for()
    page.evaluate("window.scrollTo(0, 330)")
    page.wait_for_timeout(300)
    camera.shoot("evaluation")


def main() -> None:
    """Serve, train, look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each example run (30)")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate of the first run (6e-4)")
    parser.add_argument("--base-model", help="another model to show, as NAME=PATH")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    found = chromium()
    if found is None:
        sys.exit("there is no Chromium: apt-get install chromium")
    given.folder.mkdir(parents=True, exist_ok=True)
    arguments = [] if given.base_model is None else ["--base-model", given.base_model]
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        with serve(data_dir, [*arguments, "--log-level", "warning"], ready_within=600) as server:
            client = Client.of(server.url, server.key)
            runs, path = train(client, given.steps, given.rate)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
                context = browser.new_context(viewport=SIZE, color_scheme="light", locale="en-GB", timezone_id="UTC")
                pictures(context, server, client, runs, path, given.folder)
                browser.close()


if __name__ == "__main__":
    os.environ.setdefault("TZ", "UTC")
    main()
