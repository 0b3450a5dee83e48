"""The mode in which reads are served, and the requests that wait, with and without a datapath."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monarch.fuse.datapath import DatapathState
from monarch.fuse.datapath_mode import Choice, Serving
from monarch.telemetry.report import Requests

CHOICE = Choice("passthrough", "open", "it is possible", cache_listings=True)
STATE = DatapathState(
    serving=True,
    open_files=0,
    backing_ids=0,
    passthrough=True,
    no_open=False,
    refusal=0,
    ended=0,
    threads=1,
    oldest_wait_s=0.0,
    timed_out=0,
    waiting=4,
    oldest_request_s=2.5,
)


class Datapath:
    def __init__(self, state: DatapathState) -> None:
        self._state = state

    def state(self) -> DatapathState:
        return self._state


def serving(state: DatapathState) -> Serving:
    datapath: Any = Datapath(state)
    return Serving(CHOICE, datapath)


def test_without_a_datapath_the_requests_are_those_of_python() -> None:
    made = Serving(CHOICE, None)
    assert made.requests() == Requests(0, 0.0)
    with made.answering():
        with made.answering():
            assert made.requests().waiting == 2
        assert made.requests().waiting == 1
        assert made.requests().oldest_s >= 0.0
    with pytest.raises(ValueError), made.answering():
        raise ValueError
    assert made.requests() == Requests(0, 0.0)
    assert made.mode() == CHOICE.mode


def test_the_requests_of_a_datapath_include_those_that_it_has_passed_on() -> None:
    made = serving(STATE)
    with made.answering():
        assert made.requests() == Requests(4, 2.5)


def test_the_mode_is_the_one_to_which_the_kernel_has_agreed() -> None:
    assert serving(STATE).mode().datapath == "passthrough"
    assert serving(replace(STATE, passthrough=False)).mode().datapath == "relay"
