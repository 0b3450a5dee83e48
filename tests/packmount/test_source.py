"""The bytes of a mounted pack: extents, large files, damage, and descriptors."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.errors import PackError, SourceChanged
from monarch.packmount import source as source_module
from monarch.packmount.source import PackSource, open_source
from monarch.packs.pack import Pack, chunk_name, large_name
from monarch.tiers.source import Source, identity_of, read_open
from monarch.types import Identity
from tests.packs.trees import contents, copied, make_tree, pack, two_packs


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    original = make_tree(tmp_path_factory.mktemp("packed") / "original")
    pack(original, original.parent / "pack")
    return original


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """A pack that the test may damage."""
    return copied(original.parent / "pack", tmp_path / "pack")


@pytest.fixture
def source(directory: Path) -> Iterator[PackSource]:
    before = len(os.listdir("/proc/self/fd"))
    opened = PackSource(os.fsencode(directory))
    yield opened
    opened.close()
    # A mapped index is closed with the last reference to it.
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def identities(directory: Path) -> dict[str, Identity]:
    """The version of each file, as the snapshot of the pack has it."""
    found = {}
    with Pack.open(os.fsencode(directory)) as opened:
        for number in range(1, opened.info.entries + 1):
            record = opened.record(number)
            if record.link:
                size, time_ns = record.size, record.mtime_ns
                path = os.fsdecode(record.path)
                found[path] = Identity(size, time_ns, time_ns, record.link)
    return found


def in_chunk(directory: Path, chunk: int) -> list[str]:
    with Pack.open(os.fsencode(directory)) as opened:
        return [os.fsdecode(opened.record(int(n)).path) for n in opened.chunk_numbers(chunk)]


def test_each_file_has_its_bytes_by_its_number(
    original: Path, directory: Path, source: PackSource
) -> None:
    versions, expected = identities(directory), contents(original)
    assert versions.keys() == expected.keys() - {"symbolic"}
    opens = 0
    for path, version in versions.items():
        # The path is not used: the number leads to the bytes.
        fetched = source.fetch(b"elsewhere", version)
        assert fetched.data == expected[path], path
        opens += fetched.opens
    # Each chunk once, and each large file.
    assert opens == source.info.chunks + source.info.large


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_open_file_gives_verified_bytes_that_stay(
    original: Path,
    directory: Path,
    source: PackSource,
    monkeypatch: pytest.MonkeyPatch,
    in_memory: bool,
) -> None:
    monkeypatch.setattr(source_module, "_MOST_HELD", 1 << 20 if in_memory else 0)
    expected = contents(original)
    for path, version in identities(directory).items():
        file = source.open_version(b"", version)
        assert identity_of(file.status) == file.identity_now() == version
        assert read_open(file, version).data == expected[path]
        file.release()
    assert source._held == 0


def test_another_version_is_refused(directory: Path, source: PackSource) -> None:
    version = identities(directory)["class0/000.jpg"]
    size, time_ns = version.size, version.mtime_ns
    for other in (
        Identity(size + 1, time_ns, time_ns, version.source_ino),
        Identity(size, time_ns, time_ns, 1 << 40),
        Identity(size, time_ns, time_ns, 0),
    ):
        with pytest.raises(SourceChanged):
            source.fetch(b"class0/000.jpg", other)


@pytest.mark.promise(233)
@pytest.mark.parametrize("how", ["flipped", "cut off", "missing", "fifo", "directory"])
def test_damage_costs_its_files_only_and_ends_when_it_is_mended(
    original: Path, directory: Path, source: PackSource, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    versions, expected = identities(directory), contents(original)
    files, place = in_chunk(directory, 1), directory / os.fsdecode(chunk_name(1))
    with Pack.open(os.fsencode(directory)) as opened:
        third = opened.record(versions[files[2]].source_ino)
    intact = place.read_bytes()
    lost, found_in = set(files), len(files)
    if how == "flipped":
        raw = bytearray(intact)
        raw[third.offset + third.size - 1] ^= 1
        place.write_bytes(raw)
        lost, found_in = {files[2]}, 1
    elif how == "cut off":
        place.write_bytes(intact[: third.offset + third.size - 1])
        lost = set(files[2:])
        found_in = len(lost)
    else:
        place.unlink()
        if how == "fifo":
            os.mkfifo(place)
        elif how == "directory":
            place.mkdir()
    # All names of a file are lost with it.
    numbers = {versions[path].source_ino for path in lost}
    for _ in range(2):
        for path, version in versions.items():
            if version.source_ino in numbers:
                with pytest.raises(OSError) as caught:
                    source.fetch(b"", version)
                assert caught.value.errno == errno.EIO
            else:
                assert source.fetch(b"", version).data == expected[path]
    (found,) = source.damage.files()
    assert (found.name, found.entries) == (os.fsdecode(chunk_name(1)), found_in)
    assert caplog.text.count("of the pack") == 1
    if how == "directory":
        place.rmdir()
    else:
        place.unlink(missing_ok=True)
    place.write_bytes(intact)
    for path in files:
        assert source.fetch(b"", versions[path]).data == expected[path]
    assert not source.damage.files()


@pytest.mark.promise(233)
def test_a_chunk_that_is_back_is_not_damaged_whichever_of_its_files_is_read(
    original: Path, directory: Path, source: PackSource
) -> None:
    versions, (_, second, third, *_) = identities(directory), in_chunk(directory, 1)
    place = directory / os.fsdecode(chunk_name(1))
    place.rename(place.with_suffix(".away"))
    with pytest.raises(OSError, match="No such file"):
        source.fetch(b"", versions[second])
    assert source.damage.files()
    place.with_suffix(".away").rename(place)
    assert source.fetch(b"", versions[third]).data == contents(original)[third]
    assert not source.damage.files()


@pytest.mark.promise(233)
def test_a_chunk_that_the_daemon_may_not_read_is_reported(
    directory: Path, source: PackSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, (first, *_) = identities(directory), in_chunk(directory, 1)

    def refusing(root: int, path: bytes, flags: int) -> int:
        if path == chunk_name(1):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_beneath(root, path, flags)

    with monkeypatch.context() as patched:
        open_beneath = source_module.open_beneath
        patched.setattr(source_module, "open_beneath", refusing)
        with pytest.raises(OSError) as caught:
            source.fetch(b"", versions[first])
        assert caught.value.errno == errno.EIO
        (found,) = source.damage.files()
        assert (found.name, found.what) == (
            *(os.fsdecode(chunk_name(1)), "may not be read by the user of the daemon"),
        )
    source.fetch(b"", versions[first])
    assert not source.damage.files()


def test_a_chunk_that_is_replaced_is_read_on_by_its_descriptor(
    original: Path, directory: Path, source: PackSource
) -> None:
    versions, expected = identities(directory), contents(original)
    first, second, *_ = in_chunk(directory, 0)
    assert source.fetch(b"", versions[first]).opens == 1
    place = directory / os.fsdecode(chunk_name(0))
    place.rename(place.with_suffix(".old"))
    place.write_bytes(b"another chunk")
    fetched = source.fetch(b"", versions[second])
    assert (fetched.data, fetched.opens) == (expected[second], 0)


def test_a_large_file_of_another_size_or_content_is_damaged(
    directory: Path, source: PackSource
) -> None:
    version = identities(directory)["large"]
    with Pack.open(os.fsencode(directory)) as opened:
        place = directory / os.fsdecode(large_name(opened.record(version.source_ino).offset))
    raw = bytearray(place.read_bytes())
    raw[0] ^= 1
    place.write_bytes(raw)
    with pytest.raises(OSError, match="damaged"):
        source.fetch(b"", version)
    place.write_bytes(raw[:-1])
    with pytest.raises(OSError, match="damaged"):
        source.open_version(b"", version)


def test_a_few_descriptors_of_chunks_stay_open(
    directory: Path, source: PackSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source._open_chunks, "_most", 2)
    before = len(os.listdir("/proc/self/fd"))
    for version in identities(directory).values():
        source.fetch(b"", version)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_an_index_that_is_damaged_is_refused(directory: Path) -> None:
    index = directory / "index"
    raw = bytearray(index.read_bytes())
    raw[-1] ^= 1
    index.write_bytes(raw)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PackError):
        open_source(os.fsencode(directory))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_index_is_read_at_the_source_once_for_all_mounts_of_a_node(
    directory: Path, tmp_path: Path
) -> None:
    kept, index = tmp_path / "kept", directory / "index"
    PackSource(os.fsencode(directory), kept=kept).close()
    assert kept.read_bytes() == index.read_bytes()
    assert kept.stat().st_mode & 0o777 == 0o600
    raw = index.read_bytes()
    index.unlink()
    again = PackSource(os.fsencode(directory), kept=kept)
    assert again.info.entries == len(again.files.chunk) - 1
    again.close()
    # One that is cut off, or is missing, is not used.
    for content in (raw[:-1], b"", None):
        kept.unlink() if content is None else kept.write_bytes(content)
        with pytest.raises(PackError):
            PackSource(os.fsencode(directory), kept=kept)
    index.write_bytes(raw)
    PackSource(os.fsencode(directory), kept=kept).close()
    assert kept.read_bytes() == raw


def test_the_kept_index_of_another_pack_is_not_used(tmp_path: Path) -> None:
    packs, kept = two_packs(tmp_path), tmp_path / "kept"
    for each in packs:
        opened = PackSource(os.fsencode(each), kept=kept)
        with Pack.open(os.fsencode(each)) as expected:
            assert opened.files.digest.tolist() == expected.digest_of.tolist()
        opened.close()
        assert kept.read_bytes() == (each / "index").read_bytes()


def test_an_index_that_is_not_sound_is_not_kept(directory: Path, tmp_path: Path) -> None:
    index, kept = directory / "index", tmp_path / "kept"
    raw = bytearray(index.read_bytes())
    raw[-1] ^= 1
    index.write_bytes(raw)
    with pytest.raises(PackError):
        PackSource(os.fsencode(directory), kept=kept)
    assert not kept.exists()


def test_a_mount_needs_no_room_for_the_index(directory: Path, tmp_path: Path) -> None:
    opened = PackSource(os.fsencode(directory), kept=tmp_path / "missing" / "kept")
    assert opened.info.entries
    opened.close()


def test_a_directory_is_no_pack(original: Path) -> None:
    opened = open_source(os.fsencode(original))
    assert type(opened) is Source
    opened.close()
