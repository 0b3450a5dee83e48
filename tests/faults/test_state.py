"""State that is locked, damaged or of another version: refused or made anew.

In both cases a line reports it, and nothing of the old state is served. The tests do not depend on
the way of reading.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest
import xxhash

from monarch.config.defaults import readable_name
from monarch.namespace.schema import META, key, seal
from monarch.namespace.trailer import append_trailer
from tests.conftest import MonarchCommand, Mounted, Tree, contents, own_directory
from tests.equipment.inotify import OpenCounter
from tests.mount.command import needs_fuse, not_mounted, one_line, registered, start
from tests.mount.compare import assert_equal_trees
from tests.mount.observe import (
    accounts_agree,
    copies,
    epoch,
    flip_bit,
    resident,
    settled,
)

pytestmark = [needs_fuse, pytest.mark.modes("auto")]

OPTIONS = ["limits.scrub_bandwidth=0"]


def files() -> dict[str, bytes]:
    return {f"{n % 3}/{n}.jpg": contents(str(n), 20_000 + n) for n in range(12)}


def make(source: Path, content: Mapping[str, bytes]) -> None:
    for name, data in content.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "link").symlink_to("0/0.jpg")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source, and state and tiers in which all of it is resident after a clean end."""

    source: Path
    content: Mapping[str, bytes]
    directory: Path

    def put(self, where: Path) -> None:
        for name in ("state", "tiers"):
            subprocess.run(["cp", "-a", str(self.directory / name), str(where)], check=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    directory = tmp_path_factory.mktemp("prepared")
    source, content = directory / "source", files()
    make(source, content)
    monarch = MonarchCommand(directory, uuid.uuid4().hex)
    try:
        mounted = monarch.mount(source, options=OPTIONS)
        epoch(mounted, content)
        settled(mounted)
        assert set(resident(mounted, content)) == set(content)
        mounted.umount()
    finally:
        monarch.close()
    # A test begins with a log of its own.
    (mounted.state / "daemon.log").unlink()
    return Prepared(source, content, directory)


def all_warm(mounted: Mounted, prepared: Prepared) -> None:
    assert set(resident(mounted, prepared.content)) == set(prepared.content)
    with OpenCounter(prepared.source) as counter:
        epoch(mounted, prepared.content)
        assert counter.count() == 0
    accounts_agree(mounted)


def refused(monarch: MonarchCommand, prepared: Prepared, *arguments: str) -> tuple[int, str]:
    """The exit code and the line of a mount that is refused."""
    directory = monarch.directory
    (directory / "mnt").mkdir(exist_ok=True)
    done = not_mounted(
        monarch,
        directory / "mnt",
        *("mount", str(prepared.source), str(directory / "mnt")),
        *("--state", str(directory / "state"), "--tier", f"{directory}/tiers/fast:10MiB"),
        *arguments,
    )
    line = one_line(done)
    log = (directory / "state/daemon.log").read_text()
    assert line.partition("; ")[0] in log
    return done.returncode, line


def everything(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Each file of state and tiers, but for the log and who had the lock last."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for name in ("state", "tiers")
        for path in (directory / name).rglob("*")
        if path.is_file() and path.name not in ("daemon.log", "lock")
    }


# -- two daemons -----------------------------------------------------------------------------------


@pytest.mark.fault("T7")
def test_of_two_mounts_begun_at_the_same_time_one_is_refused(
    monarch: MonarchCommand, prepared: Prepared
) -> None:
    prepared.put(monarch.directory)
    for _ in range(2):
        running = []
        for name in ("mnt", "other"):
            mnt = monarch.directory / name
            mnt.mkdir(exist_ok=True)
            where = ["--state", str(monarch.directory / "state")]
            where += ["--tier", f"{monarch.directory}/tiers/fast:10MiB"]
            registered(monarch, mnt, prepared.source, monarch.directory / "state")
            running.append((mnt, start(monarch, "mount", str(prepared.source), str(mnt), *where)))
        results = {mnt: (process.wait(), process.communicate()[1]) for mnt, process in running}
        won = [mnt for mnt, (code, _) in results.items() if code == 0]
        lost = [words for code, words in results.values() if code == 7]
        assert (len(won), len(lost)) == (1, 1), results
        assert "is in use by" in lost[0]
        made = next(mounted for mounted in monarch.mounted if mounted.path == won[0])
        epoch(made, prepared.content)
        made.umount()


# -- other versions --------------------------------------------------------------------------------


def newer_records(directory: Path) -> None:
    (path,) = (directory / "state").glob("residency-*")
    raw = path.read_bytes()
    header = {**json.loads(raw[:4096]), "version": 3, "more": True}
    path.write_bytes(json.dumps(header).encode().ljust(4096) + raw[4096:])


def newer_records_of_another_snapshot(directory: Path) -> None:
    (path,) = (directory / "state").glob("residency-*")
    other = path.with_name("residency-0123456789abcdef")
    other.write_bytes(path.read_bytes())
    header = {**json.loads(other.read_bytes()[:4096]), "version": 3}
    other.write_bytes(json.dumps(header).encode().ljust(4096) + other.read_bytes()[4096:])


def newer_tier(directory: Path) -> None:
    path = own_directory(directory / "tiers/fast") / "tier.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))


def newer_snapshot(directory: Path) -> None:
    path = directory / "state/snapshot.lmdb"
    content = {"version": 3, "more": 1}
    _rewrite(path, META, seal(META, json.dumps(content).encode()))


def older_snapshot(directory: Path) -> None:
    path = directory / "state/snapshot.lmdb"
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
        with environment.begin() as transaction:
            fields = json.loads(transaction.get(META)[8:])
    _rewrite(path, META, seal(META, json.dumps({**fields, "version": 0}).encode()))


def _rewrite(path: Path, name: bytes, value: bytes) -> None:
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 30) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(name, value)
        page_bytes = environment.stat()["psize"]
    append_trailer(path, page_bytes=page_bytes)


