"""Damaged and hostile packs: each fault is found and named, and nothing else suffers."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from monarch.errors import LockedError, MonarchError, NewerPack, PackError, UsageError
from monarch.packs import verify as verifying
from monarch.packs.format import (
    HEADER_BYTES,
    PAYLOAD,
    TREE,
    Entry,
    decode_header,
    encode_header,
    encode_table,
)
from monarch.packs.pack import Pack
from monarch.packs.rebuild import RebuildReport, rebuild
from monarch.packs.verify import VerifyReport, verify
from monarch.posix.files import closing_fd
from tests.packs.test_format import FILE, FOLDER, extents, header_of
from tests.packs.trees import contents, copied, pack


def rebuilt(directory: Path) -> RebuildReport:
    return rebuild(directory, progress=lambda done, total, words: None)


def verified(directory: Path) -> VerifyReport:
    return verify(directory, jobs=2, progress=lambda done, total, words: None)


def served(directory: Path) -> dict[bytes, bytes]:
    """All files of a pack that can be read with the right digest."""
    found = {}
    with Pack.open(os.fsencode(directory)) as opened:
        opened.require_sound()
        for number in range(1, opened.info.entries + 1):
            record = opened.record(number)
            if record.chunk == -1:
                continue
            try:
                fd = (
                    opened.open_chunk(record.chunk)
                    if record.chunk >= 0
                    else opened.open_large(number)
                )
            except PackError:
                continue
            with closing_fd(fd):
                offset = record.offset if record.chunk >= 0 else 0
                raw = os.pread(fd, record.size, offset)
            if xxhash.xxh3_64_intdigest(raw) == record.digest:
                found[record.path] = raw
    return found


# -- the index is made again -----------------------------------------------------------------------


@pytest.mark.promise(225)
@pytest.mark.parametrize("names", [["index"], ["pack.json"], ["index", "pack.json"]])
def test_a_lost_index_is_made_again_with_the_same_bytes(own: Path, names: list[str]) -> None:
    before = contents(own)
    for name in names:
        (own / name).unlink()
    report = rebuilt(own)
    assert report.is_changed
    assert report.damage == []
    assert contents(own) == before
    assert not rebuilt(own).is_changed


def test_a_damaged_index_is_made_again(own: Path) -> None:
    before = contents(own)
    (own / "index").write_bytes(before["index"][:-9] + b"different")
    assert rebuilt(own).is_changed
    assert contents(own) == before


@pytest.mark.promise(225)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_chunk_that_is_cut_off_is_named_and_the_others_are_served(
    made: tuple[Path, Path], own: Path, share: float
) -> None:
    name = "chunks/000003.chunk"
    with Pack.open(os.fsencode(own)) as opened:
        lost = {opened.record(number).path for number in opened.chunk_numbers(3).tolist()}
        # The further names of a file are lost with its bytes.
        lost |= {
            opened.record(number).path
            for number in range(1, opened.info.entries + 1)
            if opened.record(number).chunk == 3
        }
    every = served(own)
    os.truncate(own / name, int((own / name).stat().st_size * share))
    (own / "index").unlink()
    report = rebuilt(own)
    assert [each.file for each in report.damage] == [name.encode()]
    assert served(own) == {path: raw for path, raw in every.items() if path not in lost}
    assert len(every) > len(lost) > 0
    assert any(each.file == name.encode() for each in verified(own).damage)
    # The negative twin: with the chunk whole, nothing is named, and all files are there.
    shutil.copyfile(made[1] / name, own / name)
    assert rebuilt(own).damage == []
    assert contents(own) == contents(made[1])


def test_a_sound_index_is_kept_if_it_knows_more_than_the_chunks(own: Path) -> None:
    before = contents(own)
    os.truncate(own / "chunks/000003.chunk", 50)
    report = rebuilt(own)
    assert report.is_kept
    assert [each.file for each in report.damage] == [b"chunks/000003.chunk"]
    assert (own / "index").read_bytes() == before["index"]


def test_without_the_tree_chunk_the_files_are_served(own: Path) -> None:
    every = served(own)
    (own / "chunks/tree.chunk").unlink()
    (own / "index").unlink()
    report = rebuilt(own)
    assert [each.file for each in report.damage] == [b"chunks/tree.chunk"]
    lost = {b"large", b"sparse", b"class1/link.jpg"}
    assert served(own) == {path: raw for path, raw in every.items() if path not in lost}


def test_chunks_in_another_place_are_named(own: Path) -> None:
    (own / "chunks/000001.chunk").rename(own / "chunks/000002.chunk")
    expected = {b"chunks/000001.chunk", b"chunks/000002.chunk"}
    assert {each.file for each in rebuilt(own).damage} == expected
    assert {each.file for each in verified(own).damage} == expected


def test_a_chunk_of_another_pack_is_named(
    own: Path, made: tuple[Path, Path], tmp_path: Path
) -> None:
    pack(made[0], tmp_path / "other", seed=8)
    shutil.copyfile(tmp_path / "other/chunks/000002.chunk", own / "chunks/000002.chunk")
    assert [each.file for each in rebuilt(own).damage] == [b"chunks/000002.chunk"]


def test_an_unfinished_pack_gets_no_index(own: Path) -> None:
    (own / "building").write_bytes(b"")
    (own / "pack.json").unlink()
    with pytest.raises(PackError, match="not finished"):
        rebuilt(own)
    assert not (own / "pack.json").exists()


def test_a_pack_in_work_is_not_rebuilt(own: Path) -> None:
    with closing_fd(os.open(own, os.O_RDONLY)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(LockedError):
            rebuilt(own)


def _newer(raw: bytes, digest_at: int) -> bytes:
    """A chunk or an index of version 2, with the right digest of its header."""
    header = raw[:8] + (2).to_bytes(4, "little") + raw[12:digest_at]
    digest = xxhash.xxh3_64_intdigest(header).to_bytes(8, "little")
    return header + digest + raw[digest_at + 8 :]


def _of_version_2(name: str, raw: bytes) -> bytes:
    if name == "building":
        return b'{"format": "monarch-pack", "version": 2, "more": []}\n'
    if name == "pack.json":
        return raw.replace(b'"version": 1', b'"version": 2')
    return _newer(raw, 64 if name == "index" else 72)


@pytest.mark.promise(49)
@pytest.mark.parametrize("is_index_lost", [False, True])
@pytest.mark.parametrize("name", ["pack.json", "index", "chunks/000002.chunk", "chunks/tree.chunk"])
def test_a_pack_of_a_newer_monarch_is_refused_and_left_unchanged(
    made: tuple[Path, Path], own: Path, name: str, is_index_lost: bool
) -> None:
    (own / name).write_bytes(_of_version_2(name, (own / name).read_bytes()))
    if is_index_lost:
        # What a rebuild makes again, so that it has something to do.
        (own / ("pack.json" if name == "index" else "index")).unlink()
    before = contents(own)
    for command in (rebuilt, verified):
        with pytest.raises(NewerPack, match="version 2") as raised:
            command(own)
        assert str(raised.value).startswith(f"{own}: ")
        assert contents(own) == before
    # A chunk of another version is none of this pack, which is therefore another one.
    refusal = UsageError if "chunk" in name else NewerPack
    with pytest.raises(refusal):
        pack(made[0], own)
    assert contents(own) == before


@pytest.mark.promise(49)
def test_a_pack_that_a_newer_monarch_has_begun_is_left_to_it(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    (begun / "chunks").mkdir(parents=True)
    (begun / "chunks/000000.chunk").write_bytes(b"of another format")
    (begun / "building").write_bytes(_of_version_2("building", b""))
    before = contents(begun)
    with pytest.raises(NewerPack, match="version 2"):
        pack(made[0], begun)
    assert contents(begun) == before
    # The negative twin: what is of no version is made again.
    (begun / "building").unlink()
    (begun / "chunks/000000.chunk").unlink()
    (begun / "chunks").rmdir()
    assert pack(made[0], begun).pack is not None


# -- verify ----------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_new_pack(made: tuple[Path, Path]) -> None:
    with Pack.open(os.fsencode(made[1])) as opened:
        size = opened.info.bytes
    report = verified(made[1])
    assert (report.damaged, report.bytes) == (0, size)


@pytest.mark.promise(225)
def test_every_damaged_file_is_named(own: Path) -> None:
    with Pack.open(os.fsencode(own)) as opened:
        numbers = opened.chunk_numbers(2).tolist()[:2]
        records = [opened.record(number) for number in (*numbers, opened.number(b"large"))]
    for record in records:
        name = f"chunks/{record.chunk:06d}.chunk" if record.chunk >= 0 else "large/000000.data"
        with open(own / name, "r+b") as file:
            file.seek((record.offset if record.chunk >= 0 else 0) + record.size - 1)
            last = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([last[0] ^ 8]))
    report = verified(own)
    assert {each.path for each in report.damage} == {record.path for record in records}
    assert report.damaged == 3


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda top: (top / "large/000001.data").unlink(), b"large/000001.data"),
        (lambda top: os.truncate(top / "large/000000.data", 5), b"large/000000.data"),
        (lambda top: (top / "chunks/000000.chunk").unlink(), b"chunks/000000.chunk"),
        (lambda top: (top / "index").write_bytes(b""), b"index"),
        (lambda top: (top / "pack.json").write_bytes(b"{}"), b"index"),
    ],
    ids=["no large file", "short large file", "no chunk", "no index", "no description"],
)
def test_a_file_of_the_pack_that_is_wrong_is_named(
    own: Path, change: Callable[[Path], object], file: bytes
) -> None:
    change(own)
    assert {each.file for each in verified(own).damage} == {file}


def test_a_file_of_the_pack_that_cannot_be_opened_is_named(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is known without the permission to read it."""
    names = [b"large/000000.data", b"chunks/000002.chunk"]

    def open_beneath(root: int, name: bytes, flags: int) -> int:
        if name in names:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(root, name, flags)

    real = verifying.open_beneath
    monkeypatch.setattr(verifying, "open_beneath", open_beneath)
    what = {each.file: each.what for each in verified(own).damage}
    assert what == dict.fromkeys(names, "it cannot be read: Permission denied")
    # What the tables name is not named twice.
    (own / "large/000000.data").unlink()
    files = [each.file for each in verified(own).damage]
    assert sorted(files) == sorted(names)


