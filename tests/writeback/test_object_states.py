"""Where the bytes of objects survive, by what was recorded, synced and published of them."""

from __future__ import annotations

import pytest

from monarch.types import Identity
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.op import Op


def version(size: int = 5, *, ino: int = 7, mtime_ns: int = 0) -> Identity:
    return Identity(size, mtime_ns, 0, ino)


def content(number: int, *, synced: bool = False) -> Op:
    return Op(kind="content", path=b"a", paths=(b"a",), object=number, size=5, synced=synced)


@pytest.fixture
def states() -> ObjectStates:
    return ObjectStates()


def test_a_content_is_known_until_its_object_is_gone(states: ObjectStates) -> None:
    assert (states.content(1), states.last(1)) == ((0, False), 0)
    states.record(1, 5, synced=False)
    states.noted(1, 6)
    assert (states.content(1), states.last(1), states.unsynced()) == ((5, False), 6, {1: 5})
    states.synced({1: 4})
    assert states.content(1) == (5, False)
    states.synced({1: 5})
    assert (states.content(1), states.unsynced()) == ((5, True), {})
    states.forget(1)
    assert (states.content(1), states.last(1)) == ((0, False), 0)


def test_the_bytes_of_a_drained_object_are_counted_as_long_as_it_is_one(
    states: ObjectStates,
) -> None:
    states.resize(1, 4096, length=10)
    states.resize(2, 8192, length=5)
    states.record(1, 1, synced=False)
    states.published(1, version())
    assert (states.bytes, states.drained_bytes, states.largest) == (12288, 4096, 10)
    states.resize(1, 12288, length=12000)
    assert (states.bytes, states.drained_bytes, states.largest) == (20480, 12288, 12000)
    assert states.is_drained(1) and not states.is_drained(2)
    assert (states.source_ino(1), states.source_ino(2)) == (7, 0)
    states.record(1, 2, synced=False)
    assert (states.drained_bytes, states.is_drained(1)) == (0, False)
    states.published(1, version())
    states.forget(1)
    states.forget(1)
    assert (states.bytes, states.drained_bytes) == (8192, 0)


def test_synced_bytes_are_safe_only_here_until_the_source_has_them(states: ObjectStates) -> None:
    states.resize(1, 0, length=0)
    states.record(1, 1, synced=True)
    states.record(1, 2, synced=False)
    assert states.is_safe_only_here(1)
    states.published(1, version())
    states.synced({1: 2})
    assert not states.is_safe_only_here(1)
    states.record(1, 3, synced=False)
    states.synced({1: 3})
    assert states.is_safe_only_here(1)


def test_a_change_at_the_source_keeps_the_order_in_which_objects_came(
    states: ObjectStates,
) -> None:
    for number in (1, 2):
        states.resize(number, 0, length=0)
        states.published(number, version())
    states.changed(1, version(ino=9))
    states.changed(3, version())
    assert list(states.drained.items()) == [(1, version(ino=9)), (2, version())]
    states.published(1, version())
    assert list(states.drained) == [2, 1]


def test_an_object_that_is_written_through_is_no_matter_of_the_tier_s_disk(
    states: ObjectStates,
) -> None:
    states.record(1, 1, synced=False)
    states.stage(1, b"d/a")
    states.set_write_through(1)
    assert states.is_write_through(1) and states.staged_beside(1) == b"d/a"
    assert (states.unsynced(), states.arrived()) == ({}, [])
    states.resize(1, 0, length=5)
    states.published(1, version())
    assert states.arrived() == [1]
    states.forget(1)
    assert (states.staged_beside(1), states.arrived()) == (None, [])


def test_a_staged_file_moves_with_the_directory_that_it_is_in(states: ObjectStates) -> None:
    ops = [
        (1, Op(kind="through", path=b"d/a", object=1)),
        (2, Op(kind="rename", path=b"d", to=b"e", ino=7)),
        # The file has another name then, and the staged file stays where it is.
        (3, Op(kind="rename", path=b"e/a", to=b"a", object=1)),
    ]
    states.take_up(ops, {})
    assert states.staged_beside(1) == b"e/a"
    states.renamed(Op(kind="rename", path=b"e", to=b"f/g", ino=7))
    assert states.unstage(1) == b"f/g/a"
    assert states.unstage(1) is None and states.is_write_through(1)


@pytest.mark.promise(67)
def test_the_source_has_an_older_version_of_what_is_written_through(states: ObjectStates) -> None:
    states.resize(1, 5, length=5)
    states.published(1, version())
    states.set_write_through(1)
    assert not states.is_drained(1) and states.arrived() == []
    assert states.drained_bytes == 0
    of_next_mount = ObjectStates()
    ops = [(1, content(1)), (2, Op(kind="through", path=b"a", object=1))]
    assert of_next_mount.take_up(ops, {1: version()}) == {1: version()}
    assert not of_next_mount.is_drained(1)


def test_an_object_without_a_file_is_known_to_be_at_the_source(states: ObjectStates) -> None:
    states.published(1, version())
    assert states.is_drained(1) and not states.drained
    states.forget(1)
    assert not states.is_drained(1)


def test_records_of_earlier_mounts_are_adopted(states: ObjectStates) -> None:
    ops = [
        (1, content(1, synced=True)),
        (2, content(2)),
        (3, content(3, synced=True)),
        (4, Op(kind="attr", path=b"a", object=1, mtime_ns=9)),
        (5, Op(kind="attr", path=b"a", object=2, mtime_ns=9)),
        (6, Op(kind="through", path=b"b", object=4)),
        (7, Op(kind="gone", object=2)),
        (8, content(5, synced=True)),
    ]
    done = {1: version(), 2: version(), 4: version(mtime_ns=9), 5: version(size=6, mtime_ns=9)}
    assert states.take_up(ops, done) == {1: version(mtime_ns=9), 2: version()}
    states.keep({1, 3, 4}, {2})
    assert states.drained == {1: version(mtime_ns=9)}
    assert [states.last(number) for number in range(1, 6)] == [4, 0, 3, 6, 8]
    assert [states.is_safe_only_here(number) for number in (1, 3, 5)] == [False, True, False]
    assert states.content(2) == (0, False)
    assert states.staged_beside(4) == b"b"
