"""Counts many opens at once in a *pass* over files.

A pass ends with a run of opens, none of them of a file that is new in the pass, of enough different
files: half of those of the pass, but at least 2 and at most 64. The caller then begins the next
pass with this run. ``placement/epochs.py`` and ``foresight/stream.py`` count single opens by the
same rule, and many opens with this module, if the extension is built.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

_LEAST_RUN = 2
MOST_RUN = 64

_Numbers: TypeAlias = "array[int]"
_CountOpens: TypeAlias = Callable[
    [_Numbers, int, int, int, bytearray, int, _Numbers, _Numbers, _Numbers, _Numbers], int
]


def ends_pass(run: int, files: int) -> bool:
    """Whether a run that has opened ``run`` different files ends a pass of ``files`` files."""
    return run >= max(_LEAST_RUN, min(MOST_RUN, files // 2))


def can_count() -> bool:
    """Whether ``Pass.count`` may be called: the extension is built."""
    return _extension() is not None


@dataclass(slots=True, kw_only=True)
class Pass:
    """The state of a pass. ``count`` changes all fields but the first four.

    ``first``: the inode number of the first file; files are counted by their distance from it.
    ``seen`` has ``mark`` for each file that the pass has opened, and ``files`` is their number.
    ``run`` has the files of the latest run, ``run_opens`` its opens; ``repeats`` is the number of
    files of earlier runs. With a ``window_size`` above 0, ``window`` has the files that were opened
    since the last complete window. An open of one of these is not counted before the pass has
    opened ``all_files``, and not for a run that has it.
    """

    first: int
    seen: bytearray
    mark: int
    window_size: int = 0
    opens: int
    files: int
    run: Iterable[int]
    run_opens: int = 0
    repeats: int = 0
    window: Iterable[int] = ()
    all_files: int = 0
    # Of the last call of ``count``: the number of windows before ``window``, the last of them, and
    # the files that were new in the pass, in the order of their opens.
    windows: int = 0
    last_window: list[int] = field(default_factory=list)
    new: array[int] = field(default_factory=lambda: array("I"))

    def count(self, opens: array[int], at: int, *, keep: int = 0) -> int:
        """Counts ``opens``, inode numbers in an array of type I, from the index ``at`` on.

        Returns the index of the next open: after a run that ends the pass, after a window that is
        complete and has fewer than ``keep`` opens behind it, or after all. ``run`` must not end
        the pass before, and ``window`` must not be complete. Raises ValueError for an open of
        another file.
        """
        count_opens, size = _extension(), self.window_size
        assert count_opens is not None
        run, window, new = array("I", self.run), array("I", self.window), array("I")
        numbers = self.opens, self.files, self.repeats, self.run_opens, len(run), len(window)
        counts = array("Q", (*numbers, 0, 0, self.all_files))
        for numbers_of, room in ((run, MOST_RUN), (window, 2 * size), (new, len(opens))):
            numbers_of.frombytes(bytes(numbers_of.itemsize * (room - len(numbers_of))))
        at = count_opens(
            opens, at, keep, self.first, self.seen, self.mark, run, window, new, counts
        )
        self.opens, self.files, self.repeats, self.run_opens = counts[:4]
        in_run, in_window, self.windows, in_new = counts[4:8]
        self.run, self.window, self.new = run[:in_run], window[:in_window], new[:in_new]
        self.last_window = window[size:].tolist()
        return at


@cache
def _extension() -> _CountOpens | None:
    try:
        extension = importlib.import_module("monarch.fuse._datapath")
    except ImportError:
        return None
    count_opens: _CountOpens = extension.count_opens
    return count_opens
