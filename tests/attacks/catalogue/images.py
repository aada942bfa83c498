"""Images and addresses: this server reads text only, and fetches nothing that a caller names."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from tests.attacks.catalogue.case import BASE_MODEL, Case


def _png(width: int, height: int, *, cut: int | None = None) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b""))[:cut]


IMAGES = {
    "one pixel": ("png", _png(1, 1)),
    "a header of ten billion pixels": ("png", _png(100_000, 100_000)),
    "a picture that is cut off": ("png", _png(1, 1, cut=20)),
    "an animation": ("gif", b"GIF89a\x01\0\x01\0\0\0\0!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0;"),
    "a drawing with a script": ("svg", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"),
    "a drawing that reads a file": ("svg", b"<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><svg>&e;</svg>"),
    "a picture that is a page too": ("gif", b"GIF89a/*<script>*/=alert(1)//;"),
    "a picture with a place in its data": ("jpeg", b"\xff\xd8\xff\xe1\0\x16Exif\0\0MM\0*\0\0\0\x08\0\0\xff\xd9"),
    "a picture of another format than it says": ("webp", _png(1, 1)),
    "nothing": ("png", b""),
}

ADDRESSES = {
    "the address of a cloud's credentials": "http://169.254.169.254/latest/meta-data/",
    "the same address as one number": "http://2852039166/",
    "the same address in IPv6": "http://[::ffff:a9fe:a9fe]/",
    "this machine": "http://127.0.0.1:1/x.png",
    "this machine by name": "http://localhost:1/x.png",
    "this machine in IPv6": "http://[::1]:1/x.png",
    "this machine in hexadecimal": "http://0x7f000001:1/",
    "this machine without a number": "http://0:1/",
    "a file": "file:///etc/passwd",
    "a host that redirects": "http://localhost:1/redirect?to=http://169.254.169.254/",
    "a name with a user": "http://example.com@127.0.0.1:1/",
    "another protocol": "gopher://127.0.0.1:1/_x",
    "data": "data:image/png;base64,iVBORw0KGgo=",
}


def _chunks() -> Iterator[tuple[str, dict[str, Any]]]:
    for what, (kind, data) in IMAGES.items():
        yield what, {"type": "image", "format": kind, "data": base64.b64encode(data).decode()}
    for what, address in ADDRESSES.items():
        yield what, {"type": "image_asset_pointer", "format": "png", "location": address}


def cases() -> Iterator[Case]:
    """In training, in samples, and in the two other protocols."""
    for what, chunk in _chunks():
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": [6]}}
        body = {"model_id": "$model", "data": [datum], "loss_fn": "cross_entropy"}
        yield Case(f"{what} in training", "forward_backward", body, field="data[0].model_input.chunks[0]", says="text")
        sample = {"sampling_session_id": "$sampler", "prompt": {"chunks": [chunk]}}
        yield Case(f"{what} in a prompt", "asample", sample, field="prompt.chunks[0]", says="text-only")
    for what, address in ADDRESSES.items():
        part = {"type": "image_url", "image_url": {"url": address}}
        chat = {"model": BASE_MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
        yield Case(f"{what} as image of a chat", "/v1/chat/completions", chat, field="messages[0].content")
        source = {"type": "image", "source": {"type": "url", "url": address}}
        messages = {**chat, "messages": [{"role": "user", "content": [source]}]}
        yield Case(f"{what} as image of messages", "/v1/messages", messages, says="'text'")
        document = {"type": "document", "source": {"type": "url", "url": address}}
        messages = {**chat, "messages": [{"role": "user", "content": [document]}]}
        yield Case(f"{what} as document of messages", "/v1/messages", messages, says="'text'")
        yield Case(
            f"{what} as a server of tools", "/v1/messages",
            {**chat, "messages": [{"role": "user", "content": "x"}], "mcp_servers": [{"type": "url", "url": address}]},
            says="accepted are",
        )  # fmt: skip
