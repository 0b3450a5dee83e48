"""One trainer writes into a directory, on any node; a dead trainer blocks no other for long."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from monarch.errors import LockedError
from monarch.frameworks import owner
from monarch.frameworks.checkpoint import Checkpointer, list_checkpoints
from monarch.frameworks.owner import Owner

TOKEN = "0123abcd"


class Node:
    """This process as one of another node: with a lock, a boot and a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.while_waiting: Any = lambda: None
        patched = {"monotonic": lambda: self.now_s, "sleep": self._sleep}
        monkeypatch.setattr(
            owner, "time", type("Clock", (), {k: staticmethod(v) for k, v in patched.items()})
        )
        monkeypatch.setattr(owner, "_boot", lambda: "another boot")
        # The lock of another kernel is not seen here.
        monkeypatch.setattr(owner, "LOCK", "lock-of-another-node")

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.while_waiting()


@pytest.fixture
def other_node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def owned(directory: Path, **changes: object) -> Path:
    """The file of an owner that is not there any more."""
    holder = {
        "token": "ffffffff",
        "host": "gpu07",
        "boot": "b",
        "namespace": "n",
        "pid": 4711,
        "started": 1,
    }
    path = directory / owner.OWNER
    path.write_text(json.dumps({**holder, **changes}))
    return path


def age(path: Path, seconds: float) -> None:
    now_ns = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(now_ns, now_ns))


@pytest.mark.finding("W23")
@pytest.mark.promise(165)
def test_a_trainer_of_another_node_is_refused_by_name(tmp_path: Path, other_node: Node) -> None:
    path = owned(tmp_path)
    other_node.while_waiting = lambda: age(path, -1)
    with pytest.raises(LockedError, match="another trainer: process 4711 on gpu07"):
        Checkpointer(tmp_path)
    assert json.loads(path.read_text())["pid"] == 4711
    # It was seen at once that the owner is in force; the trainer did not wait until it might have
    # expired.
    assert other_node.now_s < owner.RENEW_S


@pytest.mark.promise(165)
def test_an_owner_that_is_not_renewed_is_void(tmp_path: Path, other_node: Node) -> None:
    path = owned(tmp_path)
    Checkpointer(tmp_path).close()
    assert other_node.now_s >= owner.STALE_S - 2
    assert not path.exists()
    other_node.now_s = 0
    age(owned(tmp_path), owner.STALE_S + 1)
    Checkpointer(tmp_path).close()
    assert other_node.now_s == 0
    # A clock that runs wrong makes no owner count as dead.
    age(owned(tmp_path), -3600)
    Checkpointer(tmp_path).close()
    assert other_node.now_s >= owner.STALE_S
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lock-of-another-node"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\0" * 100])
def test_a_file_that_is_not_an_owner_is_watched_as_one(
    tmp_path: Path, other_node: Node, content: bytes
) -> None:
    (tmp_path / owner.OWNER).write_bytes(content)
    Checkpointer(tmp_path).close()
    assert other_node.now_s >= owner.STALE_S - 2


def test_an_owner_is_not_followed_anywhere(tmp_path: Path) -> None:
    (tmp_path / owner.OWNER).symlink_to("/etc/hostname")
    with pytest.raises(OSError):
        Checkpointer(tmp_path)


def test_an_owner_of_this_machine_that_is_dead_blocks_no_trainer(tmp_path: Path) -> None:
    here = {"boot": owner._boot(), "namespace": owner.namespaces()}
    for dead in ({"pid": os.getpid()}, {"pid": os.getppid(), "started": 1}, {"pid": 1 << 22}):
        owned(tmp_path, **here, **dead)
        Checkpointer(tmp_path).close()
    # One that lives is in force, also where no lock is seen: below another mount.
    alive = {"pid": os.getppid(), "started": owner.process_started(os.getppid())}
    path = owned(tmp_path, **here, **alive)
    with pytest.raises(LockedError, match=f"process {os.getppid()} on gpu07"):
        Checkpointer(tmp_path)
    path.unlink()


