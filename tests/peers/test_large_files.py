"""Several nodes share one large file: each byte is read from the source once."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from monarch.text import KiB, MiB
from tests.conftest import Tree, require_fuse
from tests.equipment import hosts
from tests.equipment.hosts import Hosts
from tests.equipment.processes import is_running
from tests.equipment.waiting import wait_until
from tests.mount.observe import forget_pages
from tests.peers.lab import Lab, lab

NODES = 3
SIZE = 34 * MiB - 5000
CONTENT = np.random.default_rng(5).bytes(SIZE)
PIECE = 200 * KiB


@pytest.fixture
def network() -> Iterator[Hosts]:
    require_fuse()
    if reason := hosts.unavailable():
        pytest.skip(reason)
    with Hosts(NODES) as made:
        yield made


def read_all(made: Lab, numbers: tuple[int, ...], seed: int) -> None:
    """Each node reads all pieces of the file in an order of its own, without its page cache."""
    failed: list[BaseException] = []

    def read(number: int) -> None:
        places = list(range(0, SIZE, PIECE))
        random.Random(seed * NODES + number).shuffle(places)
        try:
            fd = os.open(made.nodes[number].path / "large", os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                for place in places:
                    assert os.pread(fd, PIECE, place) == CONTENT[place : place + PIECE]
            finally:
                os.close(fd)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def bytes_at_the_source(made: Lab) -> int:
    return sum(report["source_totals"]["bytes"] for report in made.reports().values())


@pytest.mark.promise(274, 340)
def test_a_large_file_is_read_once_by_all_nodes_and_without_one_of_them_its_part_again(
    tmp_path: Path, tree: Tree, network: Hosts
) -> None:
    source = tree({"large": CONTENT})
    # A younger file may change without another time of change, so it is not kept.
    time.sleep(max(0.0, (source / "large").stat().st_ctime + 2.5 - time.time()))
    with lab(tmp_path, tmp_path / "source", NODES, network) as made:
        for number in range(1, NODES + 1):
            made.mount(number, tier="40MiB")
        read_all(made, (1, 2, 3), 1)
        assert bytes_at_the_source(made) == SIZE
        read_all(made, (1, 2, 3), 2)
        reports = made.reports()
        assert bytes_at_the_source(made) == SIZE
        kept = {number: report["tiers"][0]["used"] for number, report in reports.items()}
        assert SIZE <= sum(kept.values()) < SIZE + NODES * MiB
        assert all(report["peers"]["failures"] == {} for report in reports.values())
        assert sum(report["peers"]["bytes"] for report in reports.values()) > SIZE
        engine = made.engine(3)
        assert engine is not None
        made.nodes[3].kill()
        wait_until(lambda: not is_running(engine), "the engine has ended with its daemon")
        before = bytes_at_the_source(made)
        read_all(made, (1, 2), 3)
        # Each node that is left reads what it does not get from the other one.
        assert bytes_at_the_source(made) - before <= 2 * kept[3]


@pytest.mark.promise(40)
def test_without_opens_a_file_that_other_nodes_read_too_is_never_two_versions(
    tmp_path: Path, tree: Tree
) -> None:
    require_fuse()
    source = tree({"large": CONTENT})
    # It has rested, as above.
    time.sleep(max(0.0, (source / "large").stat().st_ctime + 2.5 - time.time()))
    with lab(tmp_path, source, 2) as made:
        made.mount(1, "open=none", tier="40MiB")
        made.mount(2, tier="40MiB")
        fd = os.open(made.nodes[1].path / "large", os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            # The first node has its blocks open for the second one.
            read_all(made, (2,), 1)
            assert os.pread(fd, PIECE, 0) == CONTENT[:PIECE]
            (source / "new").write_bytes(CONTENT[::-1])
            (source / "new").rename(source / "large")
            for command in made.commands:
                command.allows_log("changed at the source since the snapshot")

            def is_refused() -> bool:
                """Before that it may still have the version that it has opened."""
                forget_pages(fd)
                try:
                    data = os.pread(fd, PIECE, SIZE // 2)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    return True
                assert data == CONTENT[SIZE // 2 : SIZE // 2 + PIECE]
                time.sleep(1.5)  # longer than a file without a reader stays open
                return False

            wait_until(is_refused, "the change is noticed")
        finally:
            os.close(fd)
