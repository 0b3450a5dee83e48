"""A refreshed snapshot equals a new one; ``quick`` misses only the documented changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from monarch.errors import SnapshotError, SourceError
from monarch.namespace import scan
from monarch.namespace.build import build
from monarch.namespace.compare import verify
from monarch.namespace.refresh import directories_changed, refresh
from monarch.namespace.snapshot import Snapshot
from monarch.types import Ino
from tests.equipment import disks


@pytest.fixture
def settled(source: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source whose snapshot was built some time after its last change."""
    for top in ("a", "b", "c"):
        (source / top / "below").mkdir(parents=True)
        for number in range(50):
            (source / top / f"{number:02}").write_bytes(b"content")
        (source / top / "link").symlink_to("00")
    os.link(source / "a" / "00", source / "b" / "hard")
    monkeypatch.setattr(scan, "_RACY_NS", -3600 * 10**9)
    build(source, file)
    time.sleep(0.05)
    return source


def table(file: Path) -> list[tuple[bytes, object]]:
    with Snapshot.open(file) as snapshot:
        inos = [Ino(slot) for slot in range(1, snapshot.entries + 1)]
        return [
            *((snapshot.path(ino), snapshot.attributes(ino)) for ino in inos),
            *(
                (snapshot.path(ino), snapshot.readlink(ino))
                for ino in inos
                if snapshot.path(ino).endswith(b"link")
            ),
        ]


def assert_as_built(source: Path, file: Path) -> None:
    fresh = file.with_name("fresh")
    build(source, fresh)
    assert table(file) == table(fresh)


@pytest.mark.parametrize("quick", [False, True])
def test_nothing_changed(settled: Path, file: Path, workers: str, quick: bool) -> None:
    report = refresh(settled, file, quick=quick)
    assert (report.added, report.removed, report.changed) == (0, 0, 0)
    assert report.unlisted == 7
    # All 161 but the root, six directories and the two names of one file.
    assert report.reused == (152 if quick else 0)
    assert_as_built(settled, file)


@pytest.mark.parametrize("quick", [False, True])
def test_names_made_and_removed_at_the_source_are_found(
    settled: Path, file: Path, workers: str, quick: bool
) -> None:
    (settled / "a" / "00 new").touch()
    (settled / "b" / "below" / "tree").mkdir()
    (settled / "b" / "below" / "tree" / "file").touch()
    (settled / "c" / "00").unlink()
    (settled / "c" / "below").rmdir()
    (settled / "b" / "hard").unlink()
    report = refresh(settled, file, quick=quick)
    assert (report.added, report.removed) == (3, 3)
    assert report.unlisted == 2  # the root and a/below
    assert_as_built(settled, file)


def test_a_file_written_in_place(settled: Path, file: Path) -> None:
    (settled / "a" / "07").write_bytes(b"other content")
    missed = refresh(settled, file, quick=True)
    assert missed.changed == 0
    with Snapshot.open(file) as snapshot:
        found = verify(settled, snapshot)
        assert [(difference.path, difference.kind) for difference in found] == [
            (b"a/07", "changed-size")
        ]
    report = refresh(settled, file)
    assert (report.added, report.removed, report.changed) == (0, 0, 1)
    assert_as_built(settled, file)


def test_a_directory_that_took_the_place_of_another(settled: Path, file: Path) -> None:
    (settled / "a").rename(settled / "d")
    (settled / "b").rename(settled / "a")
    refresh(settled, file, quick=True)
    assert_as_built(settled, file)


def test_a_directory_that_became_a_file(settled: Path, file: Path) -> None:
    (settled / "a" / "below").rmdir()
    (settled / "a" / "below").touch()
    (settled / "a" / "01").unlink()
    (settled / "a" / "01").mkdir()
    refresh(settled, file, quick=True)
    assert_as_built(settled, file)


