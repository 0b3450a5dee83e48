"""The demo that README.md recommends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import ROOT
from tests.conftest import require_fuse
from tests.equipment.mounts import mounts_below


def test_the_demo_shows_that_later_epochs_leave_the_source_alone(tmp_path: Path) -> None:
    require_fuse()
    done = subprocess.run(
        [sys.executable, "-m", "scripts.tools.demo", "--files", "40"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    opened = re.findall(r"epoch (\d) .*? s +[\d,]+ +(\d+) +(\d+)", done.stdout)
    assert opened == [("1", "40", "0"), ("2", "0", "40"), ("3", "0", "40")]
    assert mounts_below(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir() if path.name != "state"] == []
