"""What a server needs of the machine it would run on: room on the disk, a free port, memory, versions.

Asks and starts nothing but one short process, which knows the computing library. Not responsible for the data folder
(`app/doctor.py`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.checks import Check, megabytes
from app.exposure import exposed
from app.serve import cannot_listen, listen
from app.settings import BaseModelSource, Settings, SettingsError
from app.tls import server_context
from engines.base_models import built_in_folder
from engines.environments import check_in, engine_interpreter, with_project
from engines.machine import compute_threads, machine_memory, usable_cores
from schemas.errors import TinsmithError

LITTLE_ROOM, TOO_LITTLE_ROOM = 2 << 30, 100 << 20
"""Free bytes on the disk below which there is a warning, and below which a server should not be started."""
LITTLE_MEMORY = 1 << 30
FEW_FILES = 4096
GPU_DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("tinsmith", "torch", "transformers", "safetensors", "sqlalchemy", "aiosqlite")
SDK = "tinker"
CLIENTS = ("openai", "anthropic")
SDK_VERSIONS = ((0, 16), (0, 38))
"""The oldest and the newest version of the SDK that are tested (docs/compatibility.md)."""
PLAN_SECONDS = 120
_HEADER_LIMIT = 100 << 20
_WIDTH = {"float32": 4, "bfloat16": 2}


def check_machine(settings: Settings, running: str | None) -> list[Check]:
    """Every check of the machine. `running`: the process id of the server on this data folder, if there is one."""
    engine, python = _engine(settings)
    plan = _plan(settings, python)
    return [
        _disk(settings.data_dir),
        _port(settings, running),
        _exposure(settings),
        engine,
        _compute(settings, plan),
        _gpus(plan),
        _main_memory(running),
        _open_files(),
        *(_memory(settings, model, plan, running) for model in settings.base_model),
        _versions(),
    ]


def _disk(data_dir: Path) -> Check:
    place = next((folder for folder in (data_dir, *data_dir.parents) if folder.exists()), Path("/"))
    total, _, free = shutil.disk_usage(place)
    inodes = os.statvfs(place).f_favail
    detail = f"{megabytes(free)} free of {megabytes(total)}"
    if not os.access(place, os.W_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        return Check("disk", "fail", f"{detail}, but the folder cannot be written")
    if free < TOO_LITTLE_ROOM or (inodes == 0 and os.statvfs(place).f_files):
        return Check("disk", "fail", f"{detail}: too little to serve")
    return Check("disk", "warn" if free < LITTLE_ROOM else "ok", detail)


def _port(settings: Settings, running: str | None) -> Check:
    try:
        listen(settings.host, settings.port).close()
    except OSError as error:
        if running is not None:
            return Check("port", "ok", f"{settings.host}:{settings.port} is in use, as is this data folder")
        return Check("port", "fail", "; ".join(cannot_listen(settings, error)))
    return Check("port", "ok", f"{settings.host}:{settings.port} is free")


def _exposure(settings: Settings) -> Check:
    """Whether what clients send is encrypted wherever others could read it."""
    try:
        server_context(settings)
    except SettingsError as error:
        return Check("encryption", "fail", str(error))
    warning = exposed(settings)
    if warning is not None:
        return Check("encryption", "warn", warning)
    if settings.tls_cert is not None:
        return Check("encryption", "ok", f"TLS, with the certificate {settings.tls_cert}")
    if settings.trusted_proxies:
        return Check("encryption", "ok", f"by the proxies {', '.join(settings.trusted_proxies)}")
    return Check("encryption", "ok", "nothing leaves this machine")


def _engine(settings: Settings) -> tuple[Check, str]:
    """Whether the engine can run, and the interpreter that it would run in; one without an environment of its own, or
    one that cannot run, counts with the server's."""
    try:
        python = engine_interpreter(settings.engine, settings.engine_python)
        if python is None:
            return Check("engine", "ok", f"{settings.engine}, in the server's own environment"), sys.executable
        found = ", ".join(f"{name} {number}" for name, number in check_in(python, settings.engine).items())
        return Check("engine", "ok", f"{settings.engine}, in an environment of its own: {found}"), str(python)
    except TinsmithError as error:
        return Check("engine", "fail", error.message, () if error.hint is None else (error.hint,)), sys.executable


def _plan(settings: Settings, python: str) -> dict[str, Any]:
    """What a worker would compute on (`engines.torch_engine.plan`), or `{"error"}`."""
    command = [python, "-m", "engines.torch_engine.plan", settings.device, settings.dtype]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PLAN_SECONDS, env=with_project(os.environ), check=False
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not start within {PLAN_SECONDS} s"}
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason is given"]
        return {"error": f"torch does not start ({last[0]})"}
    return dict(answer)


