"""An ordinary user mounts through the set-uid fusermount3, for that user alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MODES, MonarchCommand
from tests.equipment.waiting import wait_until
from tests.mount.command import OrdinaryUser, needs_fuse, ordinary_user

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
            wait_until(lambda: _is_copied(user, mnt), "it is not promoted")
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


@pytest.mark.promise(77)
@pytest.mark.modes("auto")
@pytest.mark.parametrize("umask", ["0", "027"])
def test_directories_made_in_one_of_a_foreign_group_keep_that_group_as_locally(
    monarch: MonarchCommand, umask: str
) -> None:
    with ordinary_user(monarch.case) as user:
        tops = {name: user.mkdir(name) for name in ("local", "source")}
        mnt = user.mkdir("mnt")
        for top in tops.values():
            (top / "team").mkdir()
            os.chown(top / "team", 0, 2000)
            (top / "team").chmod(0o2777)
        tier = ("--tier", f"{user.directory}/home/tier:64MiB")
        done = user("mount", str(tops["source"]), str(mnt), *tier, "-o", "write=absorb")
        assert done.returncode == 0, done.stderr
        make = f"umask {umask}; cd $0/team && mkdir -p d/below && mkdir -m 0755 e && echo 1 > d/f"
        for top in (tops["local"], mnt):
            done = user.run("sh", "-c", make, str(top))
            assert done.returncode == 0, done.stderr
        assert user("umount", str(mnt)).returncode == 0
        found = {}
        for name, top in tops.items():
            entries = {path.relative_to(top): path.stat() for path in (top / "team").rglob("*")}
            found[name] = {path: (oct(it.st_mode), it.st_gid) for path, it in entries.items()}
        assert found["source"] == found["local"] and len(found["local"]) == 4


# Announces the files of a directory, and reads half of another one, in a random order.
_TRAINER = """
import os, random, sys
from monarch.frameworks.announce import announce
announced, read = ([f"{path}/{name}" for name in os.listdir(path)] for path in sys.argv[1:])
announcement = announce(announced)
random.Random(1).shuffle(read)
for path in read[: len(read) // 2]:
    with open(path, "rb") as file:
        assert file.read() == os.path.basename(path).encode()
print(announcement is not None, flush=True)
sys.stdin.read()
"""


@pytest.mark.promise(180)
@pytest.mark.modes("no_open")
def test_files_are_fetched_ahead_in_the_mount_of_an_ordinary_user(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, tier = user.mkdir("source"), user.mkdir("mnt"), user.directory / "home/tier"
        for number in range(400):
            path = source / ("announced" if number % 4 == 0 else "read") / f"{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(path.name.encode())
        mode = ",".join(MODES[monarch.mode])
        done = user("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", "-o", mode)
        assert done.returncode == 0, done.stderr

        def status() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(user("status", str(mnt), "--json").stdout)
            return found

        directories = (f"{mnt}/announced", f"{mnt}/read")
        with user.start(user.python, "-c", _TRAINER, *directories) as trainer:
            assert trainer.stdout is not None and trainer.stdout.readline() == "True\n"
            wait_until(lambda: len(_copies(tier)) == 400, "all files are fetched")
            foresight = status()["foresight"]
            assert foresight["announced"]["orders"] == 1
            assert foresight["announced"]["unknown"] == foresight["announced"]["refused"] == 0
            assert foresight["fetched_files"] >= 100
            trainer.communicate("")
        wait_until(lambda: status()["foresight"]["announced"]["orders"] == 0, "the order has ended")
        assert user("umount", str(mnt)).returncode == 0


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
        deadline = time.monotonic() + 60
        while not log.read_text().endswith("ended\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "error" not in log.read_text()
        assert user("status", str(mnt)).returncode == 9


def _copies(tier: Path) -> list[Path]:
    return [path for path in tier.glob("monarch/*/copies-*/*/*") if path.suffix != ".part"]


def _is_copied(user: OrdinaryUser, mnt: Path) -> bool:
    """Whether the only file has a copy, which the next open reads."""
    status = json.loads(user("status", str(mnt), "--json").stdout)
    return status["tiers"][0]["files"] == 1 and not status["handles"]["open_files"]
