"""The notifications to the kernel about its caches, with and without a session."""

from __future__ import annotations

import errno
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio.testing

from monarch.fuse import session
from monarch.fuse.session import MountCaches
from monarch.types import Ino

INO = Ino(7)


class Kernel:
    """Records the notifications of pyfuse3, and refuses them with ``error``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = 0

    def invalidate_inode(self, ino: int, attr_only: bool = False) -> None:
        self._note("invalidate", ino, attr_only)

    def notify_store(self, ino: int, offset: int, data: bytes) -> None:
        self._note("store", ino, offset, data)

    def _note(self, *call: object) -> None:
        self.calls.append(call)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(pyfuse3, "invalidate_inode", made.invalidate_inode)
    monkeypatch.setattr(pyfuse3, "notify_store", made.notify_store)
    return made


@pytest.fixture
def caches(tmp_path: Path, kernel: Kernel) -> MountCaches:
    return MountCaches(tmp_path, lambda ino: b"%d" % ino, None)


def use(caches: MountCaches) -> None:
    caches.invalidate_attributes(INO)
    caches.invalidate_listing(INO)
    caches.store(INO, b"bytes")


def test_without_a_session_nothing_is_sent(caches: MountCaches, kernel: Kernel) -> None:
    use(caches)
    caches.open()
    caches.close()
    use(caches)
    assert kernel.calls == []


def test_each_call_is_one_notification(caches: MountCaches, kernel: Kernel) -> None:
    caches.open()
    use(caches)
    assert kernel.calls == [
        ("invalidate", INO, True),
        ("invalidate", INO, False),
        ("store", INO, 0, b"bytes"),
    ]


@pytest.mark.parametrize(("number", "lines"), [(errno.ENOENT, 0), (errno.EINVAL, 1)])
def test_a_refusal_raises_nothing_and_is_logged_unless_the_kernel_has_no_such_inode(
    caches: MountCaches,
    kernel: Kernel,
    caplog: pytest.LogCaptureFixture,
    number: int,
    lines: int,
) -> None:
    caches.open()
    kernel.error = number
    with caplog.at_level(logging.WARNING):
        use(caches)
        use(caches)
    assert len(kernel.calls) == 6
    assert len([r for r in caplog.records if r.name == session.__name__]) == lines


async def test_pages_are_dropped_by_another_process(
    caches: MountCaches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_DROP", "import sys; open(sys.argv[1], 'x')")
    # The count of opens must know of this open before it happens.
    announced: list[tuple[Ino, bool]] = []
    caches.before_drop = lambda ino: announced.append((ino, (tmp_path / "7").exists()))
    caches.open()
    caches.drop(INO)
    await dropped(caches)
    assert (tmp_path / "7").exists()
    assert announced == [(INO, False)]


async def dropped(caches: MountCaches) -> None:
    """The pages of each file so far were dropped, or are not to be."""
    with trio.fail_after(60):
        await caches._threads.run(int)


async def test_no_process_drops_pages_after_the_end(
    caches: MountCaches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, time; open(sys.argv[1], 'x'); time.sleep(1000)"
    monkeypatch.setattr(session, "_DROP", code)
    caches.open()
    caches.drop(INO)
    caches.drop(Ino(8))
    with trio.fail_after(60):
        while not (tmp_path / "7").exists():
            await trio.sleep(0.01)
    process = caches._dropping
    assert process is not None
    try:
        caches.close()
        await dropped(caches)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "8").exists()
    finally:
        process.kill()
