"""The chunk-wise order of the files of a pack: their chunks, by all the ways to name them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from monarch.control.registry import MountRecord, Registry
from monarch.errors import CheckpointError, PackError
from monarch.frameworks import pack_order
from monarch.order import chunks_of_files, distinct_labels, pack_sampler
from monarch.packs.pack import Pack
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.text import escape_text
from tests.packs.test_unpack import as_user, needs_root
from tests.packs.trees import copied, pack

CLASSES, FILES = 6, 240


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory with the packs ``random`` and ``path`` of one tree, and its files."""
    top = tmp_path_factory.mktemp("packs")
    paths = [f"class{number % CLASSES}/{number:03d}" for number in range(FILES)]
    for path in [*paths, "class0/empty 1", "class0/empty 2", "large"]:
        file = top / "source" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        size = 9000 if path == "large" else 0 if "empty" in path else 400
        file.write_bytes(path.encode()[:1] * size)
    for order in ("random", "path"):
        pack(top / "source", top / order, order=order, chunk=4096)
    return top, paths


def labels_of(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    return np.array([int(path[5]) for path in paths])


def test_each_file_is_in_the_chunk_that_its_record_names(made: tuple[Path, list[str]]) -> None:
    top, paths = made
    chunks = chunks_of_files(top / "random", paths)
    with Pack.open(os.fsencode(top / "random")) as opened:
        records = [opened.record(opened.number(path.encode())) for path in paths]
        assert chunks.tolist() == [record.chunk for record in records]
        assert len(set(chunks.tolist())) == opened.info.chunks == 24


def test_files_are_found_by_all_forms_of_their_names(
    made: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    top, paths = made
    expected = chunks_of_files(top / "random", paths).tolist()
    mountpoint = "/mnt/a mount of a test"
    table = [
        *mount_table(),
        MountedFileSystem(Path(mountpoint), "fuse.monarch", source=str(top / "path")),
        MountedFileSystem(Path(mountpoint), "fuse.monarch", source=str(top / "random")),
    ]
    monkeypatch.setattr(pack_order, "mount_table", lambda: table)
    for root, named in (
        (top / "random", [f"./{path}" for path in paths]),
        (str(top / "random"), [os.fsencode(top / "random" / path) for path in paths]),
        (mountpoint, [f"{mountpoint}/{path}" for path in paths]),
        (mountpoint + "/", paths),
        (top / "random", [f"{path}/../{path[-3:]}/" for path in paths]),
        (top / "random", [Path(path) if path[-1] in "02468" else path for path in paths]),
    ):
        assert chunks_of_files(root, named).tolist() == expected


def test_the_index_of_a_mount_of_this_node_is_used(
    made: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, paths = made
    expected = chunks_of_files(top / "random", paths).tolist()
    packed = copied(top / "random", tmp_path / "pack")
    monkeypatch.setenv("MONARCH_STATE_ROOT", str(tmp_path / "states"))
    state = tmp_path / "a state"
    state.mkdir()
    mount = MountRecord("/mnt/a", str(packed), 1, 1, "/socket", str(state), "/log", 1)
    Registry(tmp_path / "states").add(mount)
    raw = (packed / "index").read_bytes()
    (state / "pack-index").write_bytes(raw)
    (packed / "index").unlink()
    assert chunks_of_files(packed, paths).tolist() == expected
    # Not that of another pack, nor a damaged one.
    for other in ((top / "path" / "index").read_bytes(), raw[:-1]):
        (state / "pack-index").write_bytes(other)
        with pytest.raises(PackError):
            chunks_of_files(packed, paths)
        (packed / "index").write_bytes(raw)
        assert chunks_of_files(packed, paths).tolist() == expected
        (packed / "index").unlink()


def test_the_mount_table_has_the_source_of_a_mount() -> None:
    line = rb"45 27 0:42 / /mnt/a\040b ro,nosuid - fuse.monarch /packs/image\040net ro,user_id=0"
    (mounted,) = mount_table(line)
    assert (mounted.mount_point, mounted.kind) == (Path("/mnt/a b"), "fuse.monarch")
    assert (mounted.source, mounted.device, mounted.id) == ("/packs/image net", "0:42", 45)


def test_large_and_empty_files_have_a_chunk(made: tuple[Path, list[str]]) -> None:
    top, paths = made
    chunks = chunks_of_files(top / "random", [*paths, "large", "class0/empty 1", "class0/empty 2"])
    # The large file is alone; those of 0 bytes are in different chunks.
    assert np.count_nonzero(chunks == chunks[FILES]) <= 2
    assert len(set(chunks[FILES + 1 :].tolist())) == 2
    assert sorted(set(chunks.tolist())) == list(range(25))
    assert chunks_of_files(top / "random", ["class0/empty 1"]).tolist() == [0]
    assert chunks_of_files(top / "random", []).tolist() == []


def test_a_file_that_the_pack_does_not_have_is_named(made: tuple[Path, list[str]]) -> None:
    top, _ = made
    for path in ("class0/missing", "missing/000", "/etc/passwd", "../random/large", "", "a\0b"):
        named = re.escape(f"the pack has no {escape_text(path)!r}")
        with pytest.raises(ValueError, match=named):
            chunks_of_files(top / "random", [path])
    with pytest.raises(PackError, match="neither a pack nor the mount point"):
        chunks_of_files(top, ["large"])


@needs_root
def test_a_pack_that_the_user_may_not_read_is_called_so(
    made: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not below tmp_path: its parents are the owner's alone.
    with tempfile.TemporaryDirectory(prefix="monarch-pack-") as root:
        os.chmod(root, 0o755)
        packed = copied(made[0] / "random", Path(root) / "pack")
        packed.chmod(0o700)
        monkeypatch.setenv("MONARCH_STATE_ROOT", root)
        with as_user(1234), pytest.raises(PackError, match="/pack: Permission denied") as refused:
            chunks_of_files(packed, made[1])
    assert refused.value.hint == "name a pack that you may read"


@pytest.mark.parametrize("group", [1, 8, 40])
def test_the_ranks_of_a_node_read_each_chunk_once(made: tuple[Path, list[str]], group: int) -> None:
    top, paths = made
    chunks = chunks_of_files(top / "random", paths)
    ranks = [
        list(pack_sampler(top / "random", paths, group=group, seed=3, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert sorted(ranks[0] + ranks[1]) == list(range(FILES))
    order = [index for both in zip(*ranks, strict=True) for index in both]
    read, kept = 0, dict[int, None]()
    for chunk in chunks[order].tolist():
        read += chunk not in kept
        kept.pop(chunk, None)
        kept[chunk] = None
        while len(kept) > group + 1:
            del kept[next(iter(kept))]
    assert read == 24


def test_a_pack_in_random_order_mixes_labels_and_one_by_path_does_not(
    made: tuple[Path, list[str]],
) -> None:
    top, paths = made

    def labels(order: str) -> float:
        sampler = pack_sampler(top / order, paths, group=1, seed=3)
        return distinct_labels(list(sampler), labels_of(paths), 10)

    # Of 10 files from 6 classes at random, 5.0 are expected to differ: 6 * (1 - (5/6) ** 10).
    assert labels("random") > 4.5
    assert labels("path") < 3


def test_a_state_continues_with_the_same_pack_only(made: tuple[Path, list[str]]) -> None:
    top, paths = made
    sampler = pack_sampler(top / "random", paths, group=2, seed=3)
    sampler.consumed(100)
    state = sampler.state_dict()
    whole = list(pack_sampler(top / "random", paths, group=2, seed=3))
    again = pack_sampler(top / "random", paths, group=2, seed=3)
    again.load_state_dict(state)
    assert list(again) == whole[100:]
    with pytest.raises(CheckpointError):
        pack_sampler(top / "path", paths, group=2, seed=3).load_state_dict(state)
