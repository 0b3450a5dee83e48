"""Both sides of a written file, compared byte by byte."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import xxhash

from monarch.cli import checkpoints
from monarch.cli.checkpoints import Compared, Row, compare, compare_all
from monarch.control.registry import MountRecord


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("mount", "source"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(b"content" * 200_000)
    return tmp_path / "mount", tmp_path / "source"


def looked(
    sides: tuple[Path, Path],
    *,
    path: str = "a",
    drained: bool = True,
    expected: str | None = None,
) -> tuple[Compared, int]:
    read: list[int] = []
    mount, source = sides
    found = compare(
        path,
        mount=mount,
        source=source,
        drained=drained,
        expected=expected,
        progress=read.append,
    )
    return found, sum(read)


def test_the_same_bytes_are_the_same_and_read_on_both_sides(sides: tuple[Path, Path]) -> None:
    size = 1_400_000
    assert looked(sides) == (Compared("a", size, "same", ""), 2 * size)
    right = xxhash.xxh3_64_hexdigest(b"content" * 200_000)
    assert looked(sides, expected=right)[0].verdict == "same"
    assert looked(sides, expected="0" * 16)[0].verdict == "damaged"
    waiting, read = looked(sides, drained=False)
    assert (waiting.verdict, read) == ("waiting", size)


def test_differences_are_classified(sides: tuple[Path, Path]) -> None:
    mount, source = sides
    with (source / "a").open("r+b") as file:
        file.seek(1_399_999)
        file.write(b"?")
    assert "its bytes at the source differ" in looked(sides)[0].why
    os.truncate(source / "a", 5)
    assert "it has 5 bytes at the source, but 1400000 in the mount" in looked(sides)[0].why
    (source / "a").unlink()
    assert looked(sides)[0] == Compared("a", 1_400_000, "missing", "it is missing at the source")
    # Neither waited for nor followed.
    os.mkfifo(source / "a")
    assert looked(sides)[0].verdict == "unreadable"
    (source / "a").unlink()
    (source / "a").symlink_to(mount / "a")
    assert looked(sides)[0].verdict == "unreadable"
    (mount / "a").unlink()
    assert looked(sides)[0] == Compared("a", 0, "missing", "it is missing in the mount")


def test_a_path_that_is_longer_than_the_kernel_takes_is_compared(sides: tuple[Path, Path]) -> None:
    names = ["d" * 250] * 17
    for side in sides:
        fds = [os.open(side, os.O_RDONLY)]
        for name in names:
            os.mkdir(name, dir_fd=fds[-1])
            fds.append(os.open(name, os.O_RDONLY, dir_fd=fds[-1]))
        os.link(side / "a", "a", dst_dir_fd=fds[-1])
        for fd in fds:
            os.close(fd)
    path = "/".join([*names, "a"])
    assert looked(sides, path=path)[0] == Compared(path, 1_400_000, "same", "")


def test_a_directory_that_is_a_link_is_not_followed(sides: tuple[Path, Path]) -> None:
    mount, source = sides
    for side in sides:
        (side / "d").mkdir()
        os.link(side / "a", side / "d/a")
    (source / "d").rename(source / "e")
    (source / "d").symlink_to(mount / "d")
    assert looked(sides, path="d/a")[0].verdict == "unreadable"


@pytest.mark.parametrize(
    ("then", "verdicts"),
    [
        # The time of each further listing, and where the file is by then.
        ([], []),
        ([(1, "source")], ["different"]),
        ([(2, "local")], ["waiting"]),
        ([(2, "source"), (2, "source")], ["different"]),
        ([(2, "source"), (3, "source"), (4, "source")], ["waiting"]),
        ([(2, "source"), (3, "local")], ["waiting"]),
        ([(2, "source")], []),
    ],
    ids=["removed", "wrong", "written", "rewritten", "busy", "busy, then written", "removed later"],
)
def test_a_file_that_was_changed_since_it_was_listed_is_compared_again(
    sides: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    then: list[tuple[int, str]],
    verdicts: list[str],
) -> None:
    mount, source = sides
    os.truncate(source / "a", 5)
    lists = [[Row("a", 1_400_000, durable, time_ns)] for time_ns, durable in [(1, "source"), *then]]
    listed = iter([*lists, []])
    monkeypatch.setattr(checkpoints, "rows_of", lambda record, below: next(listed))
    record = cast(MountRecord, SimpleNamespace(mountpoint=str(mount), source=str(source)))
    found = compare_all(record, "", lambda row, done, total: None)
    assert [each.verdict for each in found] == verdicts
