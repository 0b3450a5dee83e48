"""``monarch lmdb`` writes indexes that are right, and says why if it cannot."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import lmdb
import pytest

from monarch.cli.lmdb import lmdb as verb
from monarch.datasets.lmdb_reader import LmdbReader
from monarch.errors import LmdbError, UsageError
from tests.datasets.lmdb_files import Records, appended, by_cursor


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An environment as LMDB makes it: a directory."""
    path = tmp_path / "train_lmdb"
    with lmdb.open(str(path), map_size=1 << 24, sync=False) as environment:
        appended(300, 500)(environment)
    return path


def run(*arguments: object) -> Any:
    return verb.main([str(each) for each in arguments], "monarch lmdb", standalone_mode=False)


def records_of(reader: LmdbReader) -> Records:
    return [*zip(reader.keys, map(bytes, reader.get_many(range(len(reader)))), strict=True)]


@pytest.mark.promise(242)
def test_an_index_is_made_of_a_directory_and_verified(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "train.mlx"
    assert run("index", directory, "-o", output, "--verify", "100", "-q") == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{output}: 300 records of {directory}/data.mdb in ")
    assert line.endswith("; 100 compared, all equal\n")
    with LmdbReader(directory, output) as reader:
        assert records_of(reader) == by_cursor(directory / "data.mdb")
    # Another index may be replaced, and --verify of more records than there are compares all.
    assert run("index", directory / "data.mdb", "-o", output, "--json", "--verify", "999") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["verified"]) == (300, 300)
    named = directory.rename(tmp_path / os.fsdecode(b"not UTF-8 \xff"))
    assert run("index", named, "-o", output, "--verify", "10", "-q") == 0
    assert report["index_bytes"] == output.stat().st_size == 80 + 300 * 24


def test_a_difference_is_reported_and_nothing_is_written(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(self: LmdbReader, indices: list[int]) -> list[memoryview]:
        return [memoryview(b"wrong")] * len(indices)

    monkeypatch.setattr(LmdbReader, "get_many", wrong)
    assert run("index", directory, "-o", tmp_path / "f.mlx", "--verify", "50", "-q") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 and "differs for lmdb: record" in lines[0]
    assert lines[-1] == "and 40 more"
    assert not (tmp_path / "f.mlx").exists()


def test_no_other_file_is_replaced(directory: Path, tmp_path: Path) -> None:
    for other in (directory / "data.mdb", tmp_path / "text"):
        if not other.exists():
            other.write_text("text")
        before = other.read_bytes()
        with pytest.raises(UsageError, match="is not an index"):
            run("index", directory, "-o", other)
        assert other.read_bytes() == before


def test_the_output_may_not_be_a_fifo_and_is_not_waited_for(
    directory: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="is not an index"):
        run("index", directory, "-o", tmp_path / "fifo")


def test_info_shows_the_file_and_whether_an_index_is_of_it(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "f.mlx"
    run("index", directory, "-o", index, "-q")
    capsys.readouterr()
    assert not run("info", directory, "--index", index)
    shown = capsys.readouterr().out
    assert "records       300\n" in shown and "page size     4 KiB\n" in shown
    assert f"index         {index}, of this version\n" in shown
    assert not run("info", directory, "--json")
    report = json.loads(capsys.readouterr().out)
    assert (report["entries"], report["depth"], report["transaction"]) == (300, 2, 1)
    with lmdb.open(str(directory)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"more", b"")
    with pytest.raises(LmdbError, match=f"run monarch lmdb index {directory}/data.mdb -o {index}"):
        run("info", directory, "--index", index)
    with pytest.raises(LmdbError, match="not an LMDB file"):
        run("info", index)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("closed", ["data.mdb", "data.mlx"])
def test_a_file_that_the_user_may_not_read_is_no_mistake_of_the_command_line(
    directory: Path, closed: str
) -> None:
    # The directories of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        shutil.copy2(directory / "data.mdb", top / "data.mdb")
        run("index", top / "data.mdb", "-o", top / "data.mlx", "-q")
        for file in top.iterdir():
            file.chmod(0o600 if file.name == closed else 0o644)
        child = os.fork()
        if child == 0:
            is_refused = False
            try:
                os.setgroups([])
                os.setresgid(1234, 1234, 1234)
                os.setresuid(1234, 1234, 1234)
                run("info", top / "data.mdb", "--index", top / "data.mlx")
            except PermissionError as error:
                is_refused = error.filename == str(top / closed)
            finally:
                os._exit(0 if is_refused else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("rights", [0o333, 0o555], ids=["not to be listed", "not to be written"])
def test_an_index_is_written_where_its_user_may_make_files_and_is_named_otherwise(
    directory: Path, rights: int
) -> None:
    # The directories of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        shutil.copy2(directory / "data.mdb", top / "data.mdb")
        (top / "data.mdb").chmod(0o644)
        (top / "to").mkdir()
        (top / "to").chmod(rights)
        output = top / "to/data.mlx"
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                os.setgroups([])
                os.setresgid(1234, 1234, 1234)
                os.setresuid(1234, 1234, 1234)
                is_right = (
                    run("index", top / "data.mdb", "-o", output, "-q") == 0 and rights == 0o333
                )
            except PermissionError as error:
                is_right = rights == 0o555 and error.filename == str(output)
            finally:
                os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert os.listdir(top / "to") == (["data.mlx"] if rights == 0o333 else [])
