"""Missing names in writable directories: for which of them the datapath asks Python.

As in ``test_messages`` the test plays the kernel and pyfuse3.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino
from tests.conftest import Tree
from tests.equipment.waiting import readable
from tests.fuse import wire
from tests.fuse.rig import PATIENCE_S, NoMessage, Rig, rig
from tests.fuse.wire import Op

MADE = Ino(WRITTEN_INO + 3)
VALID_S, LONG_S = 86400, 1000


@pytest.fixture
def made(tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    tree({"a": 1, "b": 1, "sub/c": 1})
    with rig(tmp_path / "source", tmp_path, ask_names=True) as it:
        it.init()
        yield it


def is_passed(made: Rig, parent: int, name: bytes) -> bool:
    """Whether a name is passed to Python instead of being answered as missing."""
    unique = made.send(Op.LOOKUP, parent, name + b"\0")
    ready = readable(made.kernel, made.python, within_s=PATIENCE_S)
    if made.kernel.fileno() in ready:
        assert wire.parse_entry(made.answer(unique).body)[0] == 0
        return False
    passed = made.passed()
    assert (passed.opcode, passed.node, passed.body) == (Op.LOOKUP, parent, name + b"\0")
    made.reply(passed, wire.entry(77))
    assert wire.parse_entry(made.answer(unique).body)[0] == 77
    return True


@pytest.mark.parametrize("directory", [ROOT_INO, MADE])
def test_readers_tell_what_is_missing_only_where_python_lets_them(
    made: Rig, directory: Ino
) -> None:
    tell = made.datapath.serve_missing
    made.datapath.name_given(directory, b"given")
    assert is_passed(made, directory, b"none")
    tell(directory, valid_s=VALID_S, for_s=LONG_S)
    assert not is_passed(made, directory, b"none")
    assert is_passed(made, directory, b"given")
    made.datapath.name_taken(directory, b"given")
    assert not is_passed(made, directory, b"given")
    # Not in another directory, and not what only Python understands.
    assert is_passed(made, made.ino("sub"), b"none")
    assert is_passed(made, directory, b"n" * 256)
    tell(directory, valid_s=VALID_S, for_s=0)
    assert is_passed(made, directory, b"none")


def test_the_kernel_is_given_the_time_for_which_a_name_is_missing(made: Rig) -> None:
    made.datapath.serve_missing(MADE, valid_s=7, for_s=LONG_S)
    assert wire.ENTRY.unpack_from(made.lookup(MADE, b"none").body)[2:] == (7, 0, 0, 0)


def test_missing_names_are_answered_only_for_a_limited_time(made: Rig) -> None:
    made.datapath.serve_missing(MADE, valid_s=VALID_S, for_s=1e-9)
    assert is_passed(made, MADE, b"none")


def test_names_of_the_snapshot_in_a_changed_directory_are_pythons(made: Rig) -> None:
    made.residency.mark_differing(ROOT_INO)
    made.datapath.serve_missing(ROOT_INO, valid_s=VALID_S, for_s=LONG_S)
    for name in (b"a", b"b", b"sub"):
        assert is_passed(made, ROOT_INO, name)
    assert not is_passed(made, ROOT_INO, b"aa")


def test_no_name_that_exists_is_ever_answered_as_missing(made: Rig) -> None:
    """Names come and go at random; no name is removed more often than it was added."""
    dice, path = random.Random(5), made.datapath
    there: Counter[bytes] = Counter()
    names = [b"%d" % n * dice.choice((1, 3, 17)) for n in range(3000)]
    path.serve_missing(MADE, valid_s=VALID_S, for_s=LONG_S)
    for _ in range(30_000):
        name = dice.choice(names)
        if there[name] and dice.random() < 0.45:
            there[name] -= 1
            path.name_taken(MADE, name)
        else:
            there[name] += 1
            path.name_given(MADE, name)
    missing = [name for name in names if not there[name]]
    assert missing
    for name in dice.sample([name for name in names if there[name]], 100):
        assert is_passed(made, MADE, name)
    assert sum(is_passed(made, MADE, name) for name in missing) <= 1


def attributes_of(made: Rig, ino: Ino) -> wire.Stat | None:
    """What readers tell; None if Python is asked."""
    unique = made.send(Op.GETATTR, ino, bytes(16))
    ready = readable(made.kernel, made.python, within_s=PATIENCE_S)
    if made.kernel.fileno() in ready:
        return wire.parse_stat(made.answer(unique).body, wire.ATTR_OUT.size)
    passed = made.passed()
    assert (passed.opcode, passed.node) == (Op.GETATTR, ino)
    made.reply(passed, bytes(8))
    made.answer(unique)
    return None


def test_attributes_of_a_directory_are_answered_until_they_change(made: Rig) -> None:
    now = Attributes(MADE, ROOT_INO, 0o41750, 3, 7, 8, 4096, -1, 2 * 10**9 + 5, 0, 8, 0, 17)
    made.datapath.serve_attributes(now)
    assert attributes_of(made, MADE) is None
    made.datapath.serve_missing(MADE, valid_s=VALID_S, for_s=LONG_S)
    assert attributes_of(made, MADE) is None
    made.datapath.serve_attributes(now)
    answered = attributes_of(made, MADE)
    assert answered is not None
    assert (answered.ino, answered.mode, answered.nlink, answered.uid, answered.gid) == (
        MADE,
        0o41750,
        3,
        7,
        8,
    )
    assert (answered.size, answered.blocks, answered.blksize, answered.rdev) == (4096, 8, 4096, 0)
    assert (answered.atime_ns, answered.mtime_ns, answered.ctime_ns) == (17, -1, 2 * 10**9 + 5)
    made.datapath.serve_missing(MADE, valid_s=VALID_S, for_s=LONG_S)
    assert attributes_of(made, MADE) == answered
    made.datapath.forget_attributes(MADE)
    assert attributes_of(made, MADE) is None
    made.datapath.serve_attributes(now)
    assert attributes_of(made, MADE) == answered
    made.datapath.serve_missing(MADE, valid_s=VALID_S, for_s=0)
    assert attributes_of(made, MADE) is None


def test_of_more_directories_than_there_are_places_some_are_pythons(made: Rig) -> None:
    directories = [Ino(WRITTEN_INO + n) for n in range(3000)]
    for directory in directories:
        made.datapath.serve_missing(directory, valid_s=VALID_S, for_s=LONG_S)
        made.datapath.name_given(directory, b"given")
    answered = 0
    for directory in directories[::50]:
        assert is_passed(made, directory, b"given")
        answered += not is_passed(made, directory, b"none")
    assert 0 < answered < 60


def test_a_name_is_pythons_from_when_it_was_given(made: Rig) -> None:
    """Readers look while names come and go: what was given before the request is passed on."""
    path, done = made.datapath, threading.Event()
    path.serve_missing(MADE, valid_s=VALID_S, for_s=LONG_S)
    path.name_given(MADE, b"kept")

    def python() -> None:
        while not done.is_set():
            with suppress(NoMessage):
                made.reply(made.passed(0.05), wire.entry(77))

    def changing() -> None:
        number = 0
        while not done.is_set():
            number += 1
            for n in range(50):
                path.name_given(MADE, b"%d-%d" % (number, n))
            for n in range(50):
                path.name_taken(MADE, b"%d-%d" % (number, n))
            path.serve_missing(Ino(MADE + number), valid_s=VALID_S, for_s=number % 3)

    threads = [threading.Thread(target=work) for work in (python, changing)]
    for thread in threads:
        thread.start()
    answered: Counter[int] = Counter()
    for _ in range(300):
        asked = [made.send(Op.LOOKUP, MADE, name + b"\0") for name in (b"kept", b"none")]
        for name, unique in zip(("kept", "none"), asked, strict=True):
            node = wire.parse_entry(made.answer(unique).body)[0]
            answered[node] += 1
            assert node == 77 or name == "none"
    done.set()
    for thread in threads:
        thread.join()
    assert answered[0] > 200
