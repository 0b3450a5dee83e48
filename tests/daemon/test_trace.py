"""What a recording keeps for its client: the epochs of opens, and what was lost."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.daemon import trace
from monarch.daemon.trace import OpenedFile, Recording, Traces
from monarch.namespace.namespace import Namespace
from monarch.placement.epochs import Epochs
from monarch.types import Ino
from monarch.vfs.readers import Readers


class Names:
    """A snapshot of 100 files of the size of their number."""

    entries = 100

    def path(self, ino: Ino) -> bytes:
        return b"at the source/f%d" % ino

    def visible_path(self, ino: Ino) -> bytes:
        return b"f%d" % ino

    def attributes(self, ino: Ino) -> Any:
        return type("Attributes", (), {"size": int(ino)})


def report() -> Any:
    """What the header of a trace takes from the status of a mount."""
    part = types.SimpleNamespace
    return part(
        mountpoint="/mnt", source="/pfs", snapshot=part(id="x"), mode=part(open="none"), epochs=[]
    )


class Played:
    """Opens that the epochs and a recording see."""

    def __init__(self, last_epoch: int | None = None) -> None:
        self.recording = Recording(cast(Namespace, Names()), last_epoch)
        self.epochs = Epochs(100)

    def open(self, *inos: int) -> None:
        for ino in inos:
            self.epochs.opened(Ino(ino), False)
            opened = OpenedFile(1.0, Ino(ino), "null", None, 0)
            undecided = self.epochs.is_undecided
            self.recording.add(opened, self.epochs.number, is_undecided=undecided)

    def taken(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.recording.take().splitlines()]


def opens(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(line["epoch"], line["file"]) for line in lines if "t" in line]


@pytest.mark.promise(184)
async def test_each_open_has_the_epoch_that_it_belongs_to() -> None:
    played = Played()
    first, second = range(1, 11), (3, 1, 5, 7, 9, 2, 4, 6, 8, 10)
    played.open(*first)
    assert opens(played.taken()) == [(1, ino) for ino in first]
    # Until five files have come again, they may belong to the first epoch.
    played.open(*second[:4])
    assert played.taken() == []
    played.open(*second[4:])
    assert opens(played.taken()) == [(2, ino) for ino in second]
    played.open(1, 2)
    played.recording.end("seconds", played.epochs.number)
    assert opens(played.taken()) == [(2, 1), (2, 2)]
    assert (played.recording.why_ended, played.recording.opens) == ("seconds", 22)


@pytest.mark.promise(184)
async def test_a_trace_of_epochs_ends_with_the_last_open_of_the_last_one() -> None:
    played = Played(last_epoch=2)
    for _ in range(3):
        played.open(*range(1, 11))
    assert opens(played.taken()) == [(epoch, ino) for epoch in (1, 2) for ino in range(1, 11)]
    assert (played.recording.why_ended, played.recording.opens) == ("epochs", 20)


@pytest.mark.promise(184)
async def test_a_file_is_named_once_before_its_first_open() -> None:
    played = Played()
    played.open(7, 8, 9, 7, 8, 9)
    named = [line for line in played.taken() if "path" in line]
    assert named == [{"file": ino, "path": f"f{ino}", "bytes": ino} for ino in (7, 8, 9)]


@pytest.mark.promise(184)
async def test_a_client_that_is_too_slow_loses_opens_and_has_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "_MOST_WAITING", 5)
    played = Played()
    played.open(*range(1, 10))
    assert opens(played.taken()) == [(1, ino) for ino in range(1, 6)]
    played.open(11)
    played.open(*range(12, 20))
    played.recording.end("seconds", 1)
    lines = [line for line in played.taken() if "path" not in line]
    assert [line.get("lost", line.get("file")) for line in lines] == [4, 11, 12, 13, 14, 5]
    assert played.recording.lost == 9 and played.recording.opens == 9


@pytest.mark.promise(184)
async def test_an_open_that_is_lost_shows_the_epoch_of_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the opens that wait for the next epoch would get the one after it."""
    monkeypatch.setattr(trace, "_MOST_WAITING", 13)
    played = Played()
    played.open(*range(1, 11))
    # Three opens of the second epoch are recorded before all further ones are lost.
    played.open(*range(1, 11))
    played.open(*range(1, 11))
    assert opens(played.taken()) == [(1, ino) for ino in range(1, 11)] + [(2, 1), (2, 2), (2, 3)]
    played.open(*range(11, 21))
    lines = [line for line in played.taken() if "path" not in line]
    assert [line.get("lost", line.get("epoch")) for line in lines] == [17, *[3] * 10]


@pytest.mark.promise(184)
async def test_the_lost_opens_of_a_trace_add_up_to_those_that_its_end_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the last ones belong to an epoch that is not in the trace."""
    for room in (3, 12, 25):
        monkeypatch.setattr(trace, "_MOST_WAITING", room)
        played = Played(last_epoch=2)
        lines: list[dict[str, Any]] = []
        for epoch in range(4):
            played.open(*range(1, 11))
            if epoch != 1:
                lines += played.taken()
        lines += played.taken()
        assert played.recording.why_ended == "epochs"
        assert sum(line.get("lost", 0) for line in lines) == played.recording.lost
        assert len(opens(lines)) == played.recording.opens
        assert all(epoch <= 2 for epoch, _ in opens(lines))


class Counting:
    """The readers of a mount, which may stop to count opens."""

    tier_names = ("source", "nvme")
    traced: Callable[[Ino, int | None, float | None, int], None] | None = None

    def __init__(self, *, counts_opens: bool = True) -> None:
        self.counts_opens = counts_opens

    def catch_up(self) -> None:
        """Nothing waits."""


@pytest.mark.promise(184)
@pytest.mark.parametrize("counts_at_first", [True, False])
async def test_a_trace_ends_when_the_kernel_loses_reports_of_opens(
    autojump_clock: trio.testing.MockClock, counts_at_first: bool
) -> None:
    """Further opens would be missing without a number. Where opens were not counted at the begin,
    the trace states so from its begin."""
    readers, epochs, text = Counting(counts_opens=counts_at_first), Epochs(100), ""
    traces = Traces(cast(Namespace, Names()), cast(Readers, readers), epochs, report)

    async def send(progress: dict[str, Any]) -> None:
        nonlocal text
        text += progress["text"]

    def opened(*inos: int) -> None:
        for ino in inos:
            epochs.opened(Ino(ino), False)
            assert readers.traced is not None
            readers.traced(Ino(ino), None, None, 0)

    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traces.table()["trace"], {}, send)
            await trio.sleep(0.5)
            opened(1, 2, 3)
            readers.counts_opens = False
            opened(4)
            await trio.sleep(0.5)
    lines = [json.loads(line) for line in text.splitlines()]
    found = [(line["file"], line["epoch"]) for line in lines if "t" in line]
    if counts_at_first:
        assert found == [(1, 1), (2, 1), (3, 1)]
        assert lines[-1] == {"end": "uncounted", "opens": 3, "lost": 0}
    else:
        assert found == [(1, None), (2, None), (3, None), (4, None)]


async def test_the_text_that_is_taken_at_once_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MESSAGE_CHARACTERS", 200)
    played = Played()
    played.open(*range(1, 51))
    texts = []
    while not played.recording.is_empty:
        texts.append(played.recording.take())
    assert len(texts) > 10 and max(map(len, texts)) < 400
    assert "".join(texts).count('"t":') == 50