def test_a_directory_without_a_pack_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        for call in (verified, rebuilt):
            with pytest.raises(PackError):
                call(path)


# -- flipped bits and hostile packs ----------------------------------------------------------------


@pytest.mark.promise(226)
def test_every_flipped_bit_is_found(made: tuple[Path, Path], tmp_path: Path) -> None:
    before = contents(made[1])
    draw = random.Random(11)
    names = ["chunks/tree.chunk", "chunks/000001.chunk", "index", "large/000000.data"]
    for turn in range(24):
        name = names[turn % len(names)]
        own = tmp_path / "own"
        copied(made[1], own)
        raw = bytearray(before[name])
        bit = draw.randrange(8 * len(raw))
        raw[bit // 8] ^= 1 << bit % 8
        (own / name).write_bytes(raw)
        report = verified(own)
        assert name.encode() in {each.file for each in report.damage}, (name, bit)
        try:
            good = served(own)
        except PackError:
            good = {}
        for path, content in good.items():
            assert content == content_of(made[0], path)
        shutil.rmtree(own)


def content_of(source: Path, path: bytes) -> bytes:
    with open(os.fsencode(source) + b"/" + path, "rb") as file:
        return file.read()


def test_a_description_with_flipped_bits_gives_an_error_or_the_same_pack(
    made: tuple[Path, Path], own: Path
) -> None:
    raw = (own / "pack.json").read_bytes()
    with Pack.open(os.fsencode(made[1])) as opened:
        expected = opened.info
    refused = 0
    draw = random.Random(5)
    for bit in draw.sample(range(8 * len(raw)), 300):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        (own / "pack.json").write_bytes(flipped)
        try:
            with Pack.open(os.fsencode(own)) as opened:
                opened.require_sound()
                # Seed, size and order decide nothing about what is read.
                assert opened.info.identity == expected.identity
                assert opened.info.entries == expected.entries
        except PackError:
            refused += 1
    assert refused > 200


def hostile(tmp_path: Path, tree: Sequence[Entry], chunks: Sequence[Sequence[Entry]]) -> Path:
    """A pack whose tables have these entries, with right digests, and no index."""
    top = tmp_path / "hostile"
    (top / "chunks").mkdir(parents=True)
    header = header_of(tree, kind=TREE, sequence=len(chunks), large=1)
    (top / "chunks/tree.chunk").write_bytes(encode_header(header) + encode_table(tree))
    for number, entries in enumerate(chunks):
        header = header_of(entries, kind=PAYLOAD, sequence=number)
        raw = encode_header(header) + encode_table(entries) + bytes(header.payload_bytes)
        (top / f"chunks/{number:06d}.chunk").write_bytes(raw)
    return top


def test_a_hostile_table_is_named_and_its_entries_are_left_out(tmp_path: Path) -> None:
    good, bad = extents([10]), extents([10], chunk=1)
    bad = [bad[0]._replace(path=b"../../etc/passwd"[:4])]
    top = hostile(tmp_path, [Entry(b"", FOLDER)], [good, bad])
    report = rebuilt(top)
    assert [each.file for each in report.damage] == [b"chunks/000001.chunk"]
    with Pack.open(os.fsencode(top)) as opened:
        opened.require_sound()
        assert opened.info.entries == 2


def test_a_path_in_two_chunks_is_served_from_the_first(tmp_path: Path) -> None:
    top = hostile(tmp_path, [Entry(b"", FOLDER)], [extents([10]), extents([20], chunk=1)])
    report = rebuilt(top)
    assert [each.file for each in report.damage] == [b"chunks/000001.chunk"]
    with Pack.open(os.fsencode(top)) as opened:
        assert opened.record(opened.number(b"f000")).chunk == 0


@pytest.mark.parametrize(
    "tree",
    [
        [Entry(b"", FOLDER), Entry(b"f000/below", FILE)],
        [Entry(b"a", FOLDER), Entry(b"a", FOLDER)],
        [Entry(b"a", FILE, size=1 << 62, chunk=0xFFFFFFFE), Entry(b"a/b", FOLDER)],
        [Entry(b"a", FILE, size=(1 << 63) - 1, chunk=0xFFFFFFFE)],
    ],
    ids=range(4),
)
def test_tables_that_contradict_each_other_end_with_one_error(
    tmp_path: Path, tree: list[Entry]
) -> None:
    top = hostile(tmp_path, tree, [extents([10])])
    assert verified(top).damaged
    error = ""
    try:
        report = rebuilt(top)
    except MonarchError as raised:
        error = str(raised)
    if error:
        assert "\n" not in error
        assert not (top / "index").exists()
    else:
        assert report.damage


@pytest.mark.promise(226)
def test_numbers_in_a_header_take_no_memory(tmp_path: Path) -> None:
    top = hostile(tmp_path, [Entry(b"", FOLDER)], [extents([10])])
    huge = header_of([], kind=TREE)._replace(sequence=0xFFFF0000)
    (top / "chunks/tree.chunk").write_bytes(encode_header(huge))
    with pytest.raises(PackError, match="are missing"):
        rebuilt(top)
    huge = header_of([], kind=TREE)._replace(table_bytes=1 << 60, entries=0xFFFFFFFF)
    (top / "chunks/tree.chunk").write_bytes(encode_header(huge))
    assert [each.file for each in rebuilt(top).damage] == [b"chunks/tree.chunk"]


@pytest.mark.promise(226)
@pytest.mark.parametrize("name", ["chunks/tree.chunk", "index"])
def test_holes_take_no_memory(own: Path, name: str) -> None:
    """The numbers fit the size of the file, but the file is almost empty."""
    more = 1 << 40
    raw = (own / name).read_bytes()
    if name == "index":
        heap = int.from_bytes(raw[40:48], "little") + more
        plain = raw[:40] + heap.to_bytes(8, "little") + raw[48:64]
        raw = plain + xxhash.xxh3_64_intdigest(plain).to_bytes(8, "little") + raw[72:]
    else:
        header = decode_header(raw)
        header = header._replace(table_bytes=header.table_bytes + more)
        raw = encode_header(header) + raw[HEADER_BYTES:]
    (own / name).write_bytes(raw)
    os.truncate(own / name, len(raw) + more)
    assert [what for what in damage_of(own, name.encode()) if "holes" in what]
    rebuilt(own)
    with Pack.open(os.fsencode(own)) as opened:
        opened.require_sound()


def damage_of(directory: Path, name: bytes) -> list[str]:
    return [each.what for each in verified(directory).damage if each.file == name]
