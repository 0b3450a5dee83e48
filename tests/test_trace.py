"""The format of a trace: what was written is read back."""

from __future__ import annotations

import gzip
import os
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch.cli import trace as command
from monarch.errors import BusyError, MonarchError, NotMountedError
from monarch.telemetry.trace import (
    MOST_LINE,
    VERSION,
    TracedOpen,
    TraceEnd,
    TraceHeader,
    TraceProgress,
    file_line,
    lost_line,
    object_line,
    open_line,
    open_text,
    read_trace,
)

HEADER = TraceHeader(VERSION, "/mnt/data", "/pfs/data", "abc", 17, ["source", 'a"b'], "open")
ODD = 'odd "name"\n\udcff'
TEXT = [
    object_line(HEADER.to_dict()),
    file_line(7, "train/a.jpg", 100),
    open_line(0.5, 7, 1, '"source"', 0.001234, 4711),
    file_line(9, ODD, 0),
    lost_line(12),
    lost_line(3),
    open_line(1.25, 9, None, "null", None, 0),
    open_line(2, 7, 2, '"a\\"b"', None, 4711),
    object_line(TraceEnd("epochs", 3, 15).to_dict()),
]
OPENS = [
    TracedOpen(0.5, "train/a.jpg", 100, 1, "source", 0.001234, 4711),
    TracedOpen(1.25, ODD, 0, None, None, None, None),
    TracedOpen(2.0, "train/a.jpg", 100, 2, 'a"b', None, 4711),
]


@pytest.mark.promise(184)
@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
def test_a_trace_is_read_back(tmp_path: Path, name: str) -> None:
    with open_text(tmp_path / name, "w") as file:
        file.writelines(TEXT)
    packed = (tmp_path / name).read_bytes()
    text = gzip.decompress(packed) if name.endswith(".gz") else packed
    assert text.decode("ascii") == "".join(TEXT)
    with read_trace(tmp_path / name) as trace:
        assert trace.header == HEADER and trace.end is None
        assert list(trace) == OPENS
        assert trace.end == TraceEnd("epochs", 3, 15)


@pytest.mark.promise(184)
@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
def test_a_trace_that_was_cut_off_has_no_end(tmp_path: Path, name: str) -> None:
    """At any byte, also within the checksum of a compressed one."""
    with open_text(tmp_path / name, "w") as file:
        file.writelines(TEXT)
    whole = (tmp_path / name).read_bytes()
    reached = set()
    for size in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:size])
        with suppress(MonarchError), read_trace(tmp_path / name) as trace:
            read = list(trace)
            assert read == OPENS[: len(read)]
            assert trace.end is None
            reached.add(len(read))
    assert len(OPENS) in reached


@pytest.mark.promise(184)
def test_a_flipped_bit_of_a_compressed_trace_changes_no_open_unnoticed(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress("".join(TEXT).encode(), 1, mtime=0))
    found: Counter[str] = Counter()
    for bit in range(0, 8 * len(packed), 9):
        packed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "packed").write_bytes(packed)
        packed[bit // 8] ^= 1 << bit % 8
        try:
            with read_trace(tmp_path / "packed") as trace:
                read = list(trace)
        except MonarchError:
            found["refused"] += 1
            continue
        # Some bits of the first bytes mean nothing, such as the time.
        assert trace.end is None or (read, bit < 80) == (OPENS, True), bit
        found["cut off" if trace.end is None else "same"] += 1
    assert found["refused"] > 0, found


@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
def test_a_line_after_the_end_is_damage(tmp_path: Path, name: str) -> None:
    with open_text(tmp_path / name, "w") as file:
        file.writelines([*TEXT, TEXT[0]])
    with (
        read_trace(tmp_path / name) as trace,
        pytest.raises(MonarchError, match=f"line {len(TEXT) + 1}, is not of a trace"),
    ):
        list(trace)


@pytest.mark.promise(184)
def test_the_content_of_a_trace_says_whether_it_is_compressed(tmp_path: Path) -> None:
    content = "".join(TEXT).encode()
    (tmp_path / "packed").write_bytes(gzip.compress(content))
    (tmp_path / "plain.gz").write_bytes(content)
    for name in ("packed", "plain.gz"):
        with read_trace(tmp_path / name) as trace:
            assert list(trace) == OPENS


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    newer = object_line(replace(HEADER, monarch_trace=VERSION + 1).to_dict())
    for text, message in (
        ("", "is not a trace"),
        ("words\n", "line 1, is not of a trace"),
        ('{"a":1}\n', "is not a trace"),
        (newer, f"is a trace of version {VERSION + 1}"),
        ('{"monarch_trace":1}\n', "line 1, is not of a trace"),
    ):
        file.write_text(text)
        with pytest.raises(MonarchError, match=message), read_trace(file):
            pass


@pytest.mark.parametrize(
    "line",
    [
        *("[]\n", "{}\n", '{"t":1.0,"file":8}\n', '{"t":1.0,"file":7,"epoch":"x"}\n'),
        *('{"end":"x"}\n', '{"lost":-1}\n'),
        '{"lost":1,"new":"\xe9"}\n',
        # It is not read until its end, which may be farther away than the memory is large.
        '{"file":8,"path":"' + "a" * MOST_LINE,
    ],
    ids=["list", "empty", "file", "epoch", "end", "lost", "not ASCII", "long"],
)
def test_a_line_that_is_damaged_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "file").write_text("".join(TEXT[:2]) + line)
    with (
        read_trace(tmp_path / "file") as trace,
        pytest.raises(MonarchError, match="line 3, is not of a trace"),
    ):
        list(trace)


