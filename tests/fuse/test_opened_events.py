"""The files that events of inotify name: what the extension makes of them."""

from __future__ import annotations

import random
import struct
from array import array
from pathlib import Path

import pytest

from tests.conftest import Tree
from tests.fuse.rig import Rig, rig

_EVENT = struct.Struct("iIII")
_IN_OPEN, _IN_UNMOUNT, _IN_Q_OVERFLOW, _IN_IGNORED = 0x20, 0x2000, 0x4000, 0x8000
_IN_ISDIR = 0x40000000


def event(watch: int, name: bytes = b"", mask: int = _IN_OPEN) -> bytes:
    padded = name + b"\0" * (-len(name) % 16 or 16) if name else b""
    return _EVENT.pack(watch, mask, 0, len(padded)) + padded


def directories(rig: Rig) -> array[int]:
    """Watch 1 is of the root, watch 3 of a directory."""
    return array("I", [0, 1, 0, rig.ino("d")])


@pytest.mark.promise(183)
def test_events_name_files_of_their_directory(tree: Tree, tmp_path: Path) -> None:
    source = tree({"a": 1, "d/a": 1, "d/long": 1})
    (source / "z").hardlink_to(source / "a")
    with rig(source, tmp_path) as one:
        a, inner = one.ino("a"), one.ino("d/a")
        events = [event(1, b"a"), event(3, b"a"), event(1, b"z"), event(3, b"long")]
        expected = [a, inner, a, one.ino("d/long")]
        # No file is opened by these.
        events += [
            *(event(1, b"d", _IN_OPEN | _IN_ISDIR), event(3, b"", _IN_OPEN | _IN_ISDIR)),
            *(event(2, b"a"), event(-1, b"a"), event(4, b"a"), event(1, b"none")),
        ]
        assert one.datapath.opened(b"".join(events), directories(one)).tolist() == expected
        assert not one.datapath.opened(b"", directories(one))


@pytest.mark.promise(183)
def test_lost_events_are_reported_and_an_unmount_is_not(tree: Tree, tmp_path: Path) -> None:
    with rig(tree({"a": 1}), tmp_path) as one:
        a, table = one.ino("a"), array("I", [0, 1])
        lost = event(1, b"a") + event(-1, b"", _IN_Q_OVERFLOW) + event(1, b"a")
        assert one.datapath.opened(lost, table).tolist() == [a, 0]
        assert one.datapath.opened(event(1, b"", _IN_IGNORED), table).tolist() == [0]
        # The first events of an unmount. Those that follow may be read with them or later.
        ended = event(1, b"a") + event(1, b"", _IN_UNMOUNT)
        for events in (ended, ended + event(1, b"", _IN_IGNORED)):
            assert one.datapath.opened(events, table).tolist() == [a, 0xFFFFFFFF]


def test_any_bytes_are_read_within_their_bounds(tree: Tree, tmp_path: Path) -> None:
    with rig(tree({"a": 1, "d/a": 1}), tmp_path) as one:
        whole = event(1, b"a") + event(3, b"a")
        table = directories(one)
        for end in range(len(whole)):
            assert len(one.datapath.opened(whole[:end], table)) <= 1
        chosen = random.Random(5)
        for _ in range(2000):
            known = one.datapath.opened(chosen.randbytes(chosen.randrange(200)), table)
            assert all(0 <= ino <= one.snapshot.entries or ino == 0xFFFFFFFF for ino in known)
