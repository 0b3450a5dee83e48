"""A mount of a pack: the tree, the reads of chunks at the source, damage, and the commands."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from monarch.control.client import call
from monarch.frameworks.announce import announce
from monarch.order import chunks_of_files
from monarch.packs.pack import Pack, chunk_name
from tests.conftest import MonarchCommand, Mounted
from tests.equipment.slowfs import SlowSource, unavailable
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, needs_root
from tests.mount.observe import account, accounts_agree, error_of, settled
from tests.packs.trees import chunks_of, contents, make_tree, pack, shown, two_packs

pytestmark = [needs_fuse, needs_root]

CHUNK = 8192


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A tree with all kinds of entries, in about eight chunks."""
    original = make_tree(tmp_path / "original")
    os.setxattr(original / "class0.txt", b"user.label", b"seven")
    pack(original, tmp_path / "pack", chunk=CHUNK)
    return original


@pytest.fixture
def packed(original: Path, tmp_path: Path) -> Path:
    return tmp_path / "pack"


def read_chunks(mounted: Mounted) -> int:
    """The opens of the source so far."""
    opens: int = account(mounted)["source_totals"]["opens"]
    return opens


def can_be_read(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


@pytest.mark.promise(230)
def test_a_pack_shows_the_tree_that_it_was_made_of(
    monarch: MonarchCommand, original: Path, packed: Path
) -> None:
    mounted = monarch.mount(packed)
    assert shown(mounted.path) == shown(original)
    assert os.getxattr(mounted.path / "class0.txt", b"user.label") == b"seven"
    assert b"user.label" in map(os.fsencode, os.listxattr(mounted.path / "class0.txt"))
    with pytest.raises(OSError) as caught:
        (mounted.path / "new").write_bytes(b"")
    assert caught.value.errno == errno.EROFS
    settled(mounted)
    accounts_agree(mounted)
    status = account(mounted)
    assert status["health"]["state"] == "ok"
    assert status["pack"]["read"] == status["pack"]["chunks"]
    # One open for each chunk and each large file.
    with Pack.open(os.fsencode(packed)) as opened:
        assert status["source_totals"]["opens"] == opened.info.chunks + opened.info.large
    before = status["snapshot"]["id"]
    mounted.umount()
    mounted = monarch.mount(packed)
    assert account(mounted)["snapshot"]["id"] == before
    assert contents(mounted.path) == contents(original)
    assert read_chunks(mounted) == 0


@pytest.mark.promise(187)
@pytest.mark.modes("no_open")
def test_no_chunk_is_read_again_for_files_whose_pages_the_kernel_has(
    monarch: MonarchCommand, tmp_path: Path
) -> None:
    """No reader would get them from the window. The tier has room for half of the files."""
    files = {f"{number:03}": bytes([number]) * 500 for number in range(200)}
    (tmp_path / "original").mkdir()
    for name, content in files.items():
        (tmp_path / "original" / name).write_bytes(content)
    pack(tmp_path / "original", tmp_path / "pack", chunk=CHUNK)
    mounted = monarch.mount(tmp_path / "pack", tiers={"fast": str(200 * 500 // 2)})
    read = []
    for seed in range(3):
        order = random.Random(seed).sample(sorted(files), len(files))
        announced = announce(mounted.path / name for name in order)
        assert announced is not None
        wait_until(
            lambda: account(mounted)["foresight"]["announced"]["entries"] == len(files),
            "the mount has the order",
        )
        settled(mounted)
        assert all((mounted.path / name).read_bytes() == files[name] for name in order)
        announced.close()
        wait_until(
            lambda: settled(mounted)["foresight"]["window"]["files"] == 0, "the window is left"
        )
        read.append(account(mounted)["source_totals"]["bytes"])
    assert read[1:] == read[:1] * 2
    assert 0 < settled(mounted)["residency"]["files"] < len(files)


@pytest.mark.promise(230)
@pytest.mark.modes("relay")
def test_names_and_attributes_of_a_pack_cost_no_call_at_the_source(
    monarch: MonarchCommand, packed: Path, tmp_path: Path
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    first, *_ = chunks_of(packed)
    with SlowSource(packed, tmp_path / "slow", attribute_s=0) as slow:
        mounted = monarch.mount(slow.path)
        before = slow.counters()
        for command in (["ls", "-lR"], ["find"]):
            subprocess.run([*command, mounted.path], check=True, stdout=subprocess.DEVNULL)
        for _ in range(10_000 // len(first)):
            for name in first:
                os.stat(mounted.path / name)
        assert slow.counters() == before
        (mounted.path / first[0]).read_bytes()
        assert slow.counters()["open"] == before["open"] + 1
        mounted.umount()


@pytest.mark.promise(231)
@pytest.mark.modes("relay")
def test_a_daemon_killed_in_the_middle_of_a_chunk_leaves_right_copies_only(
    monarch: MonarchCommand, original: Path, packed: Path, tmp_path: Path
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    first, second, *_ = chunks_of(packed)
    with SlowSource(packed, tmp_path / "slow") as slow:
        mounted = monarch.mount(slow.path)
        (mounted.path / first[0]).read_bytes()
        settled(mounted)
        slow.rules(f"hang read {chunk_name(1).decode()}")
        reader = subprocess.Popen(["cat", mounted.path / second[0]], stdout=subprocess.DEVNULL)
        wait_until(lambda: slow.counters()["hanging"] > 0, "the chunk is being read")
        mounted.kill()
        slow.rules()
        reader.wait()
        mounted = monarch.mount(slow.path)
        before = slow.counters()["open"]
        for name in first:
            assert (mounted.path / name).read_bytes() == (original / name).read_bytes()
        assert slow.counters()["open"] == before
        assert contents(mounted.path) == contents(original)
        settled(mounted)
        accounts_agree(mounted)
        mounted.umount()


@pytest.mark.promise(233)
@pytest.mark.modes("relay")
def test_files_of_a_damaged_chunk_are_errors_and_all_others_are_served(
    monarch: MonarchCommand, original: Path, packed: Path
) -> None:
    damaged, cut = 1, 2
    files = chunks_of(packed)
    paths = {number: packed / chunk_name(number).decode() for number in (damaged, cut)}
    intact = {number: path.read_bytes() for number, path in paths.items()}
    mounted = monarch.mount(packed)
    with Pack.open(os.fsencode(packed)) as opened:
        bad = opened.record(opened.number(os.fsencode(files[damaged][3])))
        kept = opened.record(opened.number(os.fsencode(files[cut][2])))
    raw = bytearray(intact[damaged])
    raw[bad.offset] ^= 1
    paths[damaged].write_bytes(raw)
    paths[cut].write_bytes(intact[cut][: kept.offset])
    lost = [os.fsdecode(bad.path), *files[cut][2:]]
    monarch.expects_log(f"{chunk_name(damaged).decode()} of the pack is damaged")
    monarch.expects_log(f"{chunk_name(cut).decode()} of the pack is cut off")
    monarch.expects_log("source: .*Input/output error")
    for _ in range(2):
        for name in lost:
            assert error_of(mounted.path / name) == errno.EIO
    for name in chain.from_iterable(files):
        if name not in lost:
            assert (mounted.path / name).read_bytes() == (original / name).read_bytes()
    (problem,) = [
        it for it in account(mounted)["health"]["problems"] if it["kind"] != "source-errors"
    ]
    assert problem["kind"] == "pack-damaged"
    assert f"{len(lost)} files" in problem["what"]
    assert mounted.log_text.count("of the pack is damaged") == 1
    for number, path in paths.items():
        path.write_bytes(intact[number])
    for name in lost:
        assert (mounted.path / name).read_bytes() == (original / name).read_bytes()
    kinds = [it["kind"] for it in account(mounted)["health"]["problems"]]
    assert "pack-damaged" not in kinds


@pytest.mark.promise(233)
@pytest.mark.modes("relay")
def test_no_copy_of_another_pack_is_served(monarch: MonarchCommand, tmp_path: Path) -> None:
    first, second = two_packs(tmp_path)
    mounted = monarch.mount(first)
    assert contents(mounted.path) == contents(tmp_path / "tree0")
    settled(mounted)
    mounted.umount()
    # Another pack in its place, with files of the same numbers, sizes and times.
    first.rename(tmp_path / "earlier")
    second.rename(first)
    mounted = monarch.mount(first)
    assert contents(mounted.path) == contents(tmp_path / "tree1")
    mounted.umount()


@pytest.mark.modes("relay")
def test_a_pack_whose_file_system_is_lost_is_read_again_when_it_is_back(
    monarch: MonarchCommand, original: Path, packed: Path, tmp_path: Path
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    first, second, *_ = chunks_of(packed)
    with SlowSource(packed, tmp_path / "slow") as slow:
        mounted = monarch.mount(slow.path)
        (mounted.path / first[0]).read_bytes()
        settled(mounted)
        slow.kill()
        monarch.expects_log("source: ")
        assert error_of(mounted.path / second[0]) in (errno.ENOTCONN, errno.EIO)
        assert (mounted.path / first[1]).read_bytes() == (original / first[1]).read_bytes()
        slow.restart()
        wait_until(lambda: can_be_read(mounted.path / second[0]), "the pack is read again")
        assert contents(mounted.path) == contents(original)
        mounted.umount()


@pytest.mark.modes("relay")
def test_the_index_crosses_the_network_once_for_a_mount_and_its_trainers(
    monarch: MonarchCommand,
    original: Path,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    monkeypatch.setenv("MONARCH_STATE_ROOT", monarch.environment()["MONARCH_STATE_ROOT"])
    index = (packed / "index").stat().st_size
    with SlowSource(packed, tmp_path / "slow") as slow:

        def read() -> int:
            return slow.counters()["read_bytes"]

        before = read()
        mounted = monarch.mount(slow.path)
        assert index <= read() - before < 2 * index
        before = read()
        for root in (slow.path, mounted.path):
            assert len(chunks_of_files(root, ["class0.txt", "class1/001.jpg"])) == 2
        mounted.umount()
        mounted = monarch.mount(slow.path)
        assert read() - before < index
        assert contents(mounted.path) == contents(original)
        mounted.umount()


@pytest.mark.modes("relay")
def test_the_commands_for_a_mount_of_a_pack(
    monarch: MonarchCommand, original: Path, packed: Path, tmp_path: Path
) -> None:
    mounted = monarch.mount(packed, options=["write=absorb"])
    with pytest.raises(OSError, match="Read-only file system"):
        (mounted.path / "new").touch()
    warm = call(mounted.state / "control.sock", "warm", {"wait": True}, timeout=None)
    assert warm["refused"] == 0
    report = settled(mounted)
    with Pack.open(os.fsencode(packed)) as opened:
        assert report["residency"]["bytes"] == opened.info.bytes
        assert report["source_totals"]["opens"] == opened.info.chunks + opened.info.large
    assert monarch("fsck", str(mounted.path)).returncode == 0
    monarch("evict", str(mounted.path))
    assert settled(mounted)["residency"]["files"] == 0