def test_an_owner_that_cannot_be_read_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a process of another user, and /proc is mounted with hidepid=1."""

    def refuse(pid: int) -> int | None:
        raise PermissionError

    started = owner.process_started
    monkeypatch.setattr(
        owner, "process_started", lambda pid: started(pid) if pid == os.getpid() else refuse(pid)
    )
    here = {"boot": owner._boot(), "namespace": owner.namespaces()}
    owned(tmp_path, **here, pid=os.getppid())
    with pytest.raises(LockedError, match=f"process {os.getppid()} on gpu07"):
        Checkpointer(tmp_path)


@pytest.mark.promise(165)
def test_a_trainer_that_lost_the_directory_enters_no_checkpoint_and_removes_none(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save({"w": 1})
    before = list_checkpoints(tmp_path)
    path = owned(tmp_path)
    checkpointer.step = 5
    with pytest.raises(LockedError, match="process 4711 on gpu07"):
        checkpointer.save({"w": 2})
    assert list_checkpoints(tmp_path) == before
    checkpointer.close()
    # It is another's.
    assert path.exists()


def test_an_owner_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        (tmp_path / owner.OWNER).unlink()
        checkpointer.save({"w": 1})
        assert json.loads((tmp_path / owner.OWNER).read_text())["pid"] == os.getpid()


def test_the_owner_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "RENEW_S", 0.01)
    held = Owner(tmp_path, TOKEN)
    path = tmp_path / owner.OWNER
    age(path, 1000)
    old = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == old:
        time.sleep(0.01)
    held.release()
    held.release()


def _contend(directory: str, meeting: Any, holders: Any) -> None:
    # Of nodes that see no lock of each other's.
    owner.LOCK = f"lock-{os.getpid()}"  # type: ignore[misc]
    owner._boot = lambda: str(os.getpid())
    meeting.wait(60)
    for _ in range(50):
        try:
            held = Owner(Path(directory), os.urandom(4).hex())
        except LockedError:
            continue
        with holders.get_lock():
            holders.value += 1
            assert holders.value == 1
        held.confirm()
        with holders.get_lock():
            holders.value -= 1
        held.release()


@pytest.mark.promise(165)
def test_of_many_that_take_over_at_the_same_moment_one_does(tmp_path: Path) -> None:
    age(owned(tmp_path), owner.STALE_S + 1)
    method = multiprocessing.get_context("spawn")
    meeting, holders = method.Barrier(3), method.Value("i", 0)
    processes = [
        method.Process(target=_contend, args=(str(tmp_path), meeting, holders)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]


@pytest.mark.promise(165)
def test_an_owner_that_was_taken_over_meanwhile_is_not_removed(
    tmp_path: Path, other_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = owned(tmp_path)
    age(path, owner.STALE_S + 1)
    real = os.link

    def link(old: Path, new: Path) -> None:
        if old == path and json.loads(path.read_text())["token"] == "ffffffff":
            # Another one was faster.
            path.unlink()
            owned(tmp_path, token="eeeeeeee", pid=42)
        real(old, new)

    monkeypatch.setattr(os, "link", link)
    other_node.while_waiting = lambda: age(path, -1)
    with pytest.raises(LockedError, match="process 42 on gpu07"):
        Checkpointer(tmp_path)
    assert json.loads(path.read_text())["pid"] == 42


@pytest.mark.parametrize("died", [True, False])
def test_an_owner_that_another_one_is_removing_is_left_to_it(
    tmp_path: Path, other_node: Node, died: bool
) -> None:
    path = owned(tmp_path)
    age(path, owner.STALE_S + 1)
    mark = xxhash.xxh3_64_hexdigest(path.read_bytes())
    void = tmp_path / f".{owner.OWNER}-{mark}.part"
    os.link(path, void)

    def removed() -> None:
        assert path.exists()
        path.unlink()
        void.unlink()

    def not_removed() -> None:
        # As if the mark were of long ago.
        owner.STALE_S = 0.0  # type: ignore[misc]

    other_node.while_waiting = not_removed if died else removed
    stale_s = owner.STALE_S
    try:
        Checkpointer(tmp_path).close()
    finally:
        owner.STALE_S = stale_s  # type: ignore[misc]
    assert not path.exists() and not void.exists()


@pytest.mark.finding("W23")
@pytest.mark.promise(165)
def test_two_that_do_not_see_each_other_write_no_file_of_the_same_name(tmp_path: Path) -> None:
    names = []
    for node in ("a", "b"):
        with Checkpointer(tmp_path / node) as checkpointer:
            checkpointer.step = 10
            names.append(checkpointer.save({"w": np.ones(3)}).name)
    assert names[0] != names[1]
    # Both come to one directory: each is found.
    for path in (tmp_path / "b").glob("*.ckpt"):
        path.rename(tmp_path / "a" / path.name)
    with Checkpointer(tmp_path / "a") as checkpointer:
        assert {each.checkpoint.name for each in list_checkpoints(tmp_path / "a")} == set(names)
        assert checkpointer.restore() is not None
