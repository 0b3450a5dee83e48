"""Tables of values by path: a directory is renamed in them without reading the other names."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from monarch.types import Identity
from monarch.writeback.history import Numbered, Summary, names_of, obsolete, without
from monarch.writeback.op import Op, above
from monarch.writeback.path_table import PathTable

DIRECTORIES = [b"a", b"b", b"a/c", b"a/c/d", b"b/e"]


@pytest.mark.parametrize("seed", range(20))
def test_a_table_is_as_a_dictionary_with_the_same_renames(seed: int) -> None:
    chance = random.Random(seed)
    table, expected = PathTable[int](), dict[bytes, int]()
    for number in range(1, 400):
        path = os.path.join(chance.choice([b"", *DIRECTORIES]), chance.choice([b"c", b"x", b"y"]))
        match chance.choice(["set", "set", "pop", "get", "above", "move"]):
            case "set":
                table[path] = expected[path] = number
            case "pop":
                assert table.pop(path) == expected.pop(path, None)
            case "get":
                assert table.get(path) == expected.get(path)
            case "above":
                values = [expected[each] for each in above(path) if each in expected]
                assert [*table.above(path)] == values[::-1]
            case "move":
                path, to = chance.sample(DIRECTORIES, 2)
                if to.startswith(path + b"/"):
                    continue
                table.move(path, to)
                inside = [each for each in expected if each.startswith(path + b"/")]
                moved = {to + each[len(path) :]: expected.pop(each) for each in inside}
                expected |= moved
        assert dict(table.items()) == expected


class Looked(bytes):
    """A path that counts how often something of it is asked for."""

    count = 0

    def __getattribute__(self, name: str) -> Any:
        Looked.count += 1
        return super().__getattribute__(name)


FILES, RENAMES = 100, 100
NUMBERS = range(1, 1 + FILES)


def _names_of(ops: list[Numbered]) -> None:
    assert len(names_of(ops, NUMBERS)) == FILES


def _without(ops: list[Numbered]) -> None:
    """Files that have replaced others, and are lost."""
    renames = [
        (seq, Op(kind="rename", path=b"t", to=op.path, object=op.object)) for seq, op in ops[:FILES]
    ]
    assert len([*without([*renames, *ops[FILES:]], NUMBERS)]) == RENAMES


def _obsolete(ops: list[Numbered]) -> None:
    everything = range(len(ops) + 2)
    summary = Summary(everything, {}, everything, {}, everything)
    assert not [*obsolete(ops, summary).seqs]


def _obsolete_directories(ops: list[Numbered]) -> None:
    _obsolete(
        [
            (seq, Op(kind="mkdir", path=op.path, ino=seq)) if op.object else (seq, op)
            for seq, op in ops
        ]
    )


@pytest.mark.parametrize("read", [_names_of, _without, _obsolete, _obsolete_directories])
def test_a_renamed_directory_takes_no_longer_the_more_other_names_there_are(
    read: Callable[[list[Numbered]], None],
) -> None:
    ops: list[Op] = [
        Op(kind="create", path=Looked(b"d/%d" % number), object=number) for number in NUMBERS
    ]
    names = [b"e", b"f"]
    for _ in range(RENAMES):
        ops.append(Op(kind="rename", path=names[0], to=names[1], ino=1, was=Identity(0, 0, 0, 1)))
        names.reverse()
    Looked.count = 0
    read([*enumerate(ops, 1)])
    assert Looked.count <= 10 * FILES
