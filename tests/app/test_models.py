"""Creating models: by hand with JSON, twice, wrongly, and what one is told about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from app.main import create_app
from app.services.base_models import BaseModels
from app.settings import Settings
from tests.app.conftest import BASE, MODEL
from tests.support.api import Api, serving


async def test_a_training_run_by_hand_from_nothing_to_a_sample(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    assert model == f"{session}:train:0"
    before = await api.scores(model)
    await api.train(model, steps=3)
    after = await api.scores(model)
    assert sum(after[0]) > sum(before[0]) + 1
    saved = await api.do("save_weights_for_sampler", model_id=model, path="first")
    assert saved["path"] == f"tinker://{model}/sampler_weights/first"
    answer = await api.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=saved["path"]
    )
    sampler = answer.json()["sampling_session_id"]
    drawn = await api.do(
        "asample",
        sampling_session_id=sampler,
        prompt=[5, 6, 7, 8, 9],
        sampling_params={"max_tokens": 1},
        prompt_logprobs=True,
    )
    assert len(drawn["sequences"][0]["tokens"]) == 1
    trained = after[0]
    scored = drawn["prompt_logprobs"]
    assert scored[0] is None
    assert max(abs(a - b) for a, b in zip(trained, scored[1:], strict=True)) < 1e-3


async def test_the_promise_names_the_model_and_a_repeat_gives_the_same_promise(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    first = (await api.post("create_model", **body)).json()
    again = (await api.post("create_model", **body)).json()
    assert first == again
    assert first["model_id"] == f"{session}:train:0"
    assert (await api.result(first["request_id"])) == {"model_id": f"{session}:train:0", "type": "create_model"}
    assert api.groups.made[0].calls.count("create_adapter") == 1


async def test_the_number_of_a_model_is_used_once(api: Api) -> None:
    session = await api.session()
    await api.model(session)
    answer = await api.post(
        "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 8}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "seq_id_conflict"


async def test_same_seed_same_first_step_and_no_seed_is_drawn(api: Api) -> None:
    session = await api.session()
    one, two = await api.model(session, 0, seed=7), await api.model(session, 1, seed=7)
    other, drawn = await api.model(session, 2, seed=8), await api.model(session, 3, seed=None)
    for model in (one, two, other, drawn):
        await api.train(model)
    scores = [await api.scores(model) for model in (one, two, other, drawn)]
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]
    assert scores[3] not in scores[:3]


async def test_info_tells_base_model_rank_and_a_tokenizer_that_this_client_can_load(
    api: Api, tiny_folder: Path
) -> None:
    model = await api.model(rank=4)
    info = (await api.post("get_info", model_id=model)).json()
    assert info["model_data"] == {"arch": "llama", "model_name": MODEL, "tokenizer_id": str(tiny_folder)}
    assert (info["is_lora"], info["lora_rank"], info["lora_alpha"], info["model_id"]) == (True, 4, 32, model)
    answer = await api.client.post("get_info", json={"model_id": model}, headers={"X-Forwarded-For": "203.0.113.9"})
    assert answer.json()["model_data"]["tokenizer_id"] == MODEL


async def test_info_tells_the_geometry_in_effect_and_the_seed_that_was_drawn(api: Api) -> None:
    async def info(model: str) -> dict[str, object]:
        told: dict[str, object] = (await api.post("get_info", model_id=model)).json()
        return {name: value for name, value in told.items() if name.startswith(("lora_", "train_"))}

    session = await api.session()
    families = {"train_attn": False, "train_mlp": True, "train_unembed": False}
    drawn = await api.model(session, 0, rank=4, seed=None, **families)
    told = await info(drawn)
    seed = told.pop("lora_seed")
    assert told == {"lora_rank": 4, "lora_alpha": 32, **families}
    again = await api.model(session, 1, rank=4, seed=seed, **families)
    assert await info(again) == {**told, "lora_seed": seed}
    for model in (drawn, again):
        await api.train(model)
    assert await api.scores(drawn) == await api.scores(again)
    saved = await api.do("save_weights", model_id=drawn, path="kept")
    loaded = await api.do("load_weights", session_id=session, model_seq_id=2, path=saved["path"], optimizer=False)
    assert await info(loaded["model_id"]) == {**told, "lora_seed": seed}


def test_tokenizer_of_hub_models_and_explicit_ones(tmp_path: Path) -> None:
    def nothing(*_: object) -> object:
        return object()

    sources = {"my/hub": "org/real@v2", "my/local": str(tmp_path), "my/told": str(tmp_path), "built/in": None}
    models = BaseModels(sources, {"my/told": "org/tokens"}, tmp_path / "data", nothing, nothing)  # type: ignore[arg-type]
    assert models.tokenizer_id("my/hub", "127.0.0.1", False) == "org/real"
    assert models.tokenizer_id("my/told", "127.0.0.1", False) == "org/tokens"
    assert models.tokenizer_id("my/local", "127.0.0.1", False) == str(tmp_path)
    assert models.tokenizer_id("my/local", "::1", False) == str(tmp_path)
    assert models.tokenizer_id("my/local", "192.0.2.7", False) == "my/local"
    assert models.tokenizer_id("my/local", "127.0.0.1", True) == "my/local"
    assert models.tokenizer_id("built/in", "127.0.0.1", False) == "built/in"


async def test_names_of_one_source_share_one_copy(tiny_settings: Callable[..., Settings], tiny_folder: Path) -> None:
    settings = tiny_settings(base_model=[f"a/one={tiny_folder}", f"b/two={tiny_folder}"])
    async with serving(settings) as api:
        assert len(api.groups.made) == 1
        for number, name in enumerate(("a/one", "b/two")):
            model = await api.do("create_model", session_id=await api.session(), model_seq_id=number, base_model=name)
            info = (await api.post("get_info", model_id=model["model_id"])).json()
            assert info["model_name"] == name


async def test_a_failed_creation_fails_its_future_and_leaves_no_run(
    tiny_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = tiny_settings(base_model=[f"{MODEL}={tmp_path / 'absent'}"])
    async with serving(settings, ready=False) as api:
        session = await api.session()
        failure = await api.fails(
            "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 4}
        )
        assert failure["category"] == "server"
        assert str(tmp_path) not in str(failure)
        assert (await api.client.get("training_runs")).json()["training_runs"] == []
        assert (await api.client.get(f"training_runs/{session}:train:0")).status_code == 404
        assert (await api.post("get_info", model_id=f"{session}:train:0")).status_code == 404


def test_nothing_runs_before_the_lifespan(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    create_app(settings)
    assert not settings.data_dir.exists()


async def test_no_key_no_model(api: Api) -> None:
    async with httpx.AsyncClient(transport=api.client._transport, base_url=BASE) as stranger:
        answer = await stranger.post("create_model", json={})
    assert answer.status_code == 401
