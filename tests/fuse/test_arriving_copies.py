"""A copy arrives while the datapath decides about an open of its file."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from monarch.placement.residency import Residency
from tests.conftest import Tree
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until
from tests.fuse import rig as rigs
from tests.fuse.wire import Op

SIZE = 5000


@pytest.mark.promise(180)
def test_a_copy_that_arrives_during_an_open_is_not_fetched_again(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marks are in a page that the datapath waits for when it reads them. Then the copy is in
    its tier, and the mark of a running one is gone."""
    source, pages = tree({"a": SIZE}), tmp_path / "pages"
    pages.mkdir()
    (pages / "marks").write_bytes(bytes(mmap.PAGESIZE))
    with SlowSource(pages, tmp_path / "slow") as slow:
        with (slow.path / "marks").open("rb") as file:
            marks = mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ)

        class Late(Residency):
            def __init__(self, entries: int) -> None:
                super().__init__(entries)
                self.marks_table = memoryview(marks)[: entries + 1]

        monkeypatch.setattr(rigs, "Residency", Late)
        slow.rules("hang read .")
        with OpenCounter(source) as counter, rigs.rig(source, tmp_path, fetch_max=SIZE) as made:
            try:
                made.init()
                counter.reset()
                ino = made.ino("a")
                made.send_open(ino)
                wait_until(lambda: slow.counters()["hanging"] > 0, "the datapath reads the marks")
                made.residency.place(ino, 1)
            finally:
                # Its thread could not end.
                slow.rules()
            assert made.passed().opcode == Op.OPEN
            assert counter.count() == 0
        # Its table is a view of the page.
        del made
        gc.collect()
        marks.close()
