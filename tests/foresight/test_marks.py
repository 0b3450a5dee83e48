"""The marks of files, and the counts of the parts that they are in."""

from __future__ import annotations

import random

from monarch.foresight.marks import AHEAD, FETCHED, GIVEN, GONE, READ, Marks
from monarch.types import Ino


class Files:
    """A part: some consecutive files."""

    def __init__(self, files: range) -> None:
        self.files = files
        self.read = self.ahead = self.gone = 0


def test_each_part_counts_its_files() -> None:
    """Two parts share files, and the second part is added when some files have marks."""
    chosen = random.Random(3)
    marks, early, late = Marks(100), Files(range(10, 60)), Files(range(40, 101))
    marks.add(early)
    for step in range(4000):
        if step == 1000:
            marks.add(late)
        kinds = (0, READ, GIVEN, FETCHED, READ | GIVEN, GONE, GONE | FETCHED)
        ino, mark = chosen.randrange(1, 101), chosen.choice(kinds)
        marks.set(Ino(ino), mark)
        assert marks.of[ino] == mark
        for part in (early, late) if step >= 1000 else (early,):
            held = [marks.of[number] for number in part.files]
            assert part.read == sum(bool(one & READ) for one in held)
            assert part.ahead == sum(bool(one & AHEAD) for one in held)
            assert part.gone == sum(bool(one & GONE) for one in held)
    assert marks.fetched == sum(bool(one & FETCHED) for one in marks.of) > 0
    marks.remove(early)
    before = early.read, early.ahead
    marks.set(Ino(20), READ)
    marks.set(Ino(20), 0)
    assert (early.read, early.ahead) == before