def _compute(settings: Settings, plan: dict[str, Any]) -> Check:
    if "error" in plan:
        return Check("compute", "fail", str(plan["error"]))
    threads = compute_threads(settings.threads, settings.ranks, os.environ)
    detail = f"device {plan['device']}, dtype {plan['dtype']}, {threads} threads per worker"
    if settings.ranks > 1:
        detail += f", {settings.ranks} ranks for each base model"
    if 0 < plan["devices"] < settings.ranks:
        return Check("compute", "fail", f"{detail}: each rank needs a GPU of its own, there are {plan['devices']}")
    return Check("compute", "ok", detail)


def _gpus(plan: dict[str, Any]) -> Check:
    """What torch finds, against what the machine has."""
    found = plan.get("gpus", [])
    if found:
        names = ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found))
        return Check("gpu", "ok", names if plan["device"].startswith("cuda") else f"{names}, not used: device is cpu")
    if GPU_DRIVER.exists():
        wrong = "this machine has an NVIDIA driver, but the installed torch finds no GPU"
        return Check("gpu", "warn", wrong, ("install a build of torch for GPUs, or let the container have them",))
    return Check("gpu", "ok", "none")


def _main_memory(running: str | None) -> Check:
    total, free = machine_memory()
    detail = f"{megabytes(free)} free of {megabytes(total)}, {usable_cores()} cores"
    short = free < LITTLE_MEMORY and running is None
    return Check("memory", "warn" if short else "ok", f"{detail}{': little for a server' if short else ''}")


def _open_files() -> Check:
    """Each connection of a client is one; the server raises its own limit as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most in (resource.RLIM_INFINITY, -1):
        return Check("open files", "ok", "no limit")
    return Check("open files", "warn" if most < FEW_FILES else "ok", f"at most {most}")


def _memory(settings: Settings, model: BaseModelSource, plan: dict[str, Any], running: str | None) -> Check:
    """Base weights against the memory of the device: what loading alone takes; training comes on top."""
    name = f"model {model.name}"
    folder = Path(model.source) if model.source is not None else built_in_folder(settings.data_dir)
    if not folder.is_dir():
        return Check(name, "ok", "its files are not on this machine yet; the first start brings them")
    try:
        parameters = sum(_parameters(file) for file in folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Check(name, "fail", f"its weights cannot be read ({type(error).__name__})")
    if parameters == 0:
        return Check(name, "fail", "its folder holds no safetensors weights")
    if "error" in plan or not plan["total"]:
        return Check(name, "ok", f"{parameters / 1e6:.0f} M parameters; the memory of the device is not known")
    needed = parameters * _WIDTH[plan["dtype"]]
    if plan.get("devices"):
        needed //= settings.ranks
    detail = (
        f"{parameters / 1e6:.0f} M parameters take {megabytes(needed)} of {megabytes(plan['total'])} of memory, "
        f"{megabytes(plan['free'])} free"
    )
    if needed > plan["total"]:
        return Check(name, "fail", f"{detail}: it does not fit")
    tight = needed * 1.2 > plan["free"] and running is None
    return Check(name, "warn" if tight else "ok", f"{detail}{': training will hardly fit' if tight else ''}")


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, from its header alone."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError("not a safetensors file")
        header = json.loads(opened.read(length))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= int(size)
            total += count
    return total


def _versions() -> Check:
    found = {name: _version(name) for name in PACKAGES}
    problems = [f"{name} is not installed" for name in PACKAGES if found[name] is None]
    missing = bool(problems)
    parts = [f"{name} {number}" for name, number in found.items() if number is not None]
    parts += [f"python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}"]
    sdk = _version(SDK)
    parts.append(f"SDK {SDK} {sdk}" if sdk else f"SDK {SDK} not installed (only clients need it)")
    parts += [f"{name} {number}" for name in CLIENTS if (number := _version(name)) is not None]
    if sdk is not None and not SDK_VERSIONS[0] <= _major_minor(sdk) <= SDK_VERSIONS[1]:
        oldest, newest = (".".join(map(str, each)) for each in SDK_VERSIONS)
        problems.append(f"SDK {SDK} {sdk} is not tested with this server; {oldest} to {newest} are")
    return Check("versions", "fail" if missing else "warn" if problems else "ok", ", ".join(parts), tuple(problems))


def _major_minor(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number)[:2])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
