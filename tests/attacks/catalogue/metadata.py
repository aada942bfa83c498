"""Texts for people: what is refused, and what is kept and given back as data and never as anything else."""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks.catalogue.case import Case

REFUSED = {
    "a line break": "a\nINFO app: forged",
    "a carriage return": "a\rb",
    "an escape sequence of a terminal": "\x1b[2J\x1b[31mred",
    "a title of a terminal": "\x1b]0;owned\x07",
    "a NUL": "a\x00b",
    "a delete character": "a\x7fb",
    "300 characters": "x" * 300,
    "nothing": "",
}

KEPT = {
    "a script": "<script>alert(document.cookie)</script>",
    "an image with a handler": "<img src=x onerror=alert(1)>",
    "a closing tag": "</td></table><h1>x",
    "an address of a script": "javascript:alert(1)",
    "a formula": '=HYPERLINK("http://evil.example","x")',
    "a formula with a plus": "+cmd|' /C calc'!A0",
    "a formula with an at sign": "@SUM(1+1)",
    "markup of the console": "[bold red]x[/bold red][link=file:///etc/passwd]y[/link]",
    "a format": "%s%s%n{0.__class__}",
    "a look-up": "${jndi:ldap://127.0.0.1:1/x}",
    "a template": "{{7*7}}",
    "a statement of SQL": "'); DROP TABLE sessions;--",
    "a wildcard of SQL": "%_\\",
}


def cases() -> Iterator[Case]:
    """What is refused, by name."""
    for what, text in REFUSED.items():
        for field, value in (("display_name", text), ("tags", [text]), ("sdk_version", text)):
            yield Case(f"{what} as {field}", "create_session", {field: value}, field=field)
        yield Case(
            f"{what} as key of metadata", "create_session", {"user_metadata": {text: "x"}}, field="user_metadata"
        )
        loss = {"session_id": "$session", "custom_loss_seq_id": 9, "name": text, "inputs": [], "graph": {"nodes": []}}
        yield Case(f"{what} as name of a loss", "create_custom_loss", loss, field="name")
    for where, more in (
        ("create_session", {}),
        ("create_model", {"session_id": "$session", "model_seq_id": 9, "base_model": "acme/tiny"}),
        ("save_weights", {"model_id": "$model", "path": "x"}),
        ("save_weights_for_sampler", {"model_id": "$model", "path": "x"}),
    ):
        for what, metadata in (
            ("1 MB", {"x": "x" * 10**6}),
            ("a thousand pairs", {f"k{i}": "x" for i in range(1000)}),
            ("a number", {"x": 1}),
            ("an object", {"x": {"y": "z"}}),
            ("a list", [["x", "y"]]),
            ("a NUL", {"x": "a\x00b"}),
            ("a text", "x"),
        ):
            yield Case(
                f"{what} as metadata in {where}", where, {**more, "user_metadata": metadata}, field="user_metadata"
            )
    yield Case("a thousand tags", "create_session", {"tags": ["x"] * 1000}, field="tags")
    finish = "sessions/$session/finish"
    yield Case("1 MB of detail about an end", finish, {"detail": "x" * 10**6}, field="detail")
    yield Case("an unknown way to end", finish, {"reason": {"type": "owned"}}, field="reason.type")
    for value in ("a\r\nSet-Cookie: x=1", "x" * 70, "a b", "<script>"):
        encoded = value.encode("unicode_escape").decode()
        yield Case(f"{encoded[:20]} as idempotency key of 300 characters", "create_session", {},
                   headers={"X-Idempotency-Key": (encoded * 300)[:300]})  # fmt: skip
