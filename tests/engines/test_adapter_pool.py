"""Adapters beyond the budget: in a file and back bit for bit, in order of use, never lost, refused by numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from engines.torch_engine.adapter import AdapterState, Gradient, step_many
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.idle_file import DamagedFile, read_state, write_state
from schemas.errors import ADAPTERS_BUSY, AlreadyExists, EngineFailure, ModelLost, NotFound, OutOfMemory, TinsmithError
from schemas.operations import OptimStepParams
from tests.engines.adapter_states import collect, content, make_state, same

SIZE = make_state().size_bytes
FAST = OptimStepParams(lr=0.01)
CPU = torch.device("cpu")


def trained(seed: int = 0, **shape: Any) -> AdapterState:
    state = make_state(seed, **shape)
    collect(state, seed)
    state.step(None, 0.0)
    return state


def pool_of(folder: Path | None, names: str, room: float = 2.0) -> AdapterPool:
    """A pool with room for so many adapters, and an adapter per letter, added in that order."""
    pool = AdapterPool(int(room * SIZE), folder)
    for seed, name in enumerate(names):
        pool.add(name, trained(seed))
    return pool


def resident(pool: AdapterPool) -> str:
    return "".join(pool._resident)


# -- the file --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
@pytest.mark.parametrize("gradient", [None, (1, None), (3, (2, 5)), (3, (0, None))])
def test_a_state_comes_back_bit_for_bit_with_its_pending_gradient(
    tmp_path: Path, optimizer: Any, gradient: Any
) -> None:
    state = trained(optimizer=optimizer)
    state.flat[:3] = torch.tensor([-0.0, 1e-42, 3e38])
    if gradient is not None:
        passes, poisoned = gradient
        collect(state, 9)
        state.gradient = Gradient(state.gradient.flat, passes, poisoned)
        assert state.gradient.flat is not None
        state.gradient.flat[:2] = torch.tensor([torch.nan, -torch.inf])
    write_state(tmp_path / "f", state)
    back = read_state(tmp_path / "f", CPU)
    assert same(content(state), content(back))
    for name in ("spec", "optimizer_type", "steps"):
        assert getattr(back, name) == getattr(state, name)
    assert back.weights.scaling == state.weights.scaling
    assert list(back.weights.pairs) == list(state.weights.pairs)
    assert (back.gradient.passes, back.gradient.poisoned) == (state.gradient.passes, state.gradient.poisoned)
    assert back.weights.tensors[0].data_ptr() == back.flat.data_ptr()


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    state = trained()
    collect(state, 3)
    write_state(tmp_path / "f", state)
    with safe_open(tmp_path / "f", "pt") as file:
        assert set(file.keys()) == {"weights", "exp_avg", "exp_avg_sq", "gradient"}
        assert torch.equal(file.get_tensor("exp_avg"), state.moments["exp_avg"])
        assert torch.equal(file.get_tensor("weights"), state.flat)


def test_any_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_state(path, trained())
    whole = path.read_bytes()
    vectors = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, 900, 7), *range(900, len(whole), 977), len(whole) - 1]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 0x10
        path.write_bytes(flipped)
        try:
            back = read_state(path, CPU)
        except DamagedFile:
            continue
        # Offsets and padding of the header, which other readers need: the vectors are read in their order.
        assert place < vectors
        assert same(content(back), content(trained()))
    for content_of in (b"", b"12", whole[:50], whole[:-1], whole + b"x", b"\xff" * 100):
        path.write_bytes(content_of)
        with pytest.raises(DamagedFile):
            read_state(path, CPU)


# -- who leaves ------------------------------------------------------------------------------------------------------
def test_the_least_recently_used_leaves_first_and_comes_back(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "abc", room=3)
    assert (resident(pool), list(tmp_path.iterdir())) == ("abc", [])
    kept = content(pool.get("b"))
    pool.get("a")
    pool.add("d", trained(3))
    assert resident(pool) == "bad"
    assert "c" in pool
    pool.add("e", trained(4))
    assert resident(pool) == "ade"
    assert same(content(pool.get("b")), kept)
    assert resident(pool) == "deb"
    assert len(list(tmp_path.iterdir())) == 2
    for name in "abcde":
        pool.get(name)
        assert len(list(tmp_path.iterdir())) == 2
        assert pool.resident_bytes <= 3 * SIZE
    for name in "abcde":
        pool.remove(name)
    pool.remove("never there")
    assert (list(tmp_path.iterdir()), pool.resident_bytes, "a" in pool) == ([], 0, False)
    with pytest.raises(NotFound):
        pool.get("a")


def test_the_budget_is_met_to_the_byte(tmp_path: Path) -> None:
    assert resident(pool_of(tmp_path / "exact", "ab", room=2)) == "ab"
    pool = AdapterPool(2 * SIZE - 1, tmp_path / "less")
    for name in "ab":
        pool.add(name, trained())
    assert (resident(pool), pool.resident_bytes) == ("b", SIZE)
    pool.make_room(SIZE - 1)
    assert resident(pool) == "b"
    pool.make_room(SIZE)
    assert resident(pool) == ""
    unlimited = AdapterPool(None, None)
    for name in "abcdefgh":
        unlimited.add(name, trained())
    unlimited.make_room(1 << 60)
    assert unlimited.resident_bytes == 8 * SIZE


def test_one_that_is_larger_than_everything_is_refused_by_numbers_before_it_is_made(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "ab")
    for check in (pool.check_size, pool.make_room):
        with pytest.raises(OutOfMemory, match=r"3\.0 MiB.*together may take 0\.0 MiB") as caught:
            check(3 << 20)
        assert caught.value.code == "adapter_too_large"
    big = make_state(width=500)
    with pytest.raises(OutOfMemory):
        pool.add("c", big)
    assert (resident(pool), "c" in pool, big.parameters > 0) == ("ab", False, True)


def test_pinned_ones_stay_until_the_last_pin_goes(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "abc")
    pinned = [pool.pin("b"), pool.pin("b"), pool.pin("c")]
    assert pinned[0] is pinned[1]
    with pytest.raises(OutOfMemory, match="no room for an adapter of") as caught:
        pool.get("a")
    assert caught.value.code == ADAPTERS_BUSY
    pool.unpin("b")
    with pytest.raises(OutOfMemory):
        pool.add("d", trained())
    with pytest.raises(EngineFailure, match="in use"):
        pool.replace("b", trained())
    assert resident(pool) == "bc"
    pool.unpin("b")
    pool.get("b")
    pool.get("a")
    assert resident(pool) == "ca"
    pool.remove("c")
    pool.unpin("c")
    pool.add("c", trained())
    pool.get("b")
    assert resident(pool) == "cb"


def test_nobody_leaves_for_one_that_gets_no_room_anyway(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "abc", room=3)
    pool.pin("b")
    pool.pin("c")
    with pytest.raises(OutOfMemory):
        pool.make_room(2 * SIZE)
    assert (resident(pool), list(tmp_path.iterdir())) == ("abc", [])


def test_one_with_an_open_stage_stays(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "ab")
    pool.get("a").stage = Gradient()
    pool.get("b")
    pool.add("c", trained())
    assert resident(pool) == "ac"


def test_one_that_left_memory_cannot_be_stepped_behind_the_pools_back(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "ab")
    stale = pool.get("a")
    pool.get("b")
    pool.add("c", trained())
    with pytest.raises(ModelLost, match="left memory"):
        stale.step(FAST, 0.0)
    assert pool.get("a").step(FAST, 0.0)["update_norm"] > 0


def test_replacing_keeps_one_adapter_and_no_file(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "abc")
    new = trained(9)
    for name in "ac":
        pool.replace(name, new)
        assert pool.get(name) is new
        assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(NotFound):
        pool.replace("x", new)
    with pytest.raises(AlreadyExists):
        pool.add("b", new)
    with pytest.raises(OutOfMemory):
        pool.replace("c", make_state(width=500))
    assert pool.get("c") is new


def test_what_is_needed_together_comes_in_turns_of_as_many_as_fit(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "abcde")
    turns = []
    for taken in pool.in_turns(["a", "b", "x", "c", "e", "d"]):
        assert set(resident(pool)) >= {name for name, state in taken.items() if isinstance(state, AdapterState)}
        turns.append({name: type(state) for name, state in taken.items()})
    kinds = [(name, kind) for turn in turns for name, kind in turn.items()]
    assert kinds == [(name, NotFound if name == "x" else AdapterState) for name in "abxced"]
    assert [len(turn) for turn in turns] == [3, 2, 1]
    assert not pool._pins
    pool.pin("a")
    pool.pin("b")
    found = [state for taken in pool.in_turns(["a", "c"]) for state in taken.values()]
    assert isinstance(found[0], AdapterState)
    assert isinstance(found[1], OutOfMemory)


# -- trouble ---------------------------------------------------------------------------------------------------------
def test_what_an_earlier_process_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    pool_of(tmp_path, "abcd")
    (tmp_path / "idle-half.tmp").write_bytes(b"x")
    (tmp_path / "somebody's").write_text("own")
    assert len(list(tmp_path.iterdir())) == 4
    pool = AdapterPool(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's"]
    assert "a" not in pool


def test_without_a_folder_the_newcomer_is_refused() -> None:
    pool = pool_of(None, "ab")
    with pytest.raises(OutOfMemory):
        pool.add("c", trained())
    assert resident(pool) == "ab"


def test_a_disk_that_cannot_be_written_costs_the_newcomer_only(tmp_path: Path) -> None:
    folder = tmp_path / "idle"
    folder.write_text("a file in the place of the folder")
    pool = pool_of(folder, "ab")
    kept = content(pool.get("a"))
    with pytest.raises(OutOfMemory, match=r"MiB are taken, and idle ones cannot be put aside: File exists") as caught:
        pool.add("c", trained())
    assert str(tmp_path) not in caught.value.message
    assert caught.value.code == "idle_disk"
    assert (resident(pool), "c" in pool) == ("ba", False)
    assert same(content(pool.get("a")), kept)
    folder.unlink()
    pool.add("c", trained())
    assert same(content(pool.get("a")), kept)


FULL_DISK = """
import resource, sys
from pathlib import Path
from schemas.errors import OutOfMemory
from tests.engines.adapter_states import content, same
from tests.engines.test_adapter_pool import SIZE, pool_of, trained
folder = Path(sys.argv[1])
pool = pool_of(folder, "ab")
kept = content(pool.get("a"))
resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, resource.RLIM_INFINITY))
try:
    pool.add("c", trained())
