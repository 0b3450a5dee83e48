"""A pack as a reader opens it: its records, its chunks, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import xxhash

from monarch.errors import PackError
from monarch.packs.directory import is_pack, require_complete
from monarch.packs.pack import Pack
from monarch.posix.files import closing_fd


def test_each_entry_of_the_tree_has_a_record_with_its_attributes(made: tuple[Path, Path]) -> None:
    source, directory = made
    with Pack.open(os.fsencode(directory)) as opened:
        opened.require_sound()
        seen = set()
        for number in range(1, opened.info.entries + 1):
            record = opened.record(number)
            path = os.fsencode(source) + b"/" + record.path
            status = os.lstat(path)
            seen.add(record.path)
            assert opened.number(record.path) == number
            assert (record.mode, record.uid, record.gid, record.mtime_ns) == (
                *(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns),
            )
            if stat.S_ISREG(record.mode):
                assert (record.size, record.nlink) == (status.st_size, status.st_nlink)
            elif stat.S_ISLNK(record.mode):
                assert record.target == os.readlink(path)
            elif stat.S_ISDIR(record.mode):
                names = [opened.name(int(each)) for each in opened.names(number)]
                assert names == sorted(os.listdir(path))
                assert record.nlink == 2 + sum(map(os.path.isdir, [path + b"/" + n for n in names]))
        there = {os.fsencode(p.relative_to(source)) for p in source.rglob("*")}
        assert seen == there | {b""}
        assert opened.record(opened.number(b"class1/link.jpg")).link == opened.number(
            b"class0/000.jpg"
        )


def test_the_bytes_of_each_file_lie_where_the_index_has_them(made: tuple[Path, Path]) -> None:
    source, directory = made
    with Pack.open(os.fsencode(directory)) as opened:
        in_chunks = set()
        for chunk in range(opened.info.chunks):
            with closing_fd(opened.open_chunk(chunk)) as fd:
                end = 0
                for number in opened.chunk_numbers(chunk).tolist():
                    record = opened.record(number)
                    assert record.chunk == chunk == opened.chunk_of[number]
                    assert end <= record.offset == opened.offset_of[number]
                    end = record.offset + record.size
                    raw = os.pread(fd, record.size, record.offset)
                    assert (
                        raw
                        == Path(os.fsdecode(os.fsencode(source) + b"/" + record.path)).read_bytes()
                    )
                    assert (
                        xxhash.xxh3_64_intdigest(raw) == record.digest == opened.digest_of[number]
                    )
                    in_chunks.add(number)
                assert end == os.fstat(fd).st_size == opened.chunk_file_bytes(chunk)
        assert in_chunks == {
            number
            for number in range(1, opened.info.entries + 1)
            if opened.record(number).chunk >= 0 and opened.record(number).link == number
        }
        for name in ("large", "sparse"):
            number = opened.number(name.encode())
            assert opened.record(number).chunk == -2
            with closing_fd(opened.open_large(number)) as fd, os.fdopen(os.dup(fd), "rb") as file:
                assert file.read() == (source / name).read_bytes()


def test_a_missing_entry_or_chunk_is_an_error_or_zero(made: tuple[Path, Path]) -> None:
    with Pack.open(os.fsencode(made[1])) as opened:
        assert opened.number(b"missing") == opened.number(b"class0/") == 0
        for number in (0, -1, opened.info.entries + 1):
            with pytest.raises(PackError):
                opened.record(number)
            with pytest.raises(PackError):
                opened.names(number)
        for chunk in (-1, opened.info.chunks):
            with pytest.raises(PackError):
                opened.open_chunk(chunk)
        with pytest.raises(PackError, match="not a large file"):
            opened.open_large(opened.number(b"class0"))


def test_is_pack_knows_a_pack_by_its_description(own: Path, tmp_path: Path) -> None:
    assert is_pack(os.fsencode(own))
    assert not is_pack(os.fsencode(tmp_path))
    assert not is_pack(os.fsencode(tmp_path / "missing"))
    assert not is_pack(os.fsencode(own / "pack.json"))
    (own / "pack.json").write_text('{"format": "another"}')
    assert not is_pack(os.fsencode(own))


def test_an_unfinished_or_damaged_pack_is_no_plain_directory(own: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    (plain / "chunks").mkdir(parents=True)
    (plain / "building").write_text("of another program")
    (plain / "chunks/tree.chunk").mkdir()
    for each in (plain, tmp_path / "missing", own / "index"):
        require_complete(os.fsencode(each))
    require_complete(os.fsencode(own))
    (own / "pack.json").write_bytes(b"damaged")
    with pytest.raises(PackError, match=r"does not describe a pack; .*--rebuild"):
        require_complete(os.fsencode(own))
    (own / "pack.json").unlink()
    with pytest.raises(PackError, match=r"pack\.json of the pack is missing; .*--rebuild"):
        require_complete(os.fsencode(own))
    (own / "pack.json").symlink_to("elsewhere")
    with pytest.raises(PackError, match=r"pack\.json: Too many levels .* may read"):
        require_complete(os.fsencode(own))
    (own / "building").write_text('{"format": "monarch-pack", "version": 1}\n')
    with pytest.raises(PackError, match="not finished"):
        require_complete(os.fsencode(own))


def test_a_link_in_the_place_of_a_chunk_is_not_followed(own: Path) -> None:
    real = (own / "chunks/000000.chunk").rename(own / "elsewhere")
    (own / "chunks/000000.chunk").symlink_to(real)
    with Pack.open(os.fsencode(own)) as opened:
        with pytest.raises(PackError, match="pack verify"):
            opened.open_chunk(0)
        with closing_fd(opened.open_chunk(1)):
            pass


@pytest.mark.parametrize("name", ["pack.json", "index"])
def test_a_missing_file_of_a_pack_is_named(own: Path, name: str) -> None:
    (own / name).unlink()
    with pytest.raises(PackError):
        Pack.open(os.fsencode(own))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("files", -1),
        ("entries", "many"),
        ("entries", True),
        ("entries", 3),
        ("chunks", 1 << 70),
        ("order", "other"),
        ("identity", None),
        ("seed", 1.5),
    ],
)
def test_a_description_that_does_not_fit_is_refused(own: Path, field: str, value: object) -> None:
    raw = json.loads((own / "pack.json").read_text())
    (own / "pack.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(PackError):
        Pack.open(os.fsencode(own))


def test_a_damaged_index_is_found_by_its_digest(own: Path) -> None:
    raw = bytearray((own / "index").read_bytes())
    raw[-1] ^= 1
    (own / "index").write_bytes(raw)
    with Pack.open(os.fsencode(own)) as opened:
        with pytest.raises(PackError, match="index --rebuild"):
            opened.require_sound()


def test_an_open_pack_survives_that_its_index_is_cut_off(own: Path) -> None:
    with Pack.open(os.fsencode(own)) as opened:
        os.truncate(own / "index", 0)
        assert opened.record(opened.number(b"large")).size == 20_000
        # It is not read a second time.
        opened.require_sound()
