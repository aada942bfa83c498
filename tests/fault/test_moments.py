"""A power failure at any moment: copies of the data folder, taken while clients train, open, and a server goes on from
them to the very bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault import moments
from tests.fault.harness import Service, serving
from tests.support.api import serving as in_process
from tests.support.server import TINSMITH

SEEDS = (1, 2)


async def _take(service: Service, folder: Path, count: int, kept: set[int], longest_pause: float) -> list[Path]:
    """Copies of `count` random moments, all of which open; those that are `kept` stay."""
    chance, copies = random.Random(5), []
    for number in range(count):
        await asyncio.sleep(chance.random() * longest_pause)
        copy = folder / f"moment {number}"
        with moments.frozen(service):
            moments.copy_moment(service.data_dir, copy)
        assert moments.problems(copy) == [], copy
        if number in kept:
            copies.append(copy)
            continue
        await moments.opens(copy)
        assert moments.problems(copy) == [], copy
        shutil.rmtree(copy)
    return copies


def _back_up(service: Service, folder: Path, count: int) -> list[Path]:
    """Backups while clients train."""
    copies = [folder / f"backup {number}" for number in range(count)]
    for copy in copies:
        command = [TINSMITH, "backup", copy, "--data-dir", service.data_dir]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    return copies


async def _prove(folder: Path, base: Path, *, count: int, resumed: int, backups: int, longest_pause: float) -> None:
    chance = random.Random(6)
    with serving(folder / "service", base, *moments.SNAPSHOTS) as service:
        clients = [moments.Client(service, seed) for seed in SEEDS]
        for client in clients:
            client.start()
        kept = set(chance.sample(range(count), resumed))
        copies = await _take(service, folder, count, kept, longest_pause)
        copies += _back_up(service, folder, backups)
        for client in clients:
            client.stop()
        assert service.starts == 1
    programs = {client.model_id: client.seed for client in clients}
    found = [await moments.finish(copy, base, programs) for copy in copies]
    settings = moments.settings_for(folder / "undisturbed", base)
    async with in_process(settings) as api:
        for seed in SEEDS:
            wanted = {states[seed][0] for states in found}
            expected = await moments.undisturbed(api, settings.data_dir, seed, wanted)
            for copy, states in zip(copies, found, strict=True):
                last, state = states[seed]
                assert state == expected[last], (copy, seed, last)
            assert len(wanted) > 1 or len(copies) == 1, "all copies are of the same moment"


@pytest.mark.exhaustive
async def test_copies_of_a_few_moments_open_and_one_goes_on(tmp_path: Path, base: Path) -> None:
    await _prove(tmp_path, base, count=8, resumed=1, backups=0, longest_pause=0.4)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
async def test_copies_of_two_hundred_moments_open_and_a_dozen_go_on(
    tmp_path: Path, base: Path, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    await _prove(tmp_path, base, count=200, resumed=12, backups=3, longest_pause=0.08)
    record_property("seconds", round(time.monotonic() - began))
