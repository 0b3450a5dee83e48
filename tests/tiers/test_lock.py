"""The lock of a state or tier directory: one daemon holds it, and a dead daemon's lock is free."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch.errors import LockedError
from monarch.posix.private_directory import Lock

HOLDER = """
import os, sys
from monarch.posix.private_directory import Lock
Lock(os.open(sys.argv[1], os.O_RDONLY), "the place", "/mnt/first")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_the_holder_is_named_and_its_death_frees_the_lock(directory: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for _ in range(2):
            with pytest.raises(LockedError, match=rf"the place .*pid {holder.pid} \(/mnt/first\)"):
                Lock(directory, "the place", "/mnt/second")
        holder.kill()
    Lock(directory, "the place", "/mnt/second").release()


def test_a_note_that_cannot_be_read_still_keeps_the_second_out(
    directory: int, tmp_path: Path
) -> None:
    lock = Lock(directory, "the place", "/mnt/first")
    (tmp_path / "lock").write_bytes(b"\xff not json")
    with pytest.raises(LockedError, match="another daemon"):
        Lock(directory, "the place", "/mnt/second")
    lock.release()


@pytest.mark.promise(138)
@pytest.mark.parametrize(
    ("refused", "holder"),
    [
        (("ftruncate",), r"pid \d+ \(/mnt/first\)"),
        (("pwrite",), "another daemon"),
        (("pwrite", "ftruncate"), ""),
    ],
    ids=["truncation", "write", "both"],
)
def test_a_lock_is_held_although_the_disk_has_no_room_for_its_note(
    directory: int,
    monkeypatch: pytest.MonkeyPatch,
    refused: tuple[str, ...],
    holder: str,
) -> None:
    """It does not name an earlier holder, which had a longer name."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    Lock(directory, "the place", "/mnt/" + "long" * 10).release()
    with monkeypatch.context() as patched:
        for name in refused:
            patched.setattr(os, name, refuse)
        lock = Lock(directory, "the place", "/mnt/first")
    with pytest.raises(LockedError, match=f"in use by {holder}"):
        Lock(directory, "the place", "/mnt/second")
    lock.release()


def test_the_holder_on_another_node_is_named_with_its_node(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "uname", lambda: SimpleNamespace(nodename="n7"))
        lock = Lock(directory, "the place", "/mnt/first")
    # As on a file system that both nodes have mounted.
    with pytest.raises(LockedError, match=r"in use by pid \d+ on node n7 \(/mnt/first\)"):
        Lock(directory, "the place", "/mnt/second")
    lock.release()


def test_a_symlink_in_the_place_of_the_lock_is_not_followed(directory: int, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError):
        Lock(directory, "the place", "/mnt/first")
    assert target.read_text() == "kept"
