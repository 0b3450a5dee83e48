"""Files that Monarch makes for itself, when something else is in their place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch.config.settings import LogSettings
from monarch.control.registry import Registry
from monarch.control.state_directory import NOTE, read_note, read_undrained, undrained_file
from monarch.daemon.write_status import LossAlarm
from monarch.errors import TierError
from monarch.posix.files import closing_fd
from monarch.posix.private_directory import Lock, open_private, read_private, replace_private
from monarch.telemetry import log as log_setup
from monarch.tiers.ownership import Owner, require_known_version
from monarch.writeback.journal import Journal
from monarch.writeback.journal_found import read_replay, token_of
from monarch.writeback.store import know_snapshot, snapshot_known


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere"
    path.write_bytes(b"of others")
    return path


def put(path: Path, kind: str, elsewhere: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    else:
        path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("fifo", errno.EINVAL),
        ("directory", errno.EISDIR),
        ("device", errno.EINVAL),
        ("link", errno.ELOOP),
    ],
)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR])
def test_only_a_regular_file_is_opened(
    tmp_path: Path, elsewhere: Path, kind: str, number: int, flags: int
) -> None:
    put(tmp_path / "file", kind, elsewhere)
    with pytest.raises(OSError) as refused:
        open_private(tmp_path / "file", flags)
    assert refused.value.errno == number
    assert elsewhere.read_bytes() == b"of others"


def lock(directory: Path) -> None:
    with closing_fd(os.open(directory, os.O_RDONLY)) as fd:
        Lock(fd, "it", "here")


def open_log(directory: Path) -> None:
    log_setup.setup(LogSettings(), path=directory / "daemon.log", foreground=False)


REFUSED: list[tuple[str, Callable[[Path], object]]] = [
    ("lock", lock),
    ("daemon.log", open_log),
    ("journal", lambda directory: Journal.open(directory, source=b"/source")),
    ("journal", read_replay),
    ("journal", token_of),
    (NOTE, read_note),
]


@pytest.mark.parametrize("kind", ["fifo", "link"])
@pytest.mark.parametrize(("name", "function"), REFUSED)
def test_another_kind_of_file_in_the_place_of_a_file_is_refused_without_a_wait(
    tmp_path: Path, elsewhere: Path, name: str, function: Callable[[Path], object], kind: str
) -> None:
    put(tmp_path / name, kind, elsewhere)
    with pytest.raises((OSError, TierError)):
        function(tmp_path)
    assert elsewhere.read_bytes() == b"of others"


IGNORED: list[tuple[str, Callable[[Path], object]]] = [
    ("snapshot", snapshot_known),
    ("lost.json", LossAlarm),
    (undrained_file(Path()).name, read_undrained),
    ("monarch/tier.json", lambda directory: require_known_version(directory, Owner("."))),
]


@pytest.mark.parametrize("kind", ["fifo", "link"])
@pytest.mark.parametrize(("name", "function"), IGNORED)
def test_another_kind_of_file_in_the_place_of_a_note_counts_as_no_note(
    tmp_path: Path, elsewhere: Path, name: str, function: Callable[[Path], object], kind: str
) -> None:
    put(tmp_path / name, kind, elsewhere)
    assert function(tmp_path) is None or name in ("snapshot", "lost.json")
    assert elsewhere.read_bytes() == b"of others"


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_mount_record_that_is_no_file_is_ignored(
    tmp_path: Path, elsewhere: Path, kind: str
) -> None:
    put(tmp_path / "mounts" / "m.json", kind, elsewhere)
    assert not Registry(tmp_path).all()


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_note_is_written_where_something_else_was(
    tmp_path: Path, elsewhere: Path, kind: str
) -> None:
    put(tmp_path / "snapshot", kind, elsewhere)
    know_snapshot(tmp_path, "of this mount")
    assert snapshot_known(tmp_path) == "of this mount"
    # What is in the place of the staged file is removed, so the next call succeeds.
    put(tmp_path / "snapshot.part", kind, elsewhere)
    with pytest.raises(OSError):
        replace_private(tmp_path / "snapshot", "next")
    replace_private(tmp_path / "snapshot", "next")
    assert read_private(tmp_path / "snapshot") == b"next"
    assert elsewhere.read_bytes() == b"of others"
