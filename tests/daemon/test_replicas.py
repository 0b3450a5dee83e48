"""Files of other nodes that earlier mounts have kept, for a mount that keeps none any more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash

from monarch.daemon.replicas import HELD, build_replicas, recovery_of_left
from monarch.peers.held import HeldFiles, Record
from monarch.writeback.setup import WriteBack

CONTENT = b"the bytes of a checkpoint"
TOKEN = "0123456789abcdef"


def parts_of(state: Path, *absorbs: str) -> Any:
    writeback = SimpleNamespace(replicate=0, hold=1 << 20, recover_after=60.0)
    settings = SimpleNamespace(writeback=writeback, absorbs=absorbs, mountpoint=state / "mnt")
    return SimpleNamespace(state=state, settings=settings)


def write_back_of(state: Path) -> WriteBack:
    made = SimpleNamespace(place=SimpleNamespace(directory=state), is_in_force=lambda token: False)
    return cast(WriteBack, made)


def keep_a_file(state: Path) -> Record:
    digest = xxhash.xxh3_128_hexdigest(CONTENT)
    record = Record(TOKEN, 7, len(CONTENT), digest, b"ckpt/a", 0o640, 0, 0, 5, 1)
    assert HeldFiles(state / HELD, 1 << 20).put(record, lambda take: take(CONTENT))
    return record


@pytest.mark.fault("N7")
@pytest.mark.promise(331)
def test_a_mount_without_other_nodes_recovers_what_an_earlier_one_has_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_a_file(tmp_path)
    assert recovery_of_left(parts_of(tmp_path, "**"), write_back_of(tmp_path)) is not None
    assert "1 file in " in caplog.text and "when their nodes are gone" in caplog.text


def test_a_mount_that_absorbs_nothing_names_what_an_earlier_one_has_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = keep_a_file(tmp_path)
    for write_back in (None, write_back_of(tmp_path)):
        assert recovery_of_left(parts_of(tmp_path), write_back) is None
    assert "mount with `absorb`" in caplog.text
    assert HeldFiles(tmp_path / HELD, 0).of(TOKEN) == [record]


def test_nothing_is_said_of_a_mount_that_has_kept_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert recovery_of_left(parts_of(tmp_path, "**"), write_back_of(tmp_path)) is None
    assert not caplog.text and list(tmp_path.iterdir()) == []


def test_a_mount_without_replicate_answers_for_what_it_keeps_and_takes_no_more(
    tmp_path: Path,
) -> None:
    parts, clients = parts_of(tmp_path, "**"), [cast(Any, SimpleNamespace(name="b")), None]
    assert build_replicas(parts, write_back_of(tmp_path), clients, "a", 0.05) is None
    record = keep_a_file(tmp_path)
    made = build_replicas(parts, write_back_of(tmp_path), clients, "a", 0.05)
    assert made is not None and sorted(made.tasks()) == ["recovery"]
    assert (made.report().held_files, made.report().sent) == (1, 0)
    other = Record(TOKEN, 8, len(CONTENT), record.digest, b"ckpt/b", 0o640, 0, 0, 5, 2)
    assert not made.holding.held.put(other, lambda take: take(CONTENT))
    made.holding.held.forget(TOKEN, 0, 1)
    assert made.report().held_files == 0
