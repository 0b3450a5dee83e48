"""Hints of ordinary users through a mount: they arrive, they are checked, and they end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from monarch.foresight.messages import (
    MOST_BYTES,
    SAMPLES,
    Begin,
    encode_begin,
    encode_end,
    encode_piece,
    encode_progress,
    entries_of_a_piece,
    request_number,
)
from monarch.frameworks.announce import announce
from tests.conftest import MonarchCommand, Mounted, Tree
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, needs_root

pytestmark = [needs_fuse, needs_root]

ALICE = 1001
NATIVE = ("relay", "passthrough", "no_open")
# What programs ask of any open file: FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, and of a terminal.
_COMMON = (0x80086601, 0x801C581F, termios.TCGETS, termios.TIOCGWINSZ)


def send(fd: int, message: bytes) -> int:
    """The result of a hint, or its error as a negative number."""
    try:
        return fcntl.ioctl(fd, request_number(len(message)), bytearray(message), True)
    except OSError as error:
        return -(error.errno or 0)


def begin(fd: int, number: int = 1) -> bytes:
    return encode_begin(Begin(number, fd, SAMPLES, 0))


class Process:
    """A process of a user that has called ``work`` with a descriptor of the mount, or of ``name``
    in it, and waits with the descriptor open. ``said`` is the result."""

    def __init__(
        self, mounted: Mounted, work: Callable[[int], Any], *, uid: int = ALICE, name: str = "."
    ) -> None:
        out, into = os.pipe()
        wait, proceed = os.pipe()
        beneath = os.open(mounted.path, os.O_PATH)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(proceed)
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                fd = os.open(name, os.O_RDONLY, dir_fd=beneath)
                os.write(into, json.dumps(work(fd)).encode() + b"\n")
                os.read(wait, 1)
                os.close(fd)
                os.write(into, b"closed\n")
                os.read(wait, 1)
            finally:
                os._exit(0)
        for fd in (into, wait, beneath):
            os.close(fd)
        self._proceed = proceed
        self._lines = open(out)  # noqa: SIM115
        self.said = json.loads(self._lines.readline())

    def close_descriptor(self) -> None:
        os.write(self._proceed, b"x")
        assert self._lines.readline() == "closed\n"

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._proceed)
        self._lines.close()


def report(mounted: Mounted) -> dict[str, int]:
    found: dict[str, int] = mounted.status()["foresight"]["announced"]
    return found


def inos(mounted: Mounted, *names: str) -> list[int]:
    return [os.stat(mounted.path / name).st_ino for name in names]


@pytest.fixture
def mounted(monarch: MonarchCommand, tree: Tree) -> Mounted:
    source = tree({"a": 10, "b": 10, "closed/c": 10, "private": 10, "later": 10})
    (source / "closed").chmod(0o700)
    (source / "private").chmod(0o600)
    return monarch.mount(source, options=["allow_other"])


@pytest.mark.modes(*NATIVE)
@pytest.mark.parametrize("name", [".", "a"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_an_order_of_an_ordinary_user_arrives_and_ends_with_the_descriptor(
    mounted: Mounted, name: str, is_killed: bool
) -> None:
    files = inos(mounted, "a", "b", "closed/c", "private", "later")

    def work(fd: int) -> list[int]:
        return [
            send(fd, begin(fd)),
            send(fd, encode_piece(1, 0, files[:3])),
            send(fd, encode_piece(1, 3, [*files[3:], 1 << 40, 1])),
            send(fd, encode_progress(1, 1)),
        ]

    process = Process(mounted, work, name=name)
    try:
        assert process.said == [0, 2, 1, 0]
        found = report(mounted)
        assert (found["orders"], found["unknown"], found["refused"]) == (1, 4, 0)
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.close_descriptor()
        wait_until(lambda: report(mounted)["orders"] == 0, "the order has ended")
        assert report(mounted)["ended"] == 1 and report(mounted)["bytes"] == 0
    finally:
        process.end()


@pytest.mark.modes("relay", "passthrough")
def test_opens_move_the_cursor_of_an_order(mounted: Mounted) -> None:
    names = ("later", "private", "a", "b")
    files = inos(mounted, *names)
    process = Process(
        mounted, lambda fd: [send(fd, begin(fd)), send(fd, encode_piece(1, 0, files))], uid=0
    )
    try:
        assert process.said == [0, 4]
        for read, name in enumerate(names):
            assert report(mounted)["entries"] == 4 - read
            assert (mounted.path / name).read_bytes() == (mounted.source / name).read_bytes()
        assert (report(mounted)["entries"], report(mounted)["opened"]) == (0, 4)
    finally:
        process.end()


@pytest.mark.fault("I10")
@pytest.mark.modes(*NATIVE)
def test_an_invalid_hint_is_refused(monarch: MonarchCommand, mounted: Mounted) -> None:
    monarch.expects_log(f"a hint of user {ALICE}, process .* was refused: Invalid argument")
    monarch.expects_log(f"a hint of user {ALICE}, process .* was refused: No space left")

    def work(fd: int) -> list[int]:
        largest = encode_piece(1, 0, [1] * entries_of_a_piece(4)).ljust(MOST_BYTES, b"\0")
        return [
            send(fd, b""),
            send(fd, b"\2" + begin(fd)[1:]),
            send(fd, encode_progress(1, 0)),
            send(fd, begin(fd + 100)),
            send(fd, largest),
            *(send(fd, begin(fd, number)) for number in range(65)),
            send(fd, encode_end(3)),
            send(fd, begin(fd, 65)),
        ]

    process = Process(mounted, work)
    try:
        assert process.said[:5] == [-errno.EINVAL] * 5
        assert process.said[5:] == [0] * 64 + [-errno.ENOSPC, 0, 0]
        assert report(mounted)["orders"] == 64 and report(mounted)["refused"] == 6
    finally:
        process.end()


@pytest.mark.fault("I10")
@pytest.mark.modes(*NATIVE)
def test_random_hints_harm_neither_the_mount_nor_its_readers(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    monarch.allows_log("a hint of user")

    def work(fd: int) -> list[int]:
        draw, results = random.Random(3), set[int]()
        for _ in range(250):
            message = bytearray(
                draw.choice(
                    [
                        begin(fd, draw.randrange(40)),
                        encode_piece(draw.randrange(4), 0, draw.choices(range(1 << 33), k=50)),
                        encode_piece(draw.randrange(4), 0, draw.choices(range(20), k=4000)),
                        encode_progress(draw.randrange(4), draw.randrange(1 << 42)),
                        draw.randbytes(draw.randrange(MOST_BYTES)),
                    ]
                )
            )
            if draw.random() < 0.3:
                message[draw.randrange(len(message))] ^= 1 << draw.randrange(8)
            results.add(min(0, send(fd, bytes(message[: draw.randrange(len(message) + 1)]))))
            results.add(min(0, send(fd, bytes(message))))
            # A user is allowed 128 pieces a second.
            time.sleep(0.008)
        return sorted(results)

    process = Process(mounted, work)
    try:
        allowed = {0, -errno.EINVAL, -errno.E2BIG, -errno.ENOSPC, -errno.EBUSY}
        assert {0, -errno.EINVAL} <= {*process.said} <= allowed
        assert (mounted.path / "a").read_bytes() == (mounted.source / "a").read_bytes()
        assert mounted.status()["errors"] == {}
    finally:
        process.end()
    wait_until(lambda: report(mounted)["orders"] == 0, "the orders have ended")


def test_other_ioctls_are_refused_as_before(mounted: Mounted, tmp_path: Path) -> None:
    for path in (mounted.path, mounted.path / "a"):
        fd = os.open(path, os.O_RDONLY)
        for number in _COMMON:
            with pytest.raises(OSError) as refusal:
                fcntl.ioctl(fd, number, bytearray(64), True)
            assert refusal.value.errno == errno.ENOTTY
        assert not os.isatty(fd)
        os.close(fd)


@pytest.mark.modes("python")
def test_without_the_native_datapath_a_hint_is_refused_and_the_library_does_without(
    mounted: Mounted,
) -> None:
    fd = os.open(mounted.path, os.O_RDONLY)
    assert send(fd, begin(fd)) == -errno.ENOTTY
    os.close(fd)
    assert announce([mounted.path / "a"]) is None


@pytest.mark.modes(*NATIVE)
def test_the_library_announces_paths_until_it_is_closed(mounted: Mounted) -> None:
    names = ("closed/c", "a", "missing", "later")
    announcement = announce([mounted.path / name for name in names])
    assert announcement is not None
    assert report(mounted)["orders"] == 1
    assert (report(mounted)["entries"], report(mounted)["unknown"]) == (4, 1)
    announcement.progress(2)
    announcement.close()
    announcement.close()
    announcement.progress(3)
    assert (report(mounted)["orders"], report(mounted)["ended"]) == (0, 1)


@pytest.mark.promise(342)
@pytest.mark.modes(*NATIVE)
def test_an_idle_order_does_not_keep_a_mount_from_being_unmounted(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    """As of a training process that is between two epochs, or waits at a prompt."""
    announcement = announce([mounted.path / name for name in ("a", "b")])
    assert announcement is not None and report(mounted)["orders"] == 1
    mounted.umount()
    announcement.append([2])
    announcement.close()
    assert not announcement.is_sent


@pytest.mark.modes("auto")
def test_elsewhere_nothing_is_announced(tree: Tree, tmp_path: Path) -> None:
    source = tree({"a": 10})
    fd = os.open(source, os.O_RDONLY)
    assert send(fd, begin(fd)) == -errno.ENOTTY
    os.close(fd)
    assert announce([source / "a"]) is None
    assert announce(["/proc/self/status", "/sys/kernel/uevent_seqnum", "/dev/null"]) is None
    assert announce([tmp_path / "missing" / "file"]) is None
    assert announce([]) is None
