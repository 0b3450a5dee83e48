"""An ordinary user mounts through the set-uid fusermount3, for that user alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.conftest import MODES, MonarchCommand
from tests.mount.command import needs_fuse, ordinary_user

pytestmark = needs_fuse


@pytest.mark.fault("S7", "Security")
@pytest.mark.promise(23)
@pytest.mark.modes("python", "relay", "no_open")
def test_an_ordinary_user_mounts_reads_twice_and_unmounts(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, tier = user.mkdir("source"), user.mkdir("mnt"), user.directory / "home/tier"
        (source / "a").write_bytes(b"content")
        (source / "secret").write_bytes(b"root's own")
        (source / "secret").chmod(0o600)
        mode = ",".join(MODES[monarch.mode])
        done = user("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", "-o", mode)
        assert done.returncode == 0, done.stderr
        assert user.mounts()[str(mnt)] == "fuse.monarch"
        for _epoch in range(2):
            # Without what the kernel keeps of it, each is asked of the daemon.
            read = "import os, sys; fd = os.open(sys.argv[1], 0); print(os.read(fd, 99).decode());"
            read += "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)"
            assert user.run(user.python, "-c", read, f"{mnt}/a").stdout == "content\n"
            _wait_for_the_copy(tier)
        assert user.run("cat", f"{mnt}/secret").returncode != 0
        status = json.loads(user("status", str(mnt), "--json").stdout)
        (fast,) = status["tiers"]
        assert fast["files"] == 1
        assert fast["opens"] == (None if monarch.mode == "no_open" else 1)
        assert [epoch["opens"] for epoch in status["epochs"]] == [2]
        assert status["opens"] == 2
        assert status["saved"]["bytes"] == len("content")
        assert status["source_totals"]["reader"]["opens"] == 1
        assert Path(status["snapshot"]["file"]).is_relative_to(user.directory / "home/state")
        for private in (tier, tier / "monarch", Path(status["snapshot"]["file"]).parent):
            assert (private.stat().st_mode & 0o777, private.stat().st_uid) == (0o700, 65534)
        done = user("umount", str(mnt))
        assert done.returncode == 0, done.stderr
        assert str(mnt) not in user.mounts()


def test_fusermount3_ends_a_user_s_daemon_cleanly(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt = user.mkdir("source"), user.mkdir("mnt")
        mount = ["mount", str(source), str(mnt), "--tier", f"{user.directory}/home/tier:1MiB"]
        assert user(*mount).returncode == 0
        busy = user.run(
            "sh", "-c", 'cd "$0" && exec "$1" -m monarch umount .', str(mnt), user.python
        )
        assert (busy.returncode, "is in use by pid" in busy.stderr) == (10, True), busy.stderr
        assert user.run("fusermount3", "-u", str(mnt)).returncode == 0
        (log,) = user.directory.rglob("daemon.log")
        deadline = time.monotonic() + 10
        while not log.read_text().endswith("ended\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "error" not in log.read_text()
        assert user("status", str(mnt)).returncode == 9


def _wait_for_the_copy(tier: Path) -> None:
    deadline = time.monotonic() + 10
    while not list(tier.glob("monarch/*/copies-*/*/*")):
        assert time.monotonic() < deadline, "it is not promoted"
        time.sleep(0.02)
