"""`monarch trace`: the opens of a mount, recorded and read back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch.telemetry.trace import TracedOpen, TraceEnd, read_trace
from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.waiting import wait_until
from tests.mount.observe import settled

# Reads each file whose path is in a line of the standard input.
_READER = "import sys; [open(line.rstrip(), 'rb').read() for line in sys.stdin]"


def images(files: int) -> dict[str, bytes]:
    return {f"train/{number:04}.jpg": contents(str(number), 300) for number in range(files)}


def read(mounted: Mounted, names: list[str]) -> int:
    """Reads the files; returns the number of the process, which is that of its session. It may end
    before the daemon has counted its opens."""
    with subprocess.Popen(
        [sys.executable, "-c", _READER], stdin=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        process.communicate("".join(f"{mounted.path / name}\n" for name in names))
    assert process.returncode == 0
    settled(mounted)
    return process.pid


def recorded(file: Path) -> tuple[list[TracedOpen], TraceEnd | None]:
    with read_trace(file) as trace:
        return list(trace), trace.end


@contextmanager
def tracing(
    monarch: MonarchCommand, mount: Path, file: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """A trace that has begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "monarch", "trace", str(mount), "-o", str(file), *options],
        env=monarch.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            wait_until(lambda: file.exists() and file.stat().st_size > 0, "the trace has begun")
            yield process
        finally:
            process.kill()


@pytest.mark.promise(184)
@pytest.mark.modes("relay", "passthrough", "no_open")
def test_a_trace_has_each_open_with_its_epoch(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    content = images(100)
    tree(content)
    mounted = monarch.mount(source)
    file = tmp_path / "opens.jsonl"
    orders = [random.Random(seed).sample(sorted(content), len(content)) for seed in range(3)]
    jobs = []
    with tracing(monarch, mounted.path, file, "--epochs", "2", "--json") as process:
        for order in orders:
            jobs.append(read(mounted, order))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(output) == {"end": "epochs", "opens": 200, "lost": 0}
    opens, end = recorded(file)
    assert end == TraceEnd("epochs", 200, 0)
    assert [(each.epoch, each.path) for each in opens] == [
        (epoch + 1, name) for epoch in range(2) for name in orders[epoch]
    ]
    assert {each.bytes for each in opens} == {300}
    times = [each.time_s for each in opens]
    assert times == sorted(times)
    if monarch.mode == "no_open":
        assert {(each.tier, each.latency_s, each.job) for each in opens} == {(None, None, None)}
    else:
        assert {each.tier for each in opens[100:]} == {"fast"}
        assert [each.job for each in opens] == [jobs[0]] * 100 + [jobs[1]] * 100


@pytest.mark.promise(184)
@pytest.mark.modes("relay", "python")
def test_an_interrupt_ends_a_trace_with_all_opens_until_then(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    content = images(20)
    tree(content)
    mounted = monarch.mount(source)
    file = tmp_path / "opens.jsonl.gz"
    with tracing(monarch, mounted.path, file) as process:
        read(mounted, sorted(content))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, f"20 opens in {file}\n")
    opens, end = recorded(file)
    assert [each.path for each in opens] == sorted(content)
    assert end == TraceEnd("interrupted", 20, 0)
    if monarch.mode == "python":
        assert all(each.latency_s is not None for each in opens)
    done = monarch("trace", str(mounted.path), "-o", str(tmp_path / "a.zst"), check=False)
    assert done.returncode == 2
    assert not (tmp_path / "a.zst").exists()


@pytest.mark.promise(184)
@pytest.mark.modes("relay")
def test_the_end_of_the_mount_ends_its_traces(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    content = images(20)
    tree(content)
    mounted = monarch.mount(source)
    file = tmp_path / "opens.jsonl"
    with tracing(monarch, mounted.path, file) as process:
        read(mounted, sorted(content))
        mounted.umount()
        process.communicate(timeout=60)
    assert process.returncode == 0
    opens, end = recorded(file)
    assert len(opens) == 20 and end == TraceEnd("unmounted", 20, 0)
    again = monarch("trace", str(mounted.path), "-o", str(file), check=False)
    assert again.returncode == 9
    assert len(recorded(file)[0]) == 20, "the file is not replaced without a mount"


@pytest.mark.modes("relay")
def test_a_fifo_whose_reader_has_gone_is_named(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    content = images(20)
    tree(content)
    mounted = monarch.mount(source)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, "-m", "monarch", "trace", str(mounted.path), "-o", str(fifo)],
        env=monarch.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with fifo.open("rb") as reader:
        assert reader.readline().startswith(b'{"monarch_trace":')
    read(mounted, sorted(content))
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert errors.endswith(f"monarch: {fifo}: the reader of the pipe has gone\n")
