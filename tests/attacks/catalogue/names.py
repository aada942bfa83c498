"""Names and paths that try to leave their place, in every field and address that takes one."""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks.catalogue.case import BASE_MODEL, Case

NAMES = {
    "a name of two dots": "..",
    "a name of one dot": ".",
    "a way out": "../x",
    "a way out with backslashes": "..\\x",
    "a path from the root": "/etc/x",
    "a drive letter": "C:\\x",
    "an encoded way out": "%2e%2e%2f",
    "a doubly encoded way out": "%252e%252e%252f",
    "a way out with a full-width solidus": "..／x",
    "a NUL": "a\x00b",
    "a NUL before an extension": "x\x00.safetensors",
    "a line break": "a\nb",
    "a carriage return": "a\rb",
    "a tab": "a\tb",
    "an escape sequence of a terminal": "\x1b[31mx",
    "a C1 control character": "a\x9bb",
    "a name of 300 characters": "x" * 300,
    "a name of 129 characters": "x" * 129,
    "an empty name": "",
    "a blank at the end": "x ",
    "a blank at the beginning": " x",
    "a leading dash": "-rf",
    "a Cyrillic look-alike": "\u0430dapter",
    "a composed character": "é",
    "the same character decomposed": "e\u0301",
    "a right-to-left override": "\u202ex",
    "a zero-width character": "a\u200bb",
    "an emoji": "🙂",
    "a stream of another file system": "x:y",
    "a share": "\\\\host\\share",
    "a home folder": "~root",
    "a variable": "${HOME}",
    "a command": "$(id)",
    "a URL": "file:///etc/passwd",
}

PATHS = {
    "a file of the server": "/etc/passwd",
    "a file address": "file:///etc/passwd",
    "a web address": "https://127.0.0.1/x",
    "a scheme in capitals": "TINKER://$model/weights/x",
    "no run": "tinker:///weights/x",
    "no name": "tinker://$model/weights/",
    "an unknown segment": "tinker://$model/elsewhere/x",
    "a fourth part": "tinker://$model/weights/x/y",
    "a way out in the name": "tinker://$model/weights/..",
    "a way out in the run": "tinker://../weights/x",
    "a way out behind the name": "tinker://$model/weights/x/../../../etc",
    "an encoded way out": "tinker://$model/weights/%2e%2e",
    "a backslash": "tinker://$model/weights/..\\x",
    "a NUL": "tinker://$model/weights/x\x00",
    "a line break": "tinker://$model/weights/x\n",
    "a query": "tinker://$model/weights/x?y",
    "a fragment": "tinker://$model/weights/x#y",
    "a user": "tinker://user@$model/weights/x/",
    "10,000 characters": "tinker://" + "x" * 10_000 + "/weights/x",
}


ABSENT = ("tinker://../weights/x",)
"""Well-formed: two dots could be an id. It is looked up in the database, and is not there."""


def cases() -> Iterator[Case]:
    """Every name in every field and address."""
    for what, name in NAMES.items():
        for route, more in (
            ("save_weights", {}),
            ("save_weights_for_sampler", {}),
            ("save_weights_external", {}),
        ):
            body = {"model_id": "$model", "path": name, **more}
            yield Case(f"{what} for a checkpoint, in {route}", route, body, field="path")
    for what, path in PATHS.items():
        status = (404,) if path in ABSENT else (400,)
        body = {"model_id": "$model", "path": path, "optimizer": False}
        yield Case(f"{what} as checkpoint to load", "load_weights", body, status=status, field="path")
        yield Case(
            f"{what} as checkpoint to sample",
            "create_sampling_session",
            {"session_id": "$session", "sampling_session_seq_id": 9, "model_path": path},
            status=status,
            field="model_path",
        )
        asked = {"tinker_path": path}
        yield Case(f"{what} as checkpoint to ask about", "weights_info", asked, status=status, field="tinker_path")
        yield Case(
            f"{what} as checkpoint to copy",
            "copy_weights",
            {"source_path": path, "session_id": "$session", "model_seq_id": 9},
            status=status,
            field="source_path",
        )
    yield from _addresses()
    yield from _ids()