@pytest.mark.fault("T8", "S11")
@pytest.mark.promise(49)
@pytest.mark.parametrize(
    ("write", "code", "words"),
    [
        (newer_records, 6, "is of version 3, this Monarch knows 2"),
        (newer_records_of_another_snapshot, 6, "is of version 3, this Monarch knows 2"),
        (newer_tier, 6, "is of version 2, this Monarch knows 1"),
        (newer_snapshot, 5, "has format version 3, this Monarch reads 2"),
    ],
)
def test_files_of_a_newer_monarch_are_refused_and_kept_to_the_byte(
    monarch: MonarchCommand,
    prepared: Prepared,
    write: Callable[[Path], None],
    code: int,
    words: str,
) -> None:
    monarch.expects_log(words)
    prepared.put(monarch.directory)
    write(monarch.directory)
    before = everything(monarch.directory)
    for arguments in ((), ("--refresh",)):
        returned, line = refused(monarch, prepared, *arguments)
        assert (returned, words in line, "mount with" in line or "install" in line) == (
            *(code, True),
            True,
        ), line
        assert everything(monarch.directory) == before
    # The version of Monarch that wrote it finds all of it.
    prepared.put(monarch.directory)
    for path in (monarch.directory / "state").glob("residency-0123456789abcdef"):
        path.unlink()
    all_warm(monarch.mount(prepared.source, options=OPTIONS), prepared)


