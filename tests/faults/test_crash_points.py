"""A daemon killed at every named point of its work: the next mount finds all that was committed.

The points are in code that all modes of reading share, so the tests run in the mode that a mount
chooses on this machine by default.
"""

from __future__ import annotations

import ast
import os
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import monarch as package
from tests.conftest import MonarchCommand, Mounted, contents, processes
from tests.equipment.inotify import OpenCounter
from tests.faults.test_writing import WRITE_PLACES
from tests.mount.command import needs_fuse
from tests.mount.observe import (
    accounts_agree,
    copies,
    ended,
    epoch,
    read_through,
    resident,
    settled,
    wait_until,
)

pytestmark = [needs_fuse, pytest.mark.modes("auto")]

TIERS = {"fast": "100KB", "large": "20MB"}
# One worker, so that a turn is the same copy's in every run. The names stay as they are.
OPTIONS = [
    *("limits.inline_max=64KiB", "limits.copy_workers=1", "limits.scrub_bandwidth=0"),
    "snapshot.freshness=never",
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a point is passed: ``during`` which work, and at which ``turn`` the daemon dies."""

    during: str
    turn: int = 1


PLACES = {
    # While files are read for the first time.
    "copy-reserved": Place("fill", 3),
    "copy-staged": Place("fill", 3),
    # Eight small files, each in one piece; the rest are pieces of the large one.
    "copy-half-written": Place("fill", 11),
    "copy-written": Place("fill", 3),
    "copy-compared": Place("fill"),
    "copy-sealed": Place("fill", 4),
    "copy-renamed": Place("fill", 4),
    "copy-recorded": Place("fill", 4),
    "eviction-forgotten": Place("evict", 3),
    "eviction-removed": Place("evict", 3),
    # By a mount after an unclean end, as files are read.
    "verify-compared": Place("verify", 3),
    "verify-sealed": Place("verify", 3),
    # Before the very first mount answers.
    "tier-name-staged": Place("first", 2),
    "tier-named": Place("first"),
    "snapshot-staged": Place("first"),
    "snapshot-published": Place("first"),
    # Before a later mount answers: of tiers in another order, of another snapshot.
    "tier-generation-made": Place("again", 2),
    "records-dirty": Place("again"),
    "records-forgotten": Place("again"),
    "mount-made": Place("again"),
    "registry-staged": Place("again"),
    "registry-added": Place("again"),
    "refresh-done": Place("refresh"),
    "adopt-renamed": Place("adopt", 4),
    "adopt-recorded": Place("adopt", 4),
    "adopt-done": Place("adopt"),
    "sweep-removed": Place("sweep", 2),
    # At the end of a mount.
    "registry-removed": Place("end"),
    "end-synced": Place("end"),
    "end-clean": Place("end"),
}


def files() -> dict[str, bytes]:
    small = {f"{n % 3}/{n}.jpg": contents(str(n), 20_000 + n) for n in range(8)}
    return small | {"large": contents("large", 5_000_000)}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source, and for each event the states and tiers in which all of the source is resident."""

    source: Path
    content: Mapping[str, bytes]
    directory: Path

    def put(self, kind: str, where: Path) -> None:
        """Continue a test from there."""
        subprocess.run(["cp", "-a", f"{self.directory / kind}/.", str(where)], check=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    directory = tmp_path_factory.mktemp("prepared")
    source, content = directory / "source", files()
    for name, data in content.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    made = Prepared(source, content, directory)
    monarch = MonarchCommand(directory / "work", uuid.uuid4().hex)
    monarch.directory.mkdir()

    def keep(kind: str) -> None:
        for name in ("state", "tiers"):
            (directory / kind).mkdir(exist_ok=True)
            subprocess.run(
                ["cp", "-a", str(monarch.directory / name), str(directory / kind)], check=True
            )

    try:
        mounted = monarch.mount(source, tiers=TIERS, options=OPTIONS)
        for _ in range(2):
            epoch(mounted, content)
            settled(mounted)
        assert set(resident(mounted, content)) == set(content)
        mounted.umount()
        keep("clean")
        monarch.mount(source, tiers=TIERS, options=OPTIONS).kill()
        keep("killed")
        subprocess.run(
            ["cp", "-a", str(directory / "clean"), str(directory / "renumbered")], check=True
        )
        # Names before the others give every file another number.
        for number in range(7):
            (source / f"+{number}").mkdir()
        snapshot = directory / "renumbered/state/snapshot.lmdb"
        monarch("snapshot", "refresh", str(source), str(snapshot))
    finally:
        monarch.close()
    return made


def test_every_point_is_passed_somewhere_and_has_a_test() -> None:
    passed: list[str] = []
    for path in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.failpoint":
                passed += [c.value for c in node.args if isinstance(c, ast.Constant)]
    named = {name for name in passed if not name.startswith(("handler-", "task-"))}
    assert named == set(PLACES) | set(WRITE_PLACES)


@pytest.mark.fault("T6")
@pytest.mark.promise(50)
@pytest.mark.parametrize("point", sorted(PLACES))
def test_a_daemon_killed_there_loses_nothing_that_was_committed(
    monarch: MonarchCommand, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    place = PLACES[point]
    monkeypatch.setenv("MONARCH_POINT", f"{point}:{place.turn}")
    scenario = _Scenario(monarch, prepared)
    warm = getattr(scenario, place.during)()
    monkeypatch.delenv("MONARCH_POINT")
    again = monarch.mount(prepared.source, tiers=TIERS, options=OPTIONS)
    assert set(resident(again, prepared.content)) == warm
    # Not rglob, which fails where a directory goes while it looks: the sweep may be under way.
    walked = os.walk(monarch.directory)
    found = [Path(top, name) for top, below, names in walked for name in (*below, *names)]
    assert [path for path in found if path.suffix == ".part" or path.parent.name == "stage"] == []
    with OpenCounter(prepared.source) as counter:
        epoch(again, prepared.content)
        assert counter.count() == len(prepared.content) - len(warm)
    report = settled(again)
    wait_until(
        lambda: int(report["residency"]["files"]) == sum(map(len, copies(again).values())),
        "what no record knows is gone",
    )
    accounts_agree(again)
    again.umount()
    assert not list((monarch.directory / "home/state/monarch/mounts").iterdir())


class _Scenario:
    """What a daemon was at when it died. Each answers the names of the files that must be warm."""

    def __init__(self, monarch: MonarchCommand, prepared: Prepared) -> None:
        self._monarch = monarch
        self._prepared = prepared
        self._all = set(prepared.content)

    def _mount(self, kind: str = "") -> Mounted:
        if kind:
            self._prepared.put(kind, self._monarch.directory)
        return self._monarch.mount(self._prepared.source, tiers=TIERS, options=OPTIONS)

    def _mount_dies(self, *arguments: str, tiers: Mapping[str, str] = TIERS) -> None:
        with pytest.raises(pytest.fail.Exception, match="exited with 8"):
            self._monarch.mount(
                self._prepared.source, tiers=tiers, options=OPTIONS, arguments=arguments
            )
        self._monarch.mounted[-1].killed = True

    def _dies(self, mounted: Mounted) -> None:
        wait_until(lambda: ended(mounted.pid), "the daemon has died there")
        mounted.killed = True

    def _read_all(self, mounted: Mounted) -> None:
        for name, data in self._prepared.content.items():
            try:
                assert read_through(mounted.path / name) == data
            except OSError:
                return

    def _committed(self, mounted: Mounted, inos: Mapping[str, int]) -> set[str]:
        """The files with a whole copy and a record."""
        (path,) = mounted.state.glob("residency-*")
        raw = path.read_bytes()
        on_disk = {ino for tier in copies(mounted).values() for ino in tier}
        recorded = {n for n in range((len(raw) - 4096) // 64) if raw[4096 + 64 * n]}
        return {name for name, ino in inos.items() if ino in on_disk & recorded}

    def _inos(self, mounted: Mounted) -> dict[str, int]:
        return {name: (mounted.path / name).stat().st_ino for name in self._all}

    def fill(self) -> set[str]:
        mounted = self._mount()
        inos = self._inos(mounted)
        self._read_all(mounted)
        self._dies(mounted)
        return self._committed(mounted, inos)

    def evict(self) -> set[str]:
        mounted = self._mount("clean")
        inos = self._inos(mounted)
        assert self._monarch("evict", str(mounted.path), check=False).returncode != 0
        self._dies(mounted)
        warm = self._committed(mounted, inos)
        assert len(warm) < len(inos)
        return warm

    def verify(self) -> set[str]:
        mounted = self._mount("killed")
        self._read_all(mounted)
        self._dies(mounted)
        return self._all

    def first(self) -> set[str]:
        self._mount_dies()
        return set()

    def again(self) -> set[str]:
        self._prepared.put("clean", self._monarch.directory)
        self._mount_dies(tiers=dict(reversed(TIERS.items())))
        return self._all

    def refresh(self) -> set[str]:
        self._prepared.put("clean", self._monarch.directory)
        self._mount_dies("--refresh")
        return self._all

    def adopt(self) -> set[str]:
        self._prepared.put("renumbered", self._monarch.directory)
        self._mount_dies()
        return self._all

    def sweep(self) -> set[str]:
        self._prepared.put("clean", self._monarch.directory)
        (generation,) = (self._monarch.directory / "tiers/large/monarch").glob("*/copies-*")
        for number in range(9000, 9005):
            path = generation / f"{number & 0xFF:02x}" / str(number)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"nobody's")
        # Possibly before its mount is checked.
        with suppress(pytest.fail.Exception, AssertionError):
            self._mount()
        case = self._monarch.case
        wait_until(lambda: not processes("MONARCH_TEST_CASE", case), "the daemon has died there")
        self._monarch.mounted[-1].killed = True
        return self._all

    def end(self) -> set[str]:
        mounted = self._mount("clean")
        self._monarch("umount", str(mounted.path), check=False)
        self._dies(mounted)
        return self._all