def _addresses() -> Iterator[Case]:
    """Ways out in the address itself, which lead to no route, to no checkpoint, or to a route of another method."""
    for what, part in (
        ("two dots", "weights/.."),
        ("two encoded dots", "weights/%2e%2e"),
        ("an encoded way out", "weights/%2e%2e%2f%2e%2e%2fx"),
        ("a doubly encoded way out", "weights/%252e%252e%252f"),
        ("an encoded backslash", "weights/..%5cx"),
        ("an encoded NUL", "weights/x%00"),
        ("an encoded line break", "weights/x%0d%0aX-Evil:%201"),
        ("a broken percent sign", "weights/%zz"),
        ("bytes that are no UTF-8", "weights/%ff%fe"),
        ("an encoded lone surrogate", "weights/%ed%a0%80"),
        ("an unknown segment", "elsewhere/x"),
        ("a name of 5,000 characters", "weights/" + "x" * 5000),
    ):
        run = "training_runs/$model/checkpoints"
        refused = (400, 404, 405)
        yield Case(f"{what} in an address to delete", f"{run}/{part}", method="DELETE", status=refused)
        yield Case(
            f"{what} in an address to keep", f"{run}/{part}/ttl", {"ttl_seconds": 3600}, method="PUT", status=refused
        )
        yield Case(f"{what} in an address to publish", f"{run}/{part}/publish", status=refused)
        yield Case(f"{what} in the address of an archive", f"{run}/{part}/archive", method="GET", status=refused)
    for what, path in (
        ("a way out of the API", "../../etc/passwd"),
        ("an encoded way out of the API", "%2e%2e/%2e%2e/etc/passwd"),
        ("an encoded way out behind the file routes", "files/%2e%2e/sessions"),
        ("a file address in a route", "sessions/file:%2f%2f%2fetc%2fpasswd"),
    ):
        yield Case(what, path, method="GET", status=(400, 404))


def _ids() -> Iterator[Case]:
    """Ids that are none."""
    for what, given in (
        ("a way out", "../../x"),
        ("a statement of SQL", "x' OR '1'='1"),
        ("a NUL", "x\x00"),
        ("a line break", "x\nINFO forged"),
        ("300 characters", "x" * 300),
        ("nothing", ""),
        ("a number", 5),
        ("a list", ["x"]),
        ("an object", {"$ne": None}),
    ):
        yield Case(f"{what} as model", "get_info", {"model_id": given}, field="model_id")
        yield Case(f"{what} as future", "retrieve_future", {"request_id": given}, field="request_id")
        yield Case(f"{what} as session", "session_heartbeat", {"session_id": given}, field="session_id")
        yield Case(
            f"{what} as sampler", "asample", {"sampling_session_id": given, "prompt": [5]}, field="sampling_session_id"
        )
    for what, given in (
        ("a statement of SQL", "x'%20OR%20'1'='1"),
        ("a wildcard", "%25"),
        ("a NUL", "x%00"),
        ("no UTF-8", "%ff"),
        ("5,000 characters", "x" * 5000),
    ):
        for route in ("sessions", "training_runs", "samplers"):
            yield Case(f"{what} as id in an address of {route}", f"{route}/{given}", method="GET", status=(400, 404))


MODELS = {
    "a folder of the server": "/etc",
    "a folder relative to the server": "../models/x",
    "a file address": "file:///etc",
    "a web address": "https://127.0.0.1:1/x",
    "an address of a bucket": "s3://bucket/x",
    "another model of the hub": "acme/other",
    "a model of the hub that brings code": "evil/custom-code",
    "a revision": f"{BASE_MODEL}@main",
    "a revision behind a colon": f"{BASE_MODEL}:refs/pr/1",
    "another case": BASE_MODEL.upper(),
    "a slash at the end": f"{BASE_MODEL}/",
    "dots inside": "acme/./tiny",
    "a way out and back": "acme/../acme/tiny",
    "a blank at the end": f"{BASE_MODEL} ",
    "a checkpoint": "$path",
    "a template": "{{7*7}}",
}


def models() -> Iterator[Case]:
    """Base models that are not served: none is looked for anywhere."""
    for what, name in MODELS.items():
        yield Case(
            f"{what} as base model",
            "create_model",
            {"session_id": "$session", "model_seq_id": 9, "base_model": name},
            field="base_model",
        )
        yield Case(
            f"{what} as base model to sample",
            "create_sampling_session",
            {"session_id": "$session", "sampling_session_seq_id": 9, "base_model": name},
            field="base_model",
        )
    for what, name in {**MODELS, "nothing": "", "a NUL": "x\x00"}.items():
        if name == "$path":
            continue  # sampler checkpoints are models there: tests/attacks/catalogue/doors.py
        prompt = {"model": name, "prompt": "x", "max_tokens": 1}
        chat = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        yield Case(f"{what} as model of a completion", "/v1/completions", prompt, status=(400, 404))
        yield Case(f"{what} as model of a chat", "/v1/chat/completions", chat, status=(400, 404))
        yield Case(f"{what} as model of messages", "/v1/messages", chat, status=(400, 404))
    for what, body, field in (
        ("a name that is a path", {"name": "../x", "path": "/nowhere"}, "name"),
        ("a name that is an address", {"name": "https://127.0.0.1/x"}, "name"),
        ("a folder that is not there", {"name": "a/b", "path": "/no/such/folder"}, "path"),
        ("a name with a NUL", {"name": "a/b\x00", "path": "/nowhere"}, "name"),
        ("a path with a NUL", {"name": "a/b", "path": "/nowhere\x00"}, "path"),
        ("a path relative to the server", {"name": "a/b", "path": "../" * 20 + "etc"}, "path"),
        ("an address as path", {"name": "a/b", "path": "http://169.254.169.254/x"}, "path"),
    ):
        yield Case(f"{what}, added as a base model by the operator", "admin/models", body, field=field)
