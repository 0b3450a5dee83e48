"""Lost files are remembered over the death of the daemon, until a user acknowledges the loss."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monarch.daemon.write_status import LossAlarm


def test_it_is_remembered_by_the_next_daemon_until_it_is_acknowledged(tmp_path: Path) -> None:
    loss_alarm = LossAlarm(tmp_path)
    loss_alarm.report([])
    assert not list(tmp_path.iterdir())
    loss_alarm.report([b"ckpt/a", b"caf\xe9\n"])
    loss_alarm.report([b"ckpt/a", b"caf\xe9\n", b"ckpt/b"])
    names = (b"ckpt/a", b"caf\xe9\n", b"ckpt/b")
    assert loss_alarm.names == LossAlarm(tmp_path).names == names
    loss_alarm.acknowledge()
    # The drain repeats the losses that it has reported.
    loss_alarm.report(names)
    assert loss_alarm.names == LossAlarm(tmp_path).names == ()
    assert not list(tmp_path.iterdir())
    loss_alarm.report([*names, b"ckpt/c"])
    assert LossAlarm(tmp_path).names == (b"ckpt/c",)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null"])
def test_an_unreadable_record_of_losses_is_reported_and_blocks_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lost.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        loss_alarm = LossAlarm(tmp_path)
    assert loss_alarm.names == () and "cannot be read" in caplog.text
    loss_alarm.report([b"a"])
    assert LossAlarm(tmp_path).names == (b"a",)


def test_a_directory_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss_alarm = LossAlarm(tmp_path / "gone")
    loss_alarm.report([b"a"])
    assert loss_alarm.names == (b"a",) and "cannot be written" in caplog.text
    loss_alarm.acknowledge()
    assert loss_alarm.names == ()