def test_a_directory_changed_while_the_last_scan_ran_is_listed_again(
    settled: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the source's clock a change leaves no trace in a directory's times."""
    monkeypatch.setattr(scan, "_RACY_NS", 3600 * 10**9)
    assert refresh(settled, file).unlisted == 0


@pytest.mark.fault("M5")
@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_a_directory_that_has_just_changed_is_listed_again_whatever_the_clock_of_the_node(
    source: Path, file: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    (source / "new").mkdir()
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + ahead_s * 10**9)
    build(source, file)
    assert refresh(source, file).unlisted == 0


@pytest.mark.parametrize(
    ("created_s", "newest_s", "settled_s"),
    [
        # The source's clock was at least at 990 when the scan began.
        (1000, 1000, 988),
        (5000, 1000, 988),
        # Nothing has changed for days.
        (10**6, 1000, 10**6 - 86400 - 2),
        # The node's clock is behind, or times of the source are in the future.
        (1000, 5000, 998),
    ],
)
def test_the_time_before_which_directories_are_believed(
    created_s: int, newest_s: int, settled_s: int
) -> None:
    summary = SimpleNamespace(created_ns=created_s * 10**9, scan_seconds=10.0)
    snapshot = SimpleNamespace(info=lambda: summary, newest_ns=lambda: newest_s * 10**9)
    assert scan.settled_ns(cast(Snapshot, snapshot)) == settled_s * 10**9


def test_the_snapshot_of_another_source_is_refused(settled: Path, file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(SnapshotError, match=r"is of .*source, not of .*source/a"):
        refresh(settled / "a", file)
    with pytest.raises(SourceError):
        refresh(settled / "nothing", file)
    assert file.read_bytes() == before


def test_an_open_snapshot_continues_to_answer(settled: Path, file: Path) -> None:
    with Snapshot.open(file) as snapshot:
        (settled / "a" / "new").touch()
        report = refresh(settled, file)
        assert snapshot.resolve(b"a/new") is None
        assert snapshot.resolve(b"a/49") is not None
        assert report.info.id != snapshot.id
    with Snapshot.open(file) as snapshot:
        assert snapshot.resolve(b"a/new") is not None


@pytest.mark.parametrize("count", [3, 200])
def test_a_directory_that_changed_is_found_and_nothing_else_is_called_a_change(
    tmp_path: Path, count: int
) -> None:
    source = tmp_path / "source"
    for number in range(count):
        (source / f"{number:03}").mkdir(parents=True)
        (source / f"{number:03}" / "file").write_bytes(b"content")
    build(source, tmp_path / "snapshot")
    with Snapshot.open(tmp_path / "snapshot") as snapshot:

        def changed(patience_s: float = 60.0) -> bool | None:
            return directories_changed(source, snapshot, jobs=4, patience_s=patience_s)

        assert changed() is False
        assert changed(patience_s=0.0) is None
        (source / "000" / "file").write_bytes(b"other content in place")
        assert changed() is False
        (source / f"{count - 1:03}" / "new").touch()
        assert changed() is True


@pytest.fixture
def coarse(tmp_path: Path) -> Iterator[Path]:
    """A source on a disk that keeps times in whole seconds."""
    with disks.coarse(tmp_path) as disk:
        source = disk / "source"
        for number in range(100):
            (source / f"{number:03}").mkdir(parents=True)
            (source / f"{number:03}" / "file").write_bytes(b"content")
        (source / "099" / "link").symlink_to("file")
        yield source


def add(directory: Path) -> None:
    (directory / "new").touch()


def replace_link(directory: Path) -> None:
    (directory / "other").symlink_to("elsewhere")
    (directory / "other").rename(directory / "link")


def replace_file(directory: Path) -> None:
    (directory / "other").touch()
    (directory / "other").rename(directory / "file")


@pytest.mark.promise(27)
@pytest.mark.fault("M5")
@pytest.mark.parametrize("change", [add, replace_link, replace_file])
def test_a_directory_that_changes_again_in_the_second_of_its_scan_is_found(
    coarse: Path, file: Path, change: Callable[[Path], None]
) -> None:
    directory = coarse / "099"
    while True:
        (directory / "passing").touch()
        (directory / "passing").unlink()
        build(coarse, file)
        before = directory.stat()
        change(directory)
        after = directory.stat()
        if (before.st_mtime, before.st_ctime) == (after.st_mtime, after.st_ctime):
            break
    with Snapshot.open(file) as snapshot:
        for patience_s, expected in ((60.0, True), (0.0, None)):
            found = directories_changed(coarse, snapshot, jobs=4, patience_s=patience_s)
            assert found is expected
    assert (refresh(coarse, file, quick=True).added > 0) is (change is add)
    assert_as_built(coarse, file)
    with Snapshot.open(file) as snapshot:
        assert directories_changed(coarse, snapshot, jobs=4, patience_s=60.0) is False


def test_a_directory_that_has_just_changed_is_compared_without_its_mounts(
    coarse: Path, file: Path
) -> None:
    """Another inode is listed for a mount point than its status has."""
    with disks.in_memory(coarse / "mounted", 1) as mounted:
        (mounted / "within").touch()
        for one_file_system in (False, True):
            build(coarse, file, one_file_system=one_file_system)
            with Snapshot.open(file) as snapshot:
                assert directories_changed(coarse, snapshot, jobs=4, patience_s=60.0) is False
