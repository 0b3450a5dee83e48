"""Hundreds of threads that wait for a source that hangs, on a real mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch.config.settings import LimitSettings
from monarch.text import MiB
from tests.conftest import MonarchCommand, Tree, contents
from tests.equipment.processes import status_field
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import epoch, settled, wait_until

OPENS, READS = 600, 300
READERS = 300
AT_SOURCE = LimitSettings().source_concurrency

_WAITERS = f"""
import os, sys, threading
threading.stack_size(65536)
small, large = sys.argv[1:]
fd = os.open(large, os.O_RDONLY)
wrong = []
def open_small():
    with open(small, "rb", 0) as file:
        if not file.read(1):
            wrong.append("small")
def read_large(number):
    if len(os.pread(fd, 4096, number * 196608)) != 4096:
        wrong.append("large")
threads = [threading.Thread(target=open_small) for _ in range({OPENS})]
threads += [threading.Thread(target=read_large, args=(n,)) for n in range({READS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(bool(wrong))
"""
_OPENERS = """
import sys, threading
threading.stack_size(65536)
for path in sys.argv[1:]:
    threading.Thread(target=lambda path=path: open(path, "rb", 0).read(1)).start()
"""
_READ = """
import os, sys
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(fd, 65536):
        pass
"""


@contextmanager
def waiters(small: Path, large: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [sys.executable, "-c", _WAITERS, str(small), str(large)]
    with subprocess.Popen(arguments) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.finding("D3")
@pytest.mark.promise(11, 89, 91)
@pytest.mark.fault("S1", "M10")
def test_nine_hundred_that_wait_for_the_source_change_nothing_for_others(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    resident = {f"resident/{n}": contents(f"r{n}", size) for n, size in enumerate((900, 500_000))}
    # Smaller than limits.range_min: the datapath relays it, and reads of parts wait in Python.
    tree({**resident, "small": 5000, "large": 60 * MiB})
    mounted = monarch.mount(slow.path, options=["limits.source_concurrency=32"])
    epoch(mounted, resident)
    settled(mounted)
    before = status_field(mounted.pid, "RssAnon")
    slow.rules("hang read ^/(small|large)")
    with waiters(mounted.path / "small", mounted.path / "large") as process:
        # Of threads that wait for the same page one alone has asked.
        least = READS // 2
        wait_until(lambda: mounted.status()["requests"]["waiting"] >= least, "they wait")
        wait_until(lambda: status_field(process.pid, "Threads") > OPENS + READS, "all of them")
        names = [str(mounted.path / name) for name in resident]
        # What hangs in the kernel would hang the test.
        subprocess.run([sys.executable, "-c", _READ, *names], check=True, timeout=100)
        subprocess.run(
            ["ls", "-l", str(mounted.path)], check=True, timeout=100, capture_output=True
        )
        subprocess.run(["stat", "-f", str(mounted.path)], check=True, timeout=100)
        requests = mounted.status()["requests"]
        assert requests["waiting"] >= least and requests["oldest_s"] > 0
        assert status_field(mounted.pid, "Threads") < 150
        # A sanitizer takes memory of its own for each thread and each address.
        if "TSAN_OPTIONS" not in os.environ:
            assert status_field(mounted.pid, "RssAnon") - before < 64 * 1024
        slow.rules()
        assert process.wait(60) == 0
    wait_until(lambda: mounted.status()["requests"]["waiting"] == 0, "all are answered")
    settled(mounted)


@pytest.mark.promise(11, 89)
def test_as_many_readers_are_at_the_source_as_configured_and_no_more(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    """A source that is far away needs many calls at once; one that hangs must not take threads."""
    names = [f"f{number}" for number in range(READERS)]
    tree(dict.fromkeys(names, 500))
    # A fetch ahead is a call of Python's threads, which are limited apart from the datapath's.
    options = ["foresight.ahead=false", "foresight.fill=false"]
    mounted = monarch.mount(slow.path, options=options)
    slow.rules("hang open ^/f")
    paths = [str(mounted.path / name) for name in names]
    with subprocess.Popen([sys.executable, "-c", _OPENERS, *paths]) as process:
        try:
            wait_until(lambda: mounted.status()["requests"]["waiting"] == READERS, "they wait")
            wait_until(lambda: slow.counters()["hanging"] == AT_SOURCE, "many ask the source")
            assert status_field(mounted.pid, "Threads") < AT_SOURCE + 64
            slow.rules()
            assert process.wait(60) == 0
        finally:
            process.kill()
    settled(mounted)
