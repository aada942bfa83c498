"""Signed addresses that were altered, ranges that do not fit, and archives that somebody wants to upload."""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks.catalogue.case import Case

TARGETS = ("$export", "$archive")


def cases() -> Iterator[Case]:
    """Without a key, as whoever holds an address."""
    for address in TARGETS:
        what = "a file" if address == "$export" else "an archive"
        for how, add in (
            ("another signature", "0"),
            ("the signature twice", "&signature=0"),
            ("another expiry", "&expires=99999999999"),
            ("a negative expiry", "&expires=-1"),
            ("an expiry that is no number", "&expires=never"),
            ("an expiry beyond 64 bits", "&expires=" + "9" * 30),
            ("a signature with a NUL", "%00"),
            ("a signature that is no ASCII", "%c3%a9"),
            ("a signature of 5,000 characters", "0" * 5000),
        ):
            yield Case(f"{how} on the address of {what}", f"{address}{add}", method="GET", key=False, status=(400, 404))
        yield Case(f"posting to {what}", address, method="POST", key=False, status=(405,))
        yield Case(f"deleting {what} by its address", address, method="DELETE", key=False, status=(405,))
    for path in (
        "files/x/tinsmith.json",
        "files/x/..%2f..%2ftinsmith.db",
        "files/..%2f/dev_key",
        "files/%2e%2e/dev_key",
        "files/x/adapter_model.safetensors",
        "files/sessions/$session/trace.json",
    ):
        for query in ("", "?expires=99999999999&signature=0"):
            yield Case(f"{path}{query[:9]} without a genuine signature", f"{path}{query}", method="GET", key=False,
                       status=(400, 401, 404, 405))  # fmt: skip
    for how, value in (
        ("beyond the end", "bytes=999999999-"),
        ("of no bytes", "bytes=5-4"),
        ("before the beginning", "bytes=-0"),
        ("of another unit", "pages=1-2"),
        ("that is none", "bytes=x-y"),
        ("of 5,000 digits", "bytes=" + "9" * 5000 + "-"),
        ("without an end or a beginning", "bytes=-"),
        ("a thousand times", "bytes=" + ",".join(["0-0"] * 1000)),
        ("that overlaps a hundred times", "bytes=" + ",".join(f"{i}-" for i in range(100))),
    ):
        yield Case(f"a range {how}", "$export", method="GET", key=False, headers={"Range": value},
                   status=(200, 206, 400, 416))  # fmt: skip
    for kind in ("application/x-tar", "application/zip", "application/gzip", "application/octet-stream"):
        for route in ("load_weights", "save_weights_external", "forward_backward", "create_model"):
            yield Case(f"{kind} to {route}", route, content=b"PK\x03\x04../../x", headers={"Content-Type": kind},
                       status=(415,))  # fmt: skip
    yield Case("a form with a file", "load_weights",
               content=b'--x\r\nContent-Disposition: form-data; name="f"; filename="../../x"\r\n\r\nabc\r\n--x--\r\n',
               headers={"Content-Type": "multipart/form-data; boundary=x"}, status=(415,))  # fmt: skip
    yield Case("an archive put in the place of one", "training_runs/$model/checkpoints/weights/kept/archive",
               content=b"x", method="PUT", status=(405,))  # fmt: skip
    recipients = (
        ["age1" + "x" * 58],
        ["ssh-rsa AAAA"],
        ["/etc/passwd"],
        ["-R", "file"],
        ["x" * 20_000],
        ["a\nb"],
        "age1",
        [5],
    )
    for each in recipients:
        body = {"model_id": "$model", "path": "enc", "age_encryption_recipients": each}
        yield Case(f"{str(each)[:30]} as recipients of an export", "save_weights_external", body,
                   field="age_encryption_recipients")  # fmt: skip
