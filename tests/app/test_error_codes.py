"""Codes that clients act on, from the wire: what docs/errors.md says of them, on one application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Unavailable
from schemas.proto import tinker_public_pb2 as pb
from store.artifact_place import PLACE_FILE, open_artifacts
from store.lock import FolderLock
from store.read_only import open_database
from tests.app.conftest import MODEL
from tests.app.test_custom_losses import NODES, loss
from tests.support.api import DATA, Api

PROTO = {"Content-Type": "application/x-protobuf"}


async def test_codes_of_refused_requests(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    sampler = (await api.do("save_weights_for_sampler", model_id=model, path="s"))["path"]
    newer = pb.ForwardBackwardRequest(model_id=model, loss_fn="cross_entropy").SerializeToString() + b"\xf8\x7f\x01"
    nodes = [{**node, "target": "os.system"} if node["name"] == "mul" else node for node in NODES]
    bodies: list[tuple[str, bytes, dict[str, str], int, str]] = [
        ("forward_backward", b"\xff\xfe\xfd", PROTO, 400, "invalid_protobuf"),
        ("forward_backward", newer, PROTO, 400, "unknown_field"),
        ("forward_backward", b"garbage", {**PROTO, "Content-Encoding": "zstd"}, 400, "unreadable_body"),
        ("forward_backward", b"\x0a\x05abc", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    ]
    for route, body, headers, status, code in bodies:
        answer = await api.client.post(route, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    load = {"session_id": session, "model_seq_id": 9}
    absent = {"session_id": session, "sampling_session_seq_id": 0}
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("forward_backward", {"model_id": model, "data": DATA, "loss_fn": "no_such"}, "unknown_loss"),
        ("create_sampling_session", {**absent, "base_model": "acme/absent"}, "unknown_base_model"),
        ("load_weights", {**load, "path": sampler, "optimizer": True}, "no_optimizer_state"),
        ("create_custom_loss", loss(session, graph={"format": 1, "nodes": nodes}), "invalid_custom_loss"),
    ]
    for route, fields, code in requests:
        answer = await api.post(route, **fields)
        assert answer.json()["error"]["code"] == code, (route, answer.text)
    answer = await api.client.delete(f"training_runs/{model}/checkpoints/elsewhere/s")
    assert answer.json()["error"]["code"] == "invalid_path", answer.text
    chat = {"model": MODEL, "prompt": "x", "no_such_parameter": 1}
    answer = await api.client.post("http://localhost/v1/completions", json=chat)
    assert answer.json()["error"]["code"] == "unsupported_parameter", answer.text


def test_codes_of_folders_that_cannot_be_used(tmp_path: Path) -> None:
    def code_of(use: Any) -> str:
        with pytest.raises(Unavailable) as refused:
            use()
        return refused.value.code

    def opened() -> None:
        with open_database(tmp_path):
            pass

    assert code_of(opened) == "no_data_folder"
    (tmp_path / "pepper").write_bytes(b"x")
    assert code_of(opened) == "database_elsewhere"
    lock = FolderLock(tmp_path)
    assert code_of(lambda: FolderLock(tmp_path)) == "data_folder_in_use"
    lock.release()
    (tmp_path / PLACE_FILE).write_text("s3://bucket/prefix\n")
    place: dict[str, Any] = {"endpoint": None, "region": None, "timeout": 1.0, "cache_bytes": 1}
    assert code_of(lambda: open_artifacts(tmp_path, None, **place)) == "artifacts_elsewhere"
