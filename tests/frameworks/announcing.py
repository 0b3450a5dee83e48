"""A mount that receives hints, in place of the ioctl of this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monarch.errors import Refused
from monarch.foresight.messages import Begin, End, Message, Piece, Progress, decode
from monarch.frameworks import announce


@dataclass
class Received:
    """What one order has received."""

    begin: Begin
    inos: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    is_ended: bool = False
    # The mount has ended it.
    is_dropped: bool = False


@dataclass
class FakeMount:
    """``orders`` in the order of their begin. ``refuses`` returns an errno for a message, or 0.
    ``directories`` has the paths of the directories that the messages were sent to."""

    orders: list[Received] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    refuses: Callable[[Message], int] = lambda message: 0
    directories: list[str] = field(default_factory=list)

    def ioctl(self, fd: int, number: int, message: bytearray, mutates: bool) -> int:
        assert (number & 0xFFFF, number >> 16 & 0x3FFF, number >> 30) == (0xE901, len(message), 1)
        assert mutates
        self.directories.append(os.readlink(f"/proc/self/fd/{fd}"))
        try:
            said = decode(bytes(message))
        except Refused as refusal:
            raise AssertionError("the library has sent an invalid message") from refusal
        if error := self.refuses(said):
            raise OSError(error, os.strerror(error))
        self.messages.append(said)
        if isinstance(said, Begin):
            # It lives as long as the order, and is none of the mount.
            os.fstat(said.descriptor)
            assert said.descriptor != fd
            self.orders.append(Received(said))
            return 0
        order = next(each for each in self.orders if each.begin.order == said.order)
        if order.is_dropped:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        assert not order.is_ended
        match said:
            case Piece(_, position, inos):
                assert position == len(order.inos)
                order.inos += inos
            case Progress(_, position):
                assert position <= len(order.inos)
                order.progress.append(position)
            case End():
                order.is_ended = True
        return 0

    def end_all(self) -> None:
        """Ends the orders as a mount does that knows them no more."""
        for order in self.orders:
            order.is_dropped = True

    def paths(self, order: int, directory: Path) -> list[str]:
        """The names in ``directory`` of the files of an order."""
        names = {path.stat().st_ino: path.name for path in directory.iterdir()}
        return [names.get(ino, "") for ino in self.orders[order].inos]


@pytest.fixture
def fake_mount(monkeypatch: pytest.MonkeyPatch) -> FakeMount:
    mount = FakeMount()
    monkeypatch.setattr(announce.fcntl, "ioctl", mount.ioctl)
    return mount
