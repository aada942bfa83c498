"""Engines with an environment of their own, started as the server starts them: ranks there, everything else here.

Runs in the server's environment; an engine whose environment is missing is skipped, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.base_models import DEFAULT_MODEL, built_in_folder
from engines.environments import check_in, environment_python
from engines.registry import ENGINES, capabilities
from schemas.errors import Unavailable
from schemas.operations import LoraSpec
from tests.engines.batches import make_batch
from tests.engines.gang import Gang
from tests.engines.test_fsdp_ranks import test_the_gradient_is_that_of_transformers_and_peft as gradient_is_that_of_peft
from tests.support.reference import Reference
from workers.spec import WorkerSpec

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

OWN = [name for name in ENGINES if capabilities(name).environment is not None]


@pytest.fixture(params=OWN)
def engine(request: pytest.FixtureRequest) -> str:
    """One that can run."""
    name = str(request.param)
    try:
        check_in(environment_python(capabilities(name).environment or name), name)
    except Unavailable as error:
        pytest.skip(f"engine {name} was NOT tested: {error.message} ({error.hint})")
    return name


def start(engine: str, model: str, source: str | None, data_dir: Path) -> Gang:
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "ranks": 2, "builder": "tests.engines.gang:build"}
    return Gang(WorkerSpec(model, source, str(data_dir), engine=engine, **options))


def test_two_ranks_of_it_compute_what_peft_does_here(engine: str, tied_folder: Path, tmp_path: Path) -> None:
    """With the versions of transformers and PEFT that the server has."""
    two = start(engine, "tiny", str(tied_folder), tmp_path / "data")
    try:
        gradient_is_that_of_peft(two, tied_folder, tmp_path, "a", (True, True, True))
    finally:
        two.close()


@pytest.mark.real_model
def test_the_default_model(engine: str, tmp_path: Path) -> None:
    """It is converted with the server's packages, for the environment has none for that."""
    two = start(engine, DEFAULT_MODEL, None, tmp_path / "data")
    try:
        two.call("create_adapter", "a", LoraSpec(8, seed=3))
        batch = make_batch("a", lengths=(30, 7, 48))
        two.call("forward_backward", batch)
        two.call("optimizer_step", "a")
        two.call("save_checkpoint", "a", str(tmp_path / "saved"), False)
        found = two.call("forward_backward", batch)
        norm = two.call("optimizer_step", "a").metrics["grad_norm"]
    finally:
        two.close()
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    adapter = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    reference = Reference(built_in_folder(tmp_path / "data"), config, adapter)
    examples = [
        {"tokens": torch.from_numpy(d.tokens), **{k: torch.from_numpy(v) for k, v in d.inputs.items()}}
        for d in batch.datums
    ]
    for ours, theirs in zip(found.logprobs, reference.forward_backward(examples, "cross_entropy"), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    expected = sum(float(each.double().square().sum()) for each in reference.gradient().values()) ** 0.5
    assert norm == pytest.approx(expected, rel=1e-4)