except OutOfMemory as error:
    assert "File too large" in error.message, error.message
else:
    raise SystemExit("not refused")
assert list(folder.iterdir()) == []
assert same(content(pool.get("a")), kept)
assert "c" not in pool
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
pool.add("c", trained())
assert same(content(pool.get("a")), kept)
"""


def test_a_disk_that_fills_up_midway_leaves_no_half_file_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "idle")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "damage",
    [lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\x99"), lambda p: p.unlink(), lambda p: os.truncate(p, 99)],
)
def test_a_damaged_file_costs_its_adapter_only(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    pool = pool_of(tmp_path, "abc")
    kept = content(pool.get("c"))
    (path,) = tmp_path.iterdir()
    damage(path)
    for _ in range(2):
        with pytest.raises(ModelLost, match="read back") as caught:
            pool.get("a")
        assert str(tmp_path) not in caught.value.message
    assert same(content(pool.get("c")), kept)
    assert pool.get("b").step(FAST, 0.0)
    pool.remove("a")
    pool.add("a", trained())
    assert pool.get("a").step(FAST, 0.0)


def test_one_that_broke_off_says_so_and_frees_its_memory(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "ab")
    pool.get("a").retire("a step of this model broke off halfway")
    assert pool.resident_bytes == SIZE
    with pytest.raises(ModelLost, match="halfway"):
        pool.get("a")
    pool.add("c", trained())
    pool.add("d", trained())
    assert "a" in pool
    pool.remove("a")
    assert "a" not in pool


# -- training --------------------------------------------------------------------------------------------------------
def test_many_adapters_train_alike_with_and_without_a_budget(tmp_path: Path) -> None:
    names = "abcdefghij"
    free, tight = AdapterPool(None, None), AdapterPool(int(3.5 * SIZE), tmp_path)
    for seed, name in enumerate(names):
        for pool in (free, tight):
            optimizer: Any = "dimuon" if seed % 4 == 3 else "adamw"
            pool.add(name, make_state(seed, optimizer=optimizer))
    for turn in range(6):
        order = sorted(names, key=lambda name: (hash((turn, ord(name))), name))
        for pool in (free, tight):
            for name in order:
                collect(pool.get(name), turn + ord(name))
            metrics: dict[str, dict[str, float] | TinsmithError] = {}
            for taken in pool.in_turns(order[turn % 3 :]):
                states = [state for state in taken.values() if isinstance(state, AdapterState)]
                assert len(states) == len(taken)
                outcomes = step_many([(state, None, 1.0) for state in states])
                metrics |= dict(zip(taken, outcomes, strict=True))
            assert all(isinstance(found, dict) for found in metrics.values())
    assert tight.resident_bytes <= 3.5 * SIZE
    for name in names:
        assert same(content(free.get(name)), content(tight.get(name)))
        assert free.get(name).gradient.passes == tight.get(name).gradient.passes
