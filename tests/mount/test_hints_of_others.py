"""Hints of a process in a user namespace, and of a process with a descriptor that another user has
opened."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from pathlib import Path

import pytest

from monarch.foresight.messages import encode_end, encode_piece
from tests.conftest import MonarchCommand, Mounted, Tree
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, needs_root
from tests.mount.test_hints import ALICE, NATIVE, Process, begin, inos, report, send

pytestmark = [needs_fuse, needs_root, pytest.mark.modes(*NATIVE)]

BOB = 1002
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
PR_SET_DUMPABLE = 4
NAMES = ("a", "closed/c", "private", "b")


@pytest.fixture
def source_tree(tree: Tree) -> Path:
    source = tree({"a": 10, "b": 10, "closed/c": 10, "private": 10})
    (source / "closed").chmod(0o700)
    (source / "private").chmod(0o600)
    return source


@pytest.fixture
def mounted(monarch: MonarchCommand, source_tree: Path) -> Mounted:
    return monarch.mount(source_tree, options=["allow_other"])


def become_root_of_a_namespace() -> None:
    """As ``unshare -Ur``, in namespaces of users and of mounts of its own."""
    outside = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    # A process that has changed its user may not write its own maps.
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {outside[0]} 1")
    Path("/proc/self/gid_map").write_text(f"0 {outside[1]} 1")
    assert (os.getuid(), os.getgid()) == (0, 0)


def test_root_of_a_user_namespace_announces_as_the_user_outside(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    monarch.expects_log(f"a hint of user {ALICE}, process .* was refused: No space left")
    files = inos(mounted, *NAMES)

    def work(fd: int) -> list[int]:
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        become_root_of_a_namespace()
        return [send(fd, begin(fd)), send(fd, encode_piece(1, 0, files))]

    process = Process(mounted, work)
    try:
        assert process.said == [0, 2], "the files that the user outside may read"
        assert (report(mounted)["orders"], report(mounted)["unknown"]) == (1, 2)
        # It counts as one of the user outside.
        outside = Process(mounted, lambda fd: [send(fd, begin(fd, n)) for n in range(64)])
        outside.end()
        assert outside.said == [0] * 63 + [-errno.ENOSPC]
        process.close_descriptor()
        wait_until(lambda: report(mounted)["orders"] == 0, "the orders have ended")
    finally:
        process.end()


def test_with_a_descriptor_of_another_user_a_process_announces_as_itself(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    monarch.expects_log(f"a hint of user {BOB}, process .* was refused: Invalid argument")
    files = inos(mounted, *NAMES)
    ours, theirs = socket.socketpair()
    fd = os.open(mounted.path / "closed", os.O_RDONLY)
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)

    def announce(fd: int) -> list[int]:
        return [send(fd, begin(fd)), send(fd, encode_piece(1, 0, files))]

    def announce_with_that(_: int) -> list[int]:
        [fd] = socket.recv_fds(theirs, 1, 1)[1]
        others = [send(fd, encode_end(1)), send(fd, encode_piece(1, 4, files))]
        return [*others, *announce(fd)]

    alice = Process(mounted, announce)
    bob = Process(mounted, announce_with_that, uid=BOB)
    try:
        assert alice.said == [0, 2]
        assert bob.said == [-errno.EINVAL, -errno.EINVAL, 0, 2], "no order of another process"
        assert report(mounted)["orders"] == 2
    finally:
        bob.end()
    try:
        wait_until(lambda: report(mounted)["orders"] == 1, "only its own order has ended")
    finally:
        alice.end()
        ours.close()
        theirs.close()


def test_with_a_descriptor_of_a_mount_for_one_user_others_announce_nothing(
    monarch: MonarchCommand, source_tree: Path
) -> None:
    mounted = monarch.mount(source_tree)
    fd = os.open(mounted.path, os.O_RDONLY)
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(BOB)
            os.setuid(BOB)
            os.write(into, str(send(fd, begin(fd))).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(out, 16)) == -errno.EACCES
    assert report(mounted)["orders"] == 0
    for each in (fd, out, into):
        os.close(each)
