"""The snapshot of a pack: the entries of the original tree, and the same each time."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from monarch.daemon.peers import set_name_of
from monarch.namespace.build import build, write
from monarch.namespace.snapshot import Snapshot
from monarch.packmount import tree as tree_module
from monarch.packmount.source import PackSource
from monarch.packmount.tree import PackTree, snapshot_id
from monarch.packs.format import Entry
from monarch.packs.index import Index, encode_index
from monarch.packs.pack import Pack, summary_of
from monarch.posix.buckets import BUCKETS
from monarch.types import ROOT_INO, Ino
from tests.packs.trees import make_tree, pack, two_packs


def snapshot_of(directory: Path, target: Path) -> Snapshot:
    with Pack.open(os.fsencode(directory)) as opened:
        tree = PackTree(opened)
        write(
            tree,
            target,
            source=os.fsencode(directory),
            mode=None,
            progress=None,
            expected=None,
            snapshot_id=tree.id,
            buckets=tree.buckets,
        )
    return Snapshot.open(target)


def entries(
    snapshot: Snapshot, directory: Ino = ROOT_INO, path: bytes = b""
) -> dict[bytes, object]:
    """What is shown of each entry; files with several names have one number."""
    found: dict[bytes, object] = {}
    for name, shown in snapshot.list_from(directory, 0):
        below = path + b"/" + name
        found[below] = (
            *(shown.ino, shown.mode, shown.uid, shown.gid, shown.mtime_ns),
            *(snapshot.acls(shown.ino), 0 if shown.is_dir else (shown.size, shown.nlink)),
            snapshot.readlink(shown.ino) if shown.mode & 0o170000 == 0o120000 else b"",
        )
        if shown.is_dir:
            found |= entries(snapshot, shown.ino, below)
    return found


@pytest.mark.promise(230)
def test_the_snapshot_has_the_entries_of_the_original_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make_tree(tmp_path / "original")
    pack(original, tmp_path / "pack")
    build(original, tmp_path / "scanned")
    with Snapshot.open(tmp_path / "scanned") as scanned:
        for batch in (tree_module._BATCH, 3):
            monkeypatch.setattr(tree_module, "_BATCH", batch)
            with snapshot_of(tmp_path / "pack", tmp_path / f"packed-{batch}") as packed:
                assert entries(packed) == entries(scanned)
                now, then = packed.info(), scanned.info()
                assert (now.files, now.aliases, now.bytes_total, now.entries) == (
                    *(then.files, then.aliases, then.bytes_total, then.entries),
                )


@pytest.mark.promise(226)
def test_directories_in_a_deep_one_take_no_memory_for_their_paths() -> None:
    path = b"/".join([b"d" * 250] * 200)
    entries = [Entry(b"%s/%04d" % (path, number), stat.S_IFDIR | 0o755) for number in range(1000)]
    raw = encode_index(entries, [])
    info = summary_of(raw, large=0, chunk_bytes=4096, seed=0, order="path")
    with Pack(b"", -1, info, raw, Index(raw)) as opened:
        tracemalloc.start()
        try:
            assert sum(len(batch.names) for batch in PackTree(opened).batches()) == 1201
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # Each path has 50 KB.
    assert most < 1000 * len(path) // 10


def test_the_same_pack_has_the_same_snapshot_id_and_another_pack_another(tmp_path: Path) -> None:
    original = make_tree(tmp_path / "original")
    ids = set()
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        pack(original, tmp_path / name, seed=seed)
        with Pack.open(os.fsencode(tmp_path / name)) as opened:
            ids.add(snapshot_id(opened.info))
    assert len(ids) == 2


@pytest.mark.promise(233)
def test_nodes_share_no_copies_of_packs_that_differ_only_in_bytes(tmp_path: Path) -> None:
    packs = two_packs(tmp_path)
    sources = [PackSource(os.fsencode(each)) for each in packs]
    snapshots = [snapshot_of(each, tmp_path / f"{each.name}.lmdb") for each in packs]
    names = [set_name_of(*each) for each in zip(snapshots, sources, strict=True)]
    assert names[0] != names[1]
    assert set_name_of(snapshots[0], sources[0]) == names[0]
    # The records are the same.
    assert len({each.content_digest() for each in snapshots}) == 1
    for opened in (*snapshots, *sources):
        opened.close()


@pytest.mark.promise(231)
def test_the_files_of_a_chunk_are_admitted_together(tmp_path: Path) -> None:
    pack(make_tree(tmp_path / "original"), tmp_path / "pack")
    source = PackSource(os.fsencode(tmp_path / "pack"))
    with snapshot_of(tmp_path / "pack", tmp_path / "snapshot") as snapshot:
        buckets_of = set()
        expected = np.zeros(BUCKETS, np.uint64)
        for chunk in range(source.info.chunks):
            members = source.files.members(chunk).astype(np.uint64)
            (bucket,) = set(source.files.buckets(members).tolist())
            assert {source.files.bucket(int(number)) for number in members} == {bucket}
            buckets_of.add(bucket)
            expected[bucket] += np.uint64(
                source.files.extents(source.files.members(chunk))[1].sum()
            )
        assert len(buckets_of) == source.info.chunks
        curve = snapshot.curve()
        assert int(curve.sum()) == snapshot.bytes_total
        assert (curve >= expected).all()
    source.close()
