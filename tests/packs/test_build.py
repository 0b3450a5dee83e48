"""Writing packs: the same bytes again, interrupted runs, changing sources, directories in use."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from monarch.errors import LockedError, MonarchError, PackError, SourceError, UsageError
from monarch.packs import reading, tree
from monarch.packs.build import Parameters, build
from monarch.packs.directory import is_pack
from monarch.packs.pack import Pack
from tests.equipment import disks
from tests.packs.trees import contents, copied, deep_tree, make_tree, pack

PROGRAM = """
import sys
from pathlib import Path
from monarch.packs.build import Parameters, build

source, to = map(Path, sys.argv[1:])
build(source, to, Parameters(7, "random", 8192), jobs=1, progress=lambda *shown: None)
"""


@pytest.mark.promise(221)
def test_the_same_tree_and_seed_give_the_same_bytes(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    source, directory = made
    expected = contents(directory)
    assert {"pack.json", "index", "chunks/tree.chunk", "large/000000.data"} <= set(expected)
    for jobs in (1, 8):
        pack(source, tmp_path / str(jobs), jobs=jobs)
        assert contents(tmp_path / str(jobs)) == expected
    subprocess.run(["cp", "-a", str(source), str(tmp_path / "elsewhere")], check=True)
    pack(tmp_path / "elsewhere", tmp_path / "of a copy")
    assert contents(tmp_path / "of a copy") == expected


@pytest.mark.parametrize("other", [{"seed": 8}, {"order": "path"}, {"chunk": 9000}])
def test_another_parameter_gives_another_pack(
    made: tuple[Path, Path], tmp_path: Path, other: dict[str, int]
) -> None:
    pack(made[0], tmp_path / "other", **other)
    assert contents(tmp_path / "other") != contents(made[1])


def test_the_random_order_spreads_the_classes_and_the_order_by_path_does_not(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    pack(made[0], tmp_path / "by path", order="path")

    def runs(directory: Path) -> int:
        """How often the class changes from one file to the next, in the order of the chunks."""
        with Pack.open(os.fsencode(directory)) as opened:
            numbers = [
                number
                for chunk in range(opened.info.chunks)
                for number in opened.chunk_numbers(chunk).tolist()
            ]
            assert len(set(numbers)) == len(numbers) > 60
            paths = [opened.record(number).path for number in numbers]
        tops = [path.split(b"/")[0] for path in paths if path.startswith(b"class")]
        return sum(one != other for one, other in pairwise(tops))

    assert runs(tmp_path / "by path") < 6
    assert runs(made[1]) > 30


def test_a_chunk_has_at_most_its_size_and_a_larger_file_is_alone(
    made: tuple[Path, Path],
) -> None:
    with Pack.open(os.fsencode(made[1])) as opened:
        for chunk in range(opened.info.chunks):
            assert 0 < opened.size_of[opened.chunk_numbers(chunk)].sum() <= 8192
        assert opened.info.large == 2
    # The hole of a sparse file stays one.
    sparse = made[1] / "large/000001.data"
    assert sparse.stat().st_size == 1 << 20
    assert sparse.stat().st_blocks * 512 < 1 << 19


# -- interrupted runs ------------------------------------------------------------------------------


POINTS = {
    # The point, and the chunks that are complete then. One job commits them in their order.
    "pack-large:2": 0,
    "pack-chunk-written:3": 2,
    "pack-chunk:4": 4,
    "pack-tree:1": None,
    "pack-index:1": None,
    "pack-description:1": None,
}


@pytest.mark.promise(220)
@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_is_killed_is_continued_and_gives_the_same_pack(
    made: tuple[Path, Path], tmp_path: Path, point: str
) -> None:
    source, directory = made
    to = tmp_path / "pack"
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source), str(to)],
        env={**os.environ, "MONARCH_POINT": point},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    is_done = point == "pack-description:1"
    assert is_pack(os.fsencode(to)) == is_done
    if not is_done:
        with pytest.raises(PackError):
            Pack.open(os.fsencode(to))
    report = pack(source, to)
    assert report.pack is not None
    chunks = POINTS[point]
    if chunks is None:
        assert report.bytes_read == 0
    else:
        # The large files come first; that of the point is complete, but not noted.
        large = 1 if point.startswith("pack-large") else 2
        assert report.kept_chunks == chunks + large
        assert 0 < report.bytes_read == report.pack.bytes - report.kept_bytes
    assert contents(to) == contents(directory)


def _interrupted(source: Path, to: Path) -> None:
    """Leaves an unfinished pack with complete chunks: a file cannot be read."""
    victim = source / "victim"
    victim.write_bytes(b"v" * 100)

    def progress(done: int, total: int | None, words: str) -> None:
        # Called between the listing and the first read.
        if total is not None and victim.exists():
            victim.unlink()

    report = build(source, to, Parameters(7, "random", 8192), jobs=3, progress=progress)
    assert report.pack is None
    (failure,) = report.failures
    assert failure.path == b"victim"
    assert "No such file" in failure.what


@pytest.mark.promise(222)
def test_a_file_that_cannot_be_read_is_named_and_there_is_no_pack(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    to = tmp_path / "pack"
    _interrupted(source, to)
    assert not is_pack(os.fsencode(to))
    assert not list(to.rglob("*.part"))
    # Without the file the others lie elsewhere: a chunk is kept only if its table still fits.
    assert pack(source, to).pack is not None
    pack(source, tmp_path / "fresh")
    assert contents(to) == contents(tmp_path / "fresh")


@pytest.mark.promise(220)
def test_a_file_that_changed_since_an_interrupted_run_is_read_again(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    to = tmp_path / "pack"
    _interrupted(source, to)
    (source / "victim").write_bytes(b"v" * 100)
    changed = source / "class2/002.jpg"
    size = changed.stat().st_size
    changed.write_bytes(b"n" * size)
    os.utime(changed, ns=(1, 1))
    report = pack(source, to)
    pack(source, tmp_path / "fresh")
    assert contents(to) == contents(tmp_path / "fresh")
    # Not all was read again.
    assert report.pack is not None
    assert size <= report.bytes_read < report.pack.bytes - 20_000


def test_each_file_is_opened_once_and_none_of_a_chunk_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(tmp_path / "source")
    opened: Counter[bytes] = Counter()

    def counted(root: int, path: bytes, flags: int) -> int:
        opened[path] += 1
        return open_beneath(root, path, flags)

    open_beneath = reading.open_beneath
    monkeypatch.setattr(reading, "open_beneath", counted)
    pack(source, tmp_path / "whole")
    with Pack.open(os.fsencode(tmp_path / "whole")) as whole:
        records = [whole.record(number) for number in range(1, whole.info.entries + 1)]
    bytes_at = {record.path for record in records if record.chunk != -1}
    first_names = bytes_at - {b"class1/link.jpg"}
    assert opened == Counter(first_names)

    # An unfinished pack with all chunks but two, and without large files that are noted.
    unfinished = copied(tmp_path / "whole", tmp_path / "unfinished")
    _make_unfinished(unfinished, missing=("chunks/000001.chunk", "chunks/000003.chunk"))
    opened.clear()
    report = pack(source, unfinished)
    expected = {record.path for record in records if record.chunk in (1, 3, -2)} & first_names
    assert opened == Counter(expected)
    assert report.bytes_read == sum(record.size for record in records if record.path in expected)
    assert contents(unfinished) == contents(tmp_path / "whole")


def _make_unfinished(directory: Path, *, missing: Sequence[str]) -> None:
    """Turns a complete pack into one that is being written, without the chunks ``missing``."""
    for name in (*missing, "pack.json", "index", "chunks/tree.chunk"):
        (directory / name).unlink()
    fields = {"seed": 7, "order": "random", "chunk_bytes": 8192}
    mark = {"format": "monarch-pack", "version": 1, **fields}
    (directory / "building").write_text(json.dumps(mark) + "\n")


@pytest.mark.promise(222)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    changed = {source / "class2/002.jpg": b"shorter", source / "large": b"x" * 30_000}
    to = tmp_path / "pack"

    def progress(done: int, total: int | None, words: str) -> None:
        if total is not None and done == 0:
            for path, content in changed.items():
                path.write_bytes(content)

    report = build(source, to, Parameters(7, "random", 8192), jobs=3, progress=progress)
    assert report.pack is None
    assert {each.path for each in report.failures} == {b"class2/002.jpg", b"large"}
    assert all("changed" in each.what for each in report.failures)
    assert not is_pack(os.fsencode(to))


@pytest.mark.promise(222)
def test_a_file_that_is_written_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(tmp_path / "source")
    victim = source / "class2/002.jpg"
    number = victim.stat().st_ino
    size = victim.stat().st_size

    def pread(fd: int, count: int, offset: int) -> bytes:
        raw = os_pread(fd, count, offset)
        if os.fstat(fd).st_ino == number:
            # The size stays: only the times show the change.
            victim.write_bytes(b"n" * size)
            os.utime(victim, ns=(1, 1))
        return raw

    os_pread = os.pread
    monkeypatch.setattr(reading.os, "pread", pread)
    report = pack(source, tmp_path / "pack")
    assert report.pack is None
    assert [each.path for each in report.failures] == [b"class2/002.jpg"]


def test_a_directory_that_cannot_be_listed_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(tmp_path / "source")

    def opened(root: int, path: bytes, flags: int) -> int:
        if path == b"class2":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_beneath(root, path, flags)

    open_beneath = tree.open_beneath
    monkeypatch.setattr(tree, "open_beneath", opened)
    report = pack(source, tmp_path / "pack")
    assert report.pack is None
    (failure,) = report.failures
    assert failure.path == b"class2"
    assert "Permission denied" in failure.what
    assert report.bytes_read == 0


def test_a_link_in_the_place_of_a_listed_file_is_not_followed(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 100)
    file = source / "class2/002.jpg"

    def progress(done: int, total: int | None, words: str) -> None:
        if total is not None and not file.is_symlink():
            file.unlink()
            file.symlink_to(secret)

    report = build(
        source, tmp_path / "pack", Parameters(7, "random", 8192), jobs=1, progress=progress
    )
    assert [each.path for each in report.failures] == [b"class2/002.jpg"]


def test_a_full_disk_is_one_error_and_the_run_is_continued(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    source = make_tree(tmp_path / "source")
    with disks.in_memory(tmp_path / "disk", 1) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(1_000_000))
        with pytest.raises(PackError, match="No space left on device; make room"):
            pack(source, disk / "pack")
        assert not is_pack(os.fsencode(disk / "pack"))
        assert not list((disk / "pack").rglob("*.part"))
        filler.unlink()
        assert pack(source, disk / "pack").pack is not None
        pack(source, tmp_path / "fresh")
        assert contents(disk / "pack") == contents(tmp_path / "fresh")


def test_entries_that_no_reader_of_a_pack_accepts_are_named(tmp_path: Path) -> None:
    with deep_tree(tmp_path / "source", "n" * 255, 258) as source:
        report = pack(source, tmp_path / "pack")
    [failure] = report.failures
    assert (len(failure.path), failure.what) == (
        256 * 257 - 1,
        "it cannot be packed: a path is too long, or has a NUL",
    )
    assert report.pack is None


@pytest.mark.promise(223)
@pytest.mark.parametrize("below", ["chunks", "large"])
def test_nothing_is_written_through_a_link_in_the_place_of_a_directory(
    tmp_path: Path, below: str
) -> None:
    source = make_tree(tmp_path / "source")
    victim, directory = tmp_path / "victim", tmp_path / "pack"
    victim.mkdir()

    def progress(done: int, total: int | None, words: str) -> None:
        if words == "packing" and not (directory / below).is_symlink():
            (directory / below).rename(directory / "moved")
            (directory / below).symlink_to(victim)

    with pytest.raises(PackError, match="cannot be written"):
        build(source, directory, Parameters(7, "random", 8192), jobs=1, progress=progress)
    assert list(victim.iterdir()) == []


# -- directories in use ----------------------------------------------------------------------------


def _refused(source: Path, to: Path, error: type[MonarchError], **options: int) -> str:
    before = contents(to) if to.is_dir() else None
    with pytest.raises(error) as caught:
        pack(source, to, **options)
    assert caught.value.hint
    assert (contents(to) if to.is_dir() else None) == before
    return str(caught.value)


@pytest.mark.promise(223)
def test_a_directory_of_others_is_left_alone(made: tuple[Path, Path], tmp_path: Path) -> None:
    source = made[0]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/000000.chunk").write_bytes(b"mine")
    assert "neither empty nor a pack" in _refused(source, tmp_path / "photos", UsageError)
    for name, content in (
        ("building", b"a shed"),
        ("building.part", b"shed"),
        ("pack.json", b"{}"),
    ):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / name).write_bytes(content)
        _refused(
            source, tmp_path / name / "below", UsageError if name != "pack.json" else MonarchError
        )
    (tmp_path / "file").write_bytes(b"mine")
    _refused(source, tmp_path / "file", PackError)
    _refused(source, tmp_path / "missing/below", PackError)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_directory_in_the_source_is_refused_by_any_name(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=4)
    (tmp_path / "link").symlink_to(source / "empty")
    for to in (source, source / "new", source / "empty/new", tmp_path / "link/new"):
        assert "outside of it" in _refused(source, to, UsageError)
    assert pack(source, tmp_path / "beside").pack is not None


@pytest.mark.promise(223)
def test_a_directory_in_a_pack_is_refused(made: tuple[Path, Path], own: Path) -> None:
    before = sorted(own.rglob("*"))
    for to in (own / "new", own / "chunks/new"):
        assert "lies in a pack" in _refused(made[0], to, UsageError)
    assert sorted(own.rglob("*")) == before


def test_files_of_others_in_an_unfinished_pack_are_not_removed(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    to = tmp_path / "pack"
    _interrupted(source, to)
    (to / "chunks/notes.txt").write_bytes(b"mine")
    (to / "chunks/999999.chunk").write_bytes(b"of an earlier run")
    assert pack(source, to).pack is not None
    assert (to / "chunks/notes.txt").read_bytes() == b"mine"
    assert not (to / "chunks/999999.chunk").exists()


def test_an_unfinished_pack_is_continued_only_with_its_options(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    _interrupted(source, tmp_path / "pack")
    message = _refused(source, tmp_path / "pack", UsageError, seed=8)
    assert "--seed 7 --by random --chunk 8192" in message


@pytest.mark.promise(223)
def test_a_complete_pack_is_never_changed(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")
    to = tmp_path / "pack"
    first = pack(source, to)
    again = pack(source, to)
    assert again.pack == first.pack
    assert again.bytes_read == 0
    _refused(source, to, UsageError, seed=8)
    (source / "new").write_bytes(b"new")
    _refused(source, to, UsageError)


def test_two_processes_do_not_write_one_pack(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=4)
    to = tmp_path / "pack"
    to.mkdir()
    fd = os.open(to, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _refused(source, to, LockedError)
    finally:
        os.close(fd)
    assert pack(source, to).pack is not None


@pytest.mark.parametrize(("name", "number"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_a_source_that_is_no_directory_is_an_error_of_the_source(
    tmp_path: Path, name: str, number: int
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        pack(tmp_path / name, tmp_path / "pack")
    assert caught.value.errno == number
    assert not (tmp_path / "pack").exists()


def test_an_empty_tree_and_one_of_empty_files_are_packs(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    report = pack(tmp_path / "source", tmp_path / "empty")
    assert report.pack is not None
    assert (report.pack.files, report.pack.entries, report.pack.chunks) == (0, 1, 0)
    for number in range(3):
        (tmp_path / f"source/{number}").write_bytes(b"")
    report = pack(tmp_path / "source", tmp_path / "three")
    assert report.pack is not None
    assert (report.pack.files, report.pack.bytes, report.pack.chunks) == (3, 0, 0)


def test_a_wide_directory_is_listed_whole(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    names = [f"{number:05d}" for number in range(700)]
    random.Random(1).shuffle(names)
    for name in names:
        (tmp_path / "source" / name).write_bytes(name.encode())
    report = pack(tmp_path / "source", tmp_path / "pack", chunk=1 << 20)
    assert report.pack is not None
    assert (report.pack.files, report.pack.chunks) == (700, 1)