@pytest.mark.promise(184)
def test_keys_that_are_not_known_are_ignored_and_a_time_may_be_a_whole_number(
    tmp_path: Path,
) -> None:
    """Other programs that write JSON, such as some versions of `jq`, write 1.000000 as 1."""
    lines = [
        TEXT[0].replace('{"monarch_trace"', '{"new":{},"monarch_trace"'),
        '{"file":7,"path":"a","bytes":1,"new":1}\n',
        '{"lost":2,"new":1}\n',
        '{"t":1,"file":7,"epoch":1,"tier":null,"latency":0,"job":null,"new":[]}\n',
        '{"end":"seconds","opens":1,"lost":2,"new":null}\n',
    ]
    (tmp_path / "file").write_text("".join(lines))
    with read_trace(tmp_path / "file") as trace:
        assert list(trace) == [TracedOpen(1, "a", 1, 1, None, 0, None)]
        assert trace.lost == 2
        assert trace.end == TraceEnd("seconds", 1, 2)


def traced(output: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., TraceEnd]) -> None:
    """Calls `monarch trace` with ``ask`` in place of the daemon."""
    monkeypatch.setattr(command, "mount_of", lambda place: None)
    monkeypatch.setattr(command, "ask", ask)
    assert command.trace.callback is not None
    command.trace.callback(
        mountpoint=Path("/mnt"), output=output, for_s=None, epochs=None, as_json=False
    )


@pytest.mark.promise(184)
@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
def test_a_trace_that_is_refused_leaves_the_file_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: object, **__: object) -> TraceEnd:
        raise BusyError("4 traces are being recorded")

    (tmp_path / name).write_text("precious")
    with pytest.raises(BusyError):
        traced(tmp_path / name, monkeypatch, refuse)
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_trace_that_a_living_daemon_has_cut_off_does_not_call_it_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """As that of a command that was stopped for a while."""

    def hang_up(*_: object, **__: object) -> TraceEnd:
        raise NotMountedError("the daemon ended before it answered")

    monkeypatch.setattr(command, "alive", lambda record: is_alive)
    with pytest.raises(MonarchError, match="has cut the trace off" if is_alive else "ended") as cut:
        traced(tmp_path / "opens.jsonl", monkeypatch, hang_up)
    assert cut.value.exit_code == (1 if is_alive else 9)


@pytest.mark.promise(184)
@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
def test_a_new_trace_is_closed_to_other_users_and_replaces_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def answer(*_: object, on_progress: Callable[[dict[str, Any]], None], **__: object) -> TraceEnd:
        for number, text in enumerate(TEXT):
            on_progress(TraceProgress(1, number, 0, text).to_dict())
        return TraceEnd("epochs", 3, 0)

    before = os.umask(0o022)
    try:
        traced(tmp_path / name, monkeypatch, answer)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    (tmp_path / name).write_text("x" * 100_000)
    traced(tmp_path / name, monkeypatch, answer)
    with read_trace(tmp_path / name) as trace:
        assert list(trace) == OPENS
        assert trace.end == TraceEnd("epochs", 3, 15)


@pytest.mark.promise(184)
@pytest.mark.parametrize("name", ["opens.jsonl", "opens.jsonl.gz"])
def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def answer(*_: object, on_progress: Callable[[dict[str, Any]], None], **__: object) -> TraceEnd:
        on_progress(TraceProgress(1, 0, 0, TEXT[0]).to_dict())
        raise AssertionError("the line was written")

    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        traced(tmp_path / name, monkeypatch, answer)
    assert caught.value.filename == str(tmp_path / name)
