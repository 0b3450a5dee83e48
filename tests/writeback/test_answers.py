"""Answers of the control socket about written files: the names in them may be those of any user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from monarch.control.messages import MAX_LINE_BYTES, encode
from monarch.daemon.write_status import LossAlarm, WriteStatus
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.queue_entry import Refusal
from tests.writeback.remounts import Rig

# Up to 4 KiB, and six characters in JSON for each byte.
NAMES = [b"/".join([b"\xff" * 250] * 15) + b"/%d" % number for number in range(1500)]

pytestmark = [pytest.mark.fault("S9"), pytest.mark.promise(147)]


@pytest.mark.parametrize("names", [NAMES, [b"%d" % number for number in range(1500)]])
async def test_names_of_any_length_leave_room_in_each_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    names: Sequence[bytes],
) -> None:
    refusals = [Refusal(seq, "mkdir", name, "EIO", 3, True) for seq, name in enumerate(names)]
    monkeypatch.setattr(DrainQueue, "refusals", lambda queue: refusals)
    rig = Rig(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        write_back, alarm = session.write_back, LossAlarm(rig.state)
        alarm.report(names)
        for name in names:
            write_back.drain.writer.log.note_conflict(name, "others have written it")
        status = WriteStatus(rig.settings(), write_back, alarm).report()
        assert status is not None
        # The other fields of a status take up to 9/10 (test_foresight.py).
        assert len(encode(asdict(status))) < 0.15 * MAX_LINE_BYTES
        assert status.lost_files == 1500
        assert status.lost == list(map(_text, names[: len(status.lost)]))
        assert status.aside == status.lost
        verbs = WrittenVerbs(names=session.names, write_back=write_back, loss_alarm=alarm).table()
        answers: dict[str, dict[str, Any]] = {}
        for verb in ("refused", "conflicts", "drain"):
            answers[verb] = await verbs[verb]({"timeout": 0.1}, _ignored)
            assert len(encode(answers[verb])) < MAX_LINE_BYTES / 2
        paths = {
            "refused": [each["path"] for each in answers["refused"]["refused"]],
            "conflicts": [each["path"] for each in answers["conflicts"]["conflicts"]],
            "drain": answers["drain"]["lost"],
        }
        assert paths["refused"] == list(map(_text, names[: len(paths["refused"])]))
        assert paths["conflicts"] == list(map(_text, names[-len(paths["conflicts"]) :]))
        assert paths["drain"] == status.lost
        assert min(map(len, paths.values())) >= 2
        assert (len(status.lost), len(paths["conflicts"])) == (1000, 100) or names is NAMES


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


async def _ignored(part: object) -> None:
    """The progress of a drain."""


async def test_a_refused_change_with_a_very_long_path_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """A path of any length can be made, a directory at a time. No refused change means success."""
    path = b"/".join([b"\xff" * 250] * 50)
    refusals = [Refusal(seq, "mkdir", path, "EIO", 3, True) for seq in (1, 2)]
    monkeypatch.setattr(DrainQueue, "refusals", lambda queue: refusals)
    async with Rig(tmp_path, monkeypatch).mount(works=False) as session:
        verbs = WrittenVerbs(
            names=session.names,
            write_back=session.write_back,
            loss_alarm=LossAlarm(session.rig.state),
        )
        answer = await verbs.table()["refused"]({}, _ignored)
        assert [each["path"] for each in answer["refused"]] == [_text(path)]
        assert len(encode(answer)) < MAX_LINE_BYTES
