"""Adapters from elsewhere: brought in whole, with their own numbers, or refused by the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save

from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, serving
from tests.support.leaving import leaves_during_its_write

pytestmark = pytest.mark.asyncio(loop_scope="module")

RANK = 4
Adapter = tuple[bytes, dict[str, Any], list[list[float]]]
"""The file, its configuration, and the logprobs of `DATA` under it, by PEFT itself."""


@pytest.fixture(scope="session")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """An adapter that PEFT made and saved: of all linears but the head, with an alpha of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_folder), config)
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    model.save_pretrained(folder)
    tokens = torch.tensor([DATA[0]["model_input"]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    targets = DATA[0]["loss_fn_inputs"]["target_tokens"]
    scores = [[float(logprobs[place, target]) for place, target in enumerate(targets)]]
    content = json.loads((folder / "adapter_config.json").read_text())
    return (folder / "adapter_model.safetensors").read_bytes(), content, scores


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """One application for all tests here; each begins and ends without checkpoints."""
    data_dir = tmp_path_factory.mktemp("api") / "data"
    async with serving(
        Settings(data_dir=data_dir, base_model=[f"{MODEL}={tiny_folder}"], shutdown_grace=1, max_import_mib=10)
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _clean(api: Api) -> AsyncIterator[None]:
    yield
    for each in (await api.client.get("checkpoints")).json()["checkpoints"]:
        await delete(api, each["tinker_path"])
    assert on_disk(api) == []


async def delete(api: Api, path: str) -> None:
    run, kind, name = path.removeprefix("tinker://").split("/")
    answer = await api.client.delete(f"training_runs/{run}/checkpoints/{kind}/{name}")
    assert answer.status_code == 204, answer.text


async def bring(api: Api, file: bytes | None, config: Any, *, key: str | None = None, **fields: Any) -> httpx.Response:
    """POST the form; None leaves a field out."""
    text = config if isinstance(config, str) else json.dumps(config)
    data = {"name": "mine", "base_model": MODEL, "adapter_config": text, **fields}
    return await api.client.post(
        "checkpoints/import",
        data={name: value for name, value in data.items() if value is not None},
        files={} if file is None else {"adapter_model": ("adapter_model.safetensors", file)},
        headers={} if key is None else {"X-Idempotency-Key": key},
    )


def on_disk(api: Api) -> list[str]:
    return sorted(path.name for path in (api.edge.settings.data_dir / "checkpoints").iterdir())


async def load(api: Api, path: str) -> str:
    outcome = await api.do("load_weights", session_id=await api.session(), model_seq_id=0, path=path, optimizer=False)
    return str(outcome["model_id"])


async def test_an_adapter_keeps_its_numbers_and_is_loaded_trained_sampled_and_saved(api: Api, adapter: Adapter) -> None:
    file, config, scores = adapter
    answer = await bring(api, file, config, user_metadata='{"from": "elsewhere"}', ttl_seconds="7200")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["lora_rank"], told["train_attn"], told["train_mlp"], told["train_unembed"]) == (
        RANK,
        True,
        True,
        False,
    )
    path = told["tinker_path"]
    model = await load(api, path)
    assert np.allclose(await api.scores(model), scores, atol=2e-5)
    await api.train(model)
    again = (await api.do("save_weights", model_id=model, path="later"))["path"]
    assert np.abs(np.array(await api.scores(await load(api, again))) - np.array(scores)).max() > 1e-3
    session = await api.session()
    sampler = await api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    drawn = await api.do(
        "asample",
        sampling_session_id=sampler.json()["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        sampling_params={"max_tokens": 4, "seed": 1},
    )
    assert drawn["sequences"][0]["tokens"]
    [listed] = [
        each for each in (await api.client.get("checkpoints")).json()["checkpoints"] if each["tinker_path"] == path
    ]
    assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("weights/mine", "training")
    assert listed["user_metadata"] == {"from": "elsewhere"}
    assert listed["size_bytes"] == told["size_bytes"]
    assert listed["expires_at"]
    failure = await api.post("load_weights", session_id=session, model_seq_id=9, path=path, optimizer=True)
    assert failure.json()["error"]["code"] == "no_optimizer_state"
    stored = (await api.client.get("billing/usage/checkpoints/current")).json()["data"][0]
    assert (stored["checkpoint_count"], stored["size_bytes"] > told["size_bytes"]) == (2, True)
    events = (await api.client.get("audit")).json()
    assert "checkpoint_imported" in json.dumps(events)


async def test_what_the_server_saved_comes_back_bit_for_bit(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    route = f"training_runs/{model}/checkpoints/weights/x/files"
    offered = (await api.client.get(route)).json()["files"]
    assert [each["name"] for each in offered] == ["adapter_config.json", "adapter_model.safetensors"]
    config, weights = [await api.client.get(each["url"]) for each in offered]
    assert [len(config.content), len(weights.content)] == [each["size_bytes"] for each in offered]
    answer = await bring(api, weights.content, config.text, base_model=None)  # the configuration names it
    assert answer.status_code == 200, answer.text
    assert await api.scores(await load(api, answer.json()["tinker_path"])) == await api.scores(model)
    assert path != answer.json()["tinker_path"]
    with_etag = {"Range": "bytes=10-", "If-Range": weights.headers["etag"]}
    rest = await api.client.get(offered[1]["url"], headers=with_etag)
    assert (rest.status_code, rest.content) == (206, weights.content[10:])


async def test_sixteen_bit_floats_are_widened_exactly(api: Api, adapter: Adapter) -> None:
    from safetensors.torch import load as read

    file, config, _ = adapter
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {name: tensor.to(dtype) for name, tensor in read(file).items()}
        answer = await bring(api, save(narrow), {**config, "lora_alpha": 32}, name=str(dtype)[6:])
        assert answer.status_code == 200, answer.text
        record = answer.json()["tinker_path"].removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        offered = (await api.client.get(f"training_runs/{record}/files")).json()["files"]
        stored = read((await api.client.get(offered[1]["url"])).content)
        assert stored.keys() == narrow.keys()
        assert all(torch.equal(stored[name], narrow[name].float()) for name in narrow)


async def test_the_same_key_gives_the_same_checkpoint(api: Api, adapter: Adapter) -> None:
    file, config, _ = adapter
    first, second = [(await bring(api, file, config, key="k")).json() for _ in range(2)]
    assert first == second
    assert len(on_disk(api)) == 1
    other = await bring(api, file, config, key="k", name="another")
    assert other.json()["error"]["code"] == "seq_id_conflict"
    stranger = await api.other()
    theirs = (await bring(stranger, file, config, key="k")).json()["tinker_path"]
    assert theirs != first["tinker_path"]
    await delete(stranger, theirs)


def changed(file: bytes, change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """The file with its header (parsed) and its data changed."""
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), bytearray(file[8 + length :])
    change(header, data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def tensors(file: bytes, change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    from safetensors.torch import load as read

    held = read(file)
    change(held)
    return save(held)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OTHER = FIRST.replace("lora_A", "lora_B")


def offsets(begin: int, end: int) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda header, data: header[FIRST].update(data_offsets=[begin, end])


def swapped(header: dict[str, Any], data: bytearray) -> None:
    header[FIRST]["data_offsets"] = header[FIRST.replace("q_proj", "o_proj")]["data_offsets"]


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pickle": (lambda file: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins", "is a pickle"),
    "a bin file": (lambda file: b"PK\x03\x04" + bytes(64), "is a pickle"),
    "nothing": (lambda file: b"", "not a safetensors file"),
    "a huge header": (lambda file: (101 << 20).to_bytes(8, "little") + file[8:], "no header"),
    "a header beyond the limit": (
        lambda file: (9 << 20).to_bytes(8, "little") + b" " * (9 << 20) + file[8:],
        "at most 8388608",
    ),
    "no json": (lambda file: (4).to_bytes(8, "little") + b"nope" + file[12:], "strict JSON"),
    "deep json": (lambda file: (20000).to_bytes(8, "little") + b"[" * 20000, "strict JSON"),
    "a list": (lambda file: (2).to_bytes(8, "little") + b"[]", "no JSON object"),
    "a negative offset": (lambda file: changed(file, offsets(-4, 508)), "data_offsets"),
    "offsets in disorder": (lambda file: changed(file, offsets(512, 0)), "data_offsets"),
    "offsets beyond the end": (lambda file: changed(file, offsets(0, 1 << 60)), "data_offsets"),
    "overlapping tensors": (lambda file: changed(file, swapped), "overlaps"),
    "bytes behind the end": (lambda file: file + bytes(8), "behind its last tensor"),
    "a cut file": (lambda file: file[:-64], "its data_offsets are"),
    "an unknown dtype": (lambda file: changed(file, lambda h, d: h[FIRST].update(dtype="F31")), "F31"),
    "float64": (lambda file: tensors(file, lambda t: t.update({FIRST: t[FIRST].double()})), "F64"),
    "integers": (lambda file: tensors(file, lambda t: t.update({FIRST: t[FIRST].to(torch.int32)})), "I32"),
    "a missing tensor": (lambda file: tensors(file, lambda t: t.pop(OTHER)), f"lacks the tensor {OTHER!r}"),
    "an extra tensor": (lambda file: tensors(file, lambda t: t.update(x=torch.zeros(1))), "has a tensor 'x'"),
    "another model's tensor": (
        lambda file: tensors(file, lambda t: t.update({FIRST.replace("layers.0", "layers.9"): t[FIRST].clone()})),
        "layers.9",
    ),
    "another rank": (lambda file: tensors(file, lambda t: t.update({FIRST: torch.zeros(8, 32)})), "[4, 32]"),
    "not a number": (lambda file: tensors(file, lambda t: t[FIRST].view(-1)[7].fill_(torch.nan)), "not finite"),
    "infinity": (lambda file: tensors(file, lambda t: t[OTHER].view(-1)[7].fill_(-torch.inf)), "not finite"),
}


async def test_hostile_files_are_refused_by_name_and_nothing_stays(api: Api, adapter: Adapter) -> None:
    file, config, _ = adapter
    runs = (await api.client.get("training_runs")).json()["cursor"]["total_count"]
    for case, (make, words) in HOSTILE.items():
        answer = await bring(api, make(file), config)
        assert answer.status_code == 400, (case, answer.text)
        error = answer.json()["error"]
        assert error["field"].startswith("adapter_model"), (case, error)
        assert words in answer.json()["detail"], (case, answer.json()["detail"])
        assert on_disk(api) == [], case
    assert (await api.client.get("checkpoints")).json()["checkpoints"] == []
    assert (await api.client.get("training_runs")).json()["cursor"]["total_count"] == runs


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no rank": ({"r": None}, "adapter_config.r"),
    "a huge rank": ({"r": 100_000}, "adapter_config.r"),
    "a rank that is no number": ({"r": True}, "adapter_config.r"),
    "another method": ({"peft_type": "IA3"}, "adapter_config.peft_type"),
    "another task": ({"task_type": "SEQ_CLS"}, "adapter_config.task_type"),
    "a bias": ({"bias": "all"}, "adapter_config.bias"),
    "dora": ({"use_dora": True}, "adapter_config.use_dora"),
    "rslora": ({"use_rslora": True}, "adapter_config.use_rslora"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "adapter_config.modules_to_save"),
    "ranks of their own": ({"rank_pattern": {"q_proj": 8}}, "adapter_config.rank_pattern"),
    "a changed base": ({"init_lora_weights": "pissa"}, "adapter_config.init_lora_weights"),
    "an unknown feature": ({"use_tomorrow": True}, "adapter_config.use_tomorrow"),
    "no alpha": ({"lora_alpha": "much"}, "adapter_config.lora_alpha"),
    "too few targets": ({"target_modules": ["q_proj"]}, "adapter_config.target_modules"),
    "too many targets": ({"target_modules": "all"}, ""),
}


async def test_configurations_beyond_this_server_are_refused_by_key(api: Api, adapter: Adapter) -> None:
    file, config, _ = adapter
    listed = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {**config, "target_modules": listed}
    for case, (change, field) in CONFIGS.items():
        answer = await bring(api, file, {**config, **change}, name=case.replace(" ", "-"))
        assert answer.status_code == (400 if field else 200), (case, answer.text)
        if field:
            assert answer.json()["error"]["field"] == field, (case, answer.text)
    beyond = await bring(api, file, {**config, "target_modules": [*listed, "lm_head"]})
    assert "lm_head" in beyond.json()["detail"]


async def test_broken_forms_are_refused(api: Api, adapter: Adapter) -> None:
    file, config, _ = adapter
    for field, answer in {
        "adapter_model": await bring(api, None, config),
        "name": await bring(api, file, config, name="../up"),
        "adapter_config": await bring(api, file, '{"r": 1, "r": 2}'),
        "base_model": await bring(api, file, config, base_model="acme/other"),
        "surprise": await bring(api, file, config, surprise="x"),
        "ttl_seconds": await bring(api, file, config, ttl_seconds="7"),
        "user_metadata": await bring(api, file, config, user_metadata='{"a": 1}'),
    }.items():
        assert answer.status_code in (400, 415), (field, answer.text)
        if field != "adapter_model":
            assert str(answer.json()["error"]["field"]).startswith(field), (field, answer.text)
    twice = [("adapter_model", ("a", file)), ("adapter_model", ("b", file))]
    answer = await api.client.post("checkpoints/import", data={"name": "x"}, files=twice)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "adapter_model")
    answer = await api.client.post("checkpoints/import", json={"name": "x"})
    assert answer.status_code == 415
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b", b"no boundary", b"--b\r\nContent-Disposition: form-data; name=name\r\n\r\nx\r\n--b"):
        answer = await api.client.post("checkpoints/import", content=body, headers=kind)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unreadable_body"), body
    assert on_disk(api) == []
    assert api.edge.app.state.services.imports._uploading == set()


async def test_size_and_number_of_uploads_are_bounded(
    api: Api, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, config, _ = adapter
    too_large = await bring(api, bytes((10 << 20) + 1), config)
    assert (too_large.status_code, too_large.json()["error"]["field"]) == (413, "adapter_model")
    assert (await bring(api, bytes(12 << 20), config)).status_code == 413
    with api.edge.app.state.services.imports.receiving("another project", 0):
        assert (await bring(api, file, config)).status_code == 200
    monkeypatch.setattr("app.services.imports.MAX_UPLOADS", 0)
    assert (await bring(api, file, config)).status_code == 503
    monkeypatch.undo()
    monkeypatch.setattr("app.services.imports.SPARE_BYTES", 1 << 60)
    answer = await bring(api, file, config)
    assert (answer.status_code, "no room" in answer.json()["detail"]) == (503, True)
    assert len(on_disk(api)) == 1


async def test_a_disk_that_fails_leaves_nothing(api: Api, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    file, config, _ = adapter

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.services.imports.write_folder", full)
    answer = await bring(api, file, config)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "checkpoint_not_written")
    assert on_disk(api) == []
    assert (await api.client.get("checkpoints")).json()["checkpoints"] == []


async def test_an_adapter_that_does_not_fit_into_the_limit_is_refused_and_leaves_nothing(
    api: Api, adapter: Adapter
) -> None:
    file, config, _ = adapter
    first = (await bring(api, file, config)).json()
    run = first["tinker_path"].removeprefix("tinker://").partition("/")[0]
    project = (await api.client.get(f"training_runs/{run}")).json()["model_owner"]
    most = first["size_bytes"] * 2 - 1
    answer = await api.client.put(f"admin/projects/{project}/limits", json={"checkpoint_bytes": most})
    assert answer.status_code == 200, answer.text
    refused = await bring(api, file, config, name="second")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "storage_full")
    assert len(on_disk(api)) == 1
    await api.client.put(f"admin/projects/{project}/limits", json={"checkpoint_bytes": most + 1})
    assert (await bring(api, file, config, name="second")).status_code == 200
    cleared = await api.client.delete(f"admin/projects/{project}/limits")
    assert cleared.status_code in (200, 204), cleared.text


async def test_what_a_key_brings_in_counts_for_that_key(api: Api, adapter: Adapter) -> None:
    file, config, _ = adapter
    bringer = Api(api.edge, api.groups, api.edge.with_key(await api.edge.new_key("bringing", "member")))
    project = (await bringer.client.get("auth/apikey/me")).json()["project_id"]
    listed = (await api.client.get(f"admin/projects/{project}/keys")).json()["keys"]
    [key_id] = [key["key_id"] for key in listed]
    first = (await bring(bringer, file, config)).json()
    size = first["size_bytes"]
    answer = await api.client.put(f"admin/keys/{key_id}/limits", json={"checkpoint_bytes": 2 * size - 1})
    assert answer.status_code == 200, answer.text
    [limit] = [each for each in (await bringer.client.get("limits")).json()["limits"] if each["source"] == "key"]
    assert (limit["used"], limit["remaining"]) == (size, size - 1)
    refused = await bring(bringer, file, config, name="second")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "storage_full")
    assert f"checkpoint_bytes of this key is {2 * size - 1:,}" in refused.json()["detail"]
    assert len(on_disk(api)) == 1
    await delete(bringer, first["tinker_path"])


async def test_an_adapter_whose_client_leaves_while_it_is_recorded_is_there_with_its_files(
    api: Api, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, config, _ = adapter
    await leaves_during_its_write(api, bring(api, file, config, key="left"), monkeypatch)
    again = await bring(api, file, config, key="left")
    assert again.status_code == 200, again.text
    assert len(on_disk(api)) == 1
    await load(api, again.json()["tinker_path"])
