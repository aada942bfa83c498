"""docs/tenancy.md is executable: its shell blocks run in order, in one shell. And its tables are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from app.permissions import ROLE_PERMISSIONS
from app.settings import Settings
from schemas.roles import PERMISSIONS, ROLES
from tests.support.idle_server import listening

PAGE = (Path(__file__).parents[2] / "docs" / "tenancy.md").read_text()


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 3
    settings = Settings(data_dir=tmp_path / "data", base_model=["acme/tiny=/nowhere"], shutdown_grace=1.0)
    with listening(settings) as server:
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": commands, "TINSMITH_URL": server.url, "TINSMITH_KEY": server.key}
        script = "set -euo pipefail\n" + "\n".join(blocks) + '\nprintf "%s\\n" "$OWNER" "$ROBOT"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("to look: 200", "to train: 403", "lacks the permission train", "after its end: 401", "ada's laptop"):
        assert words in done.stdout
    for key in done.stdout.splitlines()[-2:]:
        assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key)


def test_the_tables_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE, flags=re.MULTILINE))
    assert set(rows) == {*PERMISSIONS, *ROLES}
    for role in ROLES:
        text = rows[role].replace(
            "those of `member`, and", " ".join(f"`{each}`" for each in ROLE_PERMISSIONS["member"])
        )
        named = set(PERMISSIONS) if text == "all" else set(re.findall(r"`([a-z]+)`", text))
        assert named == ROLE_PERMISSIONS[role]
