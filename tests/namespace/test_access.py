"""Which files a user could open, by the snapshot, compared with the opens of a process."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from monarch.namespace.access import ReadAccess
from monarch.namespace.snapshot import Snapshot
from monarch.posix import acl
from monarch.posix.credentials import ROOT, Credentials
from tests.mount.command import needs_root
from tests.mount.test_acl import ACCESS, NAMED_GROUP, NAMED_USER
from tests.mount.test_acl import acl as access_list
from tests.namespace.conftest import Taken

ALICE, BOB, TEAM, CREW = 1001, 1002, 2000, 2001
CALLERS = (
    Credentials(ALICE, ALICE),
    Credentials(ALICE, TEAM, (CREW,)),
    Credentials(BOB, BOB, (TEAM, CREW)),
    Credentials(BOB, CREW),
    Credentials(1003, 1003),
    Credentials(1003, 1003, (ALICE,)),
)


def opened(source: Path, names: Sequence[str], by: Credentials) -> set[str]:
    """The files that a process of the user can open for reading."""
    out, into = os.pipe()
    root = os.open(source, os.O_PATH)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(by.groups)
            os.setgid(by.gid)
            os.setuid(by.uid)
            answers = b""
            for name in names:
                try:
                    os.close(os.open(name, os.O_RDONLY, dir_fd=root))
                    answers += b"+"
                except PermissionError:
                    answers += b"-"
            os.write(into, answers)
        finally:
            os._exit(0)
    os.close(into)
    os.close(root)
    with open(out, "rb") as read:
        answers = read.read()
    os.waitpid(child, 0)
    assert len(answers) == len(names)
    return {name for name, answer in zip(names, answers.decode(), strict=True) if answer == "+"}


def allowed(snapshot: Snapshot, names: Sequence[str], by: Credentials) -> set[str]:
    """The files that ``ReadAccess`` allows."""
    inos = array("I", [snapshot.resolve(os.fsencode(name)) or 0 for name in names])
    assert 0 not in inos
    kept = ReadAccess(snapshot, by).readable(inos)
    assert all(ino in (0, before) for ino, before in zip(kept, inos, strict=True))
    return {name for name, ino in zip(names, kept, strict=True) if ino}


def guard(path: Path, draw: random.Random, *, has_lists: bool) -> None:
    """Gives an entry a random owner, mode and perhaps list."""
    os.chown(path, draw.choice((0, ALICE, BOB)), draw.choice((0, ALICE, TEAM, CREW)))
    bits = [draw.choice((0, 4, 5, 5, 6, 7)) for _ in range(3)]
    path.chmod(bits[0] << 6 | bits[1] << 3 | bits[2])
    if has_lists and draw.random() < 0.4:
        named = [
            (kind, number, draw.choice((0, 4, 5, 7)))
            for kind, number in ((NAMED_USER, ALICE), (NAMED_GROUP, TEAM), (NAMED_GROUP, CREW))
            if draw.random() < 0.6
        ]
        mask = draw.choice((None, 0, 4, 5))
        mode = bits[0] << 6 | bits[2]
        os.setxattr(path, ACCESS, access_list(mode, *named, group=bits[1], mask=mask))


@needs_root
@pytest.mark.parametrize("seed", range(3))
def test_it_allows_what_the_kernel_allows(taken: Taken, source: Path, seed: int) -> None:
    draw, names = random.Random(seed), []
    directories = [source]
    for number in range(12):
        directories.append(draw.choice(directories) / f"d{number}")
        directories[-1].mkdir()
    for number in range(150):
        path = draw.choice(directories) / f"f{number}"
        path.write_bytes(b"x")
        names.append(str(path.relative_to(source)))
    root = os.open(source, os.O_RDONLY)
    has_lists = acl.are_known(root)
    os.close(root)
    for path in [*directories[1:], *(source / name for name in names)]:
        guard(path, draw, has_lists=has_lists)
    snapshot, found = taken(source), []
    for by in CALLERS:
        found.append(opened(source, names, by))
        assert allowed(snapshot, names, by) == found[-1], by
    assert len({frozenset(each) for each in found}) >= 5 and 0 < len(found[0]) < len(names)
    assert allowed(snapshot, names, ROOT) == {*names}


def test_only_regular_files_of_the_snapshot_are_kept(taken: Taken, source: Path) -> None:
    (source / "directory").mkdir()
    (source / "file").write_bytes(b"x")
    (source / "link").symlink_to("file")
    (source / "other name").hardlink_to(source / "file")
    snapshot = taken(source)
    everything = array("I", [0, *range(1, snapshot.entries + 1), snapshot.entries + 1, 2**32 - 1])
    kept = ReadAccess(snapshot, ROOT).readable(everything)
    assert [ino for ino in kept if ino] == [snapshot.lookup(1, b"file")]
    assert len(kept) == len(everything)
    assert ReadAccess(snapshot, ROOT).readable(array("I")) == array("I")


def test_entries_may_come_in_any_order_and_several_times(taken: Taken, source: Path) -> None:
    for number in range(4200):
        (source / f"{number}").touch()
    snapshot = taken(source)
    draw = random.Random(1)
    inos = array("I", draw.choices(range(2, snapshot.entries + 1), k=9000))
    assert ReadAccess(snapshot, Credentials(os.getuid(), 0)).readable(inos) == inos
