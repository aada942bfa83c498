"""What the Dockerfile does, done: its steps in a root of their own, then its server as it is run in a container.

No container engine is needed: the root is this machine's, with a layer above it that takes every write and vanishes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.dockerfile import Stage, environment, lineage, stages, words
from tests.support.server import free_port
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
USER = "10001"


def _layers() -> bool:
    """Whether this machine lets us make a root: it takes an administrator, and a kernel with overlays."""
    script = (
        "mount -t tmpfs none /mnt && mkdir /mnt/up /mnt/work /mnt/root && "
        "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root && "
        "chroot /mnt/root setpriv --version"
    )
    try:
        done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _script(sources: Path, data: Path, port: int) -> str:
    """The image's steps, and a start of its server, as one shell script for a mount namespace of its own."""
    found = stages(DOCKERFILE, TORCH="cpu")
    build, server = lineage(found, "build"), lineage(found, "server")
    image = {**environment(server), "TINSMITH_PORT": str(port), "TINSMITH_BASE_MODEL": "acme/tiny=/data/tiny"}
    run = [*words(found["server"].last("ENTRYPOINT")), *words(found["server"].last("CMD"))]
    check = words(found["server"].last("HEALTHCHECK").partition(" CMD ")[2])
    assert found["server"].last("USER") == f"{USER}:{USER}"
    lines = [
        "set -eu",
        "mount -t tmpfs -o size=8g none /mnt",
        "mkdir /mnt/up /mnt/work /mnt/root",
        "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root",
        "mount --rbind /dev /mnt/root/dev && mount -t proc proc /mnt/root/proc",
        "mount -t tmpfs -o mode=1777,size=2g none /mnt/root/tmp",
        "rm -rf /mnt/root/opt/tinsmith /mnt/root/src /mnt/root/data",
        # The base image has Python in /usr/local, wherever this machine has it.
        "mkdir /mnt/up-python /mnt/work-python",
        f"mount -t overlay overlay -o lowerdir={sys.base_prefix},upperdir=/mnt/up-python,workdir=/mnt/work-python "
        "/mnt/root/usr/local",
        "chroot /mnt/root ldconfig",
        *(line for stage in build for line in _steps(stage, build, sources)),
        "rm -rf /mnt/root/src",
        *(line for stage in server for line in _steps(stage, server, sources)),
        # As a container is run: nothing can be written but /data and /tmp.
        "mount -o remount,ro /mnt/root && mount -o remount,ro /mnt/root/usr/local",
        f"mount --bind {data} /mnt/root/data && chown -R {USER}:{USER} /mnt/root/data",
        f"{_as_user(image, '/', ['sh', '-c', '! touch /opt/tinsmith/x /etc/x 2>/dev/null && touch /tmp/x /data/x'])}",
        f"{_as_user(image, '/', ['sh', '-c', '! python -m pip --version 2>/dev/null && ray --version'])}",
        f"{_as_user(image, found['server'].last('WORKDIR'), run)} & server=$!",
        "for second in $(seq 120); do",
        f"  if {_as_user(image, '/', check)} 2>/dev/null; then echo HEALTHY; break; fi",
        "  kill -0 $server; sleep 1",
        "done",
        "kill -TERM $server; wait $server; echo ENDED",
    ]
    return "\n".join(lines)


def _steps(stage: Stage, line: list[Stage], sources: Path) -> Iterator[str]:
    """The steps of one stage. A stage that is the parent of both lines is done twice, which changes nothing."""
    inherited = [text for one in line[: line.index(stage)] for kind, text in one.steps if kind == "WORKDIR"]
    folder, settings = ["/", *inherited][-1], environment(line)
    outside = {name: value for name, value in os.environ.items() if re.match(r"(?i)PIP_|SSL_|.*_PROXY$", name)}
    for kind, text in stage.steps:
        if kind == "WORKDIR":
            folder = text
            yield f"mkdir -p /mnt/root{folder}"
        elif kind == "COPY" and not text.startswith("--from="):
            *files, target = text.split()
            place = f"/mnt/root{folder}/{target}"
            many = len(files) > 1 or target.endswith("/")
            yield f"mkdir -p {place}" if many else f"mkdir -p $(dirname {place})"
            yield f"cp -r {' '.join(str(sources / file) for file in files)} {place}"
        elif kind == "RUN":
            pairs = [f"{name}={shlex.quote(value)}" for name, value in {**outside, **settings, "HOME": "/root"}.items()]
            given = " ".join(pairs)
            yield f"chroot /mnt/root env -i {given} sh -c {shlex.quote(f'cd {folder} && {text}')}"


def _as_user(settings: dict[str, str], folder: str, command: list[str]) -> str:
    pairs = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    contained = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set=-all"
    inside = f"cd {folder} && exec {shlex.join(command)}"
    return f"chroot /mnt/root {contained} env -i {' '.join(pairs)} sh -c {shlex.quote(inside)}"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _layers(), reason="making a root takes an administrator and a kernel with overlays")
def test_the_steps_of_the_image_give_a_server_that_runs_contained(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if re.match(r"(app|engines|schemas|store|workers|docker)/|[^/]+$", name):
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, sources / name)
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    make_tiny_model(data / "tiny")
    script = tmp_path / "steps.sh"
    script.write_text(_script(sources, data, free_port()))
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "HEALTHY" in done.stdout
    assert done.stdout.rstrip().endswith("ENDED")
    assert (data / "tinsmith.db").stat().st_uid == int(USER)