@pytest.mark.fault("T8")
@pytest.mark.promise(45)
def test_copies_of_the_version_before_are_taken_over_and_each_is_verified_once(
    monarch: MonarchCommand, prepared: Prepared
) -> None:
    monarch.expects_log("digest")
    prepared.put(monarch.directory)
    directory = monarch.directory
    # That one wrote neither terms nor seals, nor a version into the tier.
    (path,) = (directory / "state").glob("residency-*")
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[:4096])
    del header["term"]
    raw[:4096] = json.dumps({**header, "version": 1}).encode().ljust(4096)
    for ino in range(1, (len(raw) - 4096) // 64):
        at = 4096 + 64 * ino
        if raw[at]:
            raw[at + 4 : at + 8] = bytes(4)
            check = xxhash.xxh3_64_intdigest(bytes(raw[at : at + 56]), seed=ino)
            raw[at + 56 : at + 64] = check.to_bytes(8, "little")
    path.write_bytes(raw)
    name = own_directory(directory / "tiers/fast") / "tier.json"
    name.write_text(json.dumps({"id": json.loads(name.read_text())["id"]}))
    # Nor did it know of several mounts in one tier.
    for path in name.parent.iterdir():
        path.rename(directory / "tiers/fast/monarch" / path.name)
    name.parent.rmdir()
    held = sorted((directory / "tiers/fast/monarch").glob("copies-*/*/*"))
    for copy in held:
        os.utime(copy)
    flip_bit(held[3], 1000)
    again = monarch.mount(prepared.source, options=OPTIONS)
    assert "is of version 1, now 2: each copy is verified at its first use" in again.log_text
    assert {path.name for path in (directory / "tiers/fast/monarch").iterdir()} == {
        readable_name(again.state)
    }
    assert set(resident(again, prepared.content)) == set(prepared.content)
    with OpenCounter(prepared.source) as counter:
        epoch(again, prepared.content)
        settled(again)
        assert counter.count() == 1
    accounts_agree(again)
    again.umount()
    sealed = {path: path.stat().st_mtime_ns for path in copies(again)["fast"].values()}
    # They have seals of their own, and keep them.
    assert all(moment < 1 << 60 for moment in sealed.values())
    later = monarch.mount(prepared.source, options=OPTIONS)
    all_warm(later, prepared)
    assert {path: path.stat().st_mtime_ns for path in sealed} == sealed


@pytest.mark.fault("T8", "S11")
def test_names_of_an_older_format_are_read_anew_and_the_copies_stay(
    monarch: MonarchCommand, prepared: Prepared
) -> None:
    monarch.expects_log("building the snapshot anew: .* has format version 0")
    prepared.put(monarch.directory)
    older_snapshot(monarch.directory)
    again = monarch.mount(prepared.source, options=OPTIONS)
    assert_equal_trees(prepared.source, again.path)
    all_warm(again, prepared)


@pytest.mark.fault("T8")
def test_unreadable_records_are_started_anew_and_a_line_reports_it(
    monarch: MonarchCommand, prepared: Prepared
) -> None:
    monarch.expects_log("cannot be read, so copies are made again")
    prepared.put(monarch.directory)
    (path,) = (monarch.directory / "state").glob("residency-*")
    path.write_bytes(b"\xff" * 4096 + path.read_bytes()[4096:])
    own = own_directory(monarch.directory / "tiers/fast")
    own.rename(own.with_name(readable_name(monarch.directory / "state")))
    again = monarch.mount(prepared.source, options=OPTIONS)
    assert resident(again, prepared.content) == {}
    epoch(again, prepared.content)
    settled(again)
    accounts_agree(again)


# -- snapshots -------------------------------------------------------------------------------------


def _value_of(name: bytes) -> Callable[[Path], int]:
    """Where the bytes of a value are, by its key: in the middle of them."""

    def find(path: Path) -> int:
        with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
            with environment.begin() as transaction:
                value = transaction.get(name)
        assert value is not None, name
        return path.read_bytes().index(value) + len(value) // 2

    return find


def _tree_page(path: Path) -> int:
    """Within the page by which LMDB finds the values: the last entry's key."""
    content = path.read_bytes()
    for page in range(2, len(content) // 4096):
        number = int.from_bytes(content[page * 4096 : page * 4096 + 8], "little")
        flags = int.from_bytes(content[page * 4096 + 10 : page * 4096 + 12], "little")
        if number == page and flags == 2:
            return page * 4096 + 4090
    raise AssertionError("no leaf")


PAGES: Mapping[str, Callable[[Path], int]] = {
    "first page": lambda _: 16,
    "second page": lambda _: 4096 + 130,
    "tree": _tree_page,
    "summary": _value_of(META),
    "curve": _value_of(b"curve"),
    "inodes": _value_of(key(b"i", 0)),
    "names": _value_of(key(b"n", 0)),
    "links": _value_of(key(b"l", 0)),
    "children": _value_of(key(b"c", 0)),
    "checksums": lambda path: path.stat().st_size - 20,
    "end": lambda path: path.stat().st_size - 1,
}


@pytest.mark.fault("S11")
@pytest.mark.parametrize(
    ("page", "freshness"), [*((page, "never") for page in PAGES), ("names", "mount")]
)
def test_a_flipped_bit_in_the_snapshot_of_a_state_is_found_and_the_names_are_read_anew(
    monarch: MonarchCommand, prepared: Prepared, page: str, freshness: str
) -> None:
    monarch.expects_log("building the snapshot anew: ")
    prepared.put(monarch.directory)
    snapshot = monarch.directory / "state/snapshot.lmdb"
    flip_bit(snapshot, PAGES[page](snapshot))
    options = [*OPTIONS, f"snapshot.freshness={freshness}"]
    again = monarch.mount(prepared.source, options=options)
    assert_equal_trees(prepared.source, again.path)
    all_warm(again, prepared)


@pytest.mark.fault("S11")
@pytest.mark.parametrize("page", ["tree", "curve", "inodes", "names", "links", "children"])
def test_a_flipped_bit_in_a_given_snapshot_is_refused_and_the_file_kept(
    monarch: MonarchCommand, prepared: Prepared, page: str
) -> None:
    prepared.put(monarch.directory)
    snapshot = (monarch.directory / "state/snapshot.lmdb").rename(monarch.directory / "given")
    flip_bit(snapshot, PAGES[page](snapshot))
    before = snapshot.read_bytes()
    code, line = refused(monarch, prepared, "--snapshot", str(snapshot))
    assert (code, "is damaged" in line, str(snapshot) in line) == (5, True, True), line
    assert snapshot.read_bytes() == before


@pytest.mark.fault("S11")
@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 30_000, -4096, -1])
def test_a_snapshot_cut_short_is_found_and_the_names_are_read_anew(
    monarch: MonarchCommand, prepared: Prepared, size: int
) -> None:
    monarch.expects_log("building the snapshot anew: ")
    prepared.put(monarch.directory)
    snapshot = monarch.directory / "state/snapshot.lmdb"
    os.truncate(snapshot, size if size >= 0 else snapshot.stat().st_size + size)
    again = monarch.mount(prepared.source, options=OPTIONS)
    assert_equal_trees(prepared.source, again.path)
    all_warm(again, prepared)


@pytest.mark.fault("S11")
def test_a_state_of_another_source_gives_neither_its_names_nor_its_bytes(
    monarch: MonarchCommand, prepared: Prepared, tree: Tree
) -> None:
    monarch.expects_log("building the snapshot anew: .* describes another source")
    prepared.put(monarch.directory)
    # The same names and sizes, and the same times as far as they can be set.
    content = {name: bytes(len(data)) for name, data in prepared.content.items()}
    source = tree(content)
    for name in content:
        status = (prepared.source / name).stat()
        os.utime(source / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    mounted = monarch.mount(source, options=OPTIONS)
    assert_equal_trees(source, mounted.path)
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        settled(mounted)
        assert counter.count() in (0, len(content))
    accounts_agree(mounted)
