"""Random operations in random order: reads return only what docs/semantics.md allows.

``python -m tests.model SEED COUNT`` plays many more plans.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import EVERY_MODE, require_fuse
from tests.model.model import Model, Version, Wrong
from tests.model.plan import Plan, generate
from tests.model.play import Failure, play
from tests.model.rig import Workers
from tests.model.shrink import shrink

PLANS = Path(__file__).with_name("plans")
SEEDS = 4
# How long a failure may take to become short, in seconds.
SHRINK_S = 30.0


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    require_fuse()
    with Workers() as made:
        yield made


def fail(plan: Plan, failure: Failure | None, directory: Path, workers: Workers) -> None:
    if failure is not None:
        found = shrink(plan, failure, directory, workers, seconds=SHRINK_S)
        pytest.fail(f"{failure}\nshort: {found.report()}", pytrace=False)


@pytest.mark.fault("S4", "S5", "S6", "T1", "T4", "T5", "T6", "M2")
@pytest.mark.promise(1, 4, 5, 6, 26, 27, 28, 40, 41, 45, 50)
def test_readers_see_one_version_whole_whatever_happens_meanwhile(
    workers: Workers, tmp_path: Path, mode: str, pytestconfig: pytest.Config
) -> None:
    end = time.monotonic() + pytestconfig.getoption("--soak")
    seed = 100 * EVERY_MODE.index(mode)
    played = 0
    while played < SEEDS or time.monotonic() < end:
        plan = generate(seed + played, mode=mode, may_have_disk=os.geteuid() == 0)
        fail(plan, play(plan, tmp_path / "play", workers), tmp_path / "shrink", workers)
        played += 1


@pytest.mark.fault("S4", "S6", "T4", "T5", "T6")
@pytest.mark.promise(1, 2, 3, 27, 40, 45)
@pytest.mark.parametrize("name", sorted(path.name for path in PLANS.iterdir()))
def test_plans_that_found_something_once_find_nothing(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    plan = Plan.loads((PLANS / name).read_text())
    failure = play(plan, tmp_path / "play", workers)
    assert failure is None, f"{failure}\n{failure.log}"


def test_a_plan_is_the_same_for_the_same_seed_and_comes_back_from_its_lines() -> None:
    for seed in range(50):
        plan = generate(seed, may_have_disk=True)
        assert generate(seed, may_have_disk=True) == plan == Plan.loads(plan.dumps())


def test_a_failure_becomes_short(workers: Workers, tmp_path: Path) -> None:
    plan = generate(4, mode="relay")
    # A file that the model believes to have other bytes than it has. Each of some twenty plays
    # takes as long as its operations.
    wrong = replace(plan, operations=(*plan.operations[:12], ("change", "forged", "a", 0)))
    failure = play(wrong, tmp_path / "play", workers)
    assert failure is not None
    found = shrink(wrong, failure, tmp_path / "shrink", workers, seconds=SHRINK_S)
    assert len(found.plan.operations) <= 2
    assert found.plan.operations[-1] == ("change", "forged", "a", 0)


# -- the model itself ------------------------------------------------------------------------------


def model(*contents: bytes | None, opens_are_reported: bool = True) -> Model:
    """One file, ``f``, that is mounted in its first version and has since had the others."""
    made = Model(opens_are_reported=opens_are_reported, inline_max=100)
    made.changed("f", version(contents[0], 0))
    made.mounted({"f"}, made.now(), looks=True, refreshed=False)
    for number, content in enumerate(contents[1:], start=1):
        made.changed("f", version(content, number))
    return made


def version(content: bytes | None, number: int) -> Version:
    times = None if content is None else (len(content), number, number)
    return Version(content, times, 7, 0o100644, restless=False)


def whole(made: Model, content: bytes) -> None:
    made.read_whole("f", made.now()["f"], (0, len(content), content, 0))


def test_the_model_allows_an_old_version_until_a_newer_one_was_seen() -> None:
    made = model(b"old", b"new")
    whole(made, b"old")
    whole(made, b"new")
    with pytest.raises(Wrong, match="1: f: 3 bytes"):
        whole(made, b"old")


@pytest.mark.parametrize("content", [b"nld", b"ne", b"", b"newer", b"\0\0\0"])
def test_the_model_finds_bytes_that_no_version_had(content: bytes) -> None:
    with pytest.raises(Wrong):
        whole(model(b"old", b"new"), content)


def test_the_model_finds_an_open_file_that_changes_its_version() -> None:
    made = model(b"old old", b"new new")
    handle = made.opened("f", made.now()["f"], 0, 7)
    assert handle is not None
    made.read(handle, made.now()["f"], 0, 3, b"old", 0)
    with pytest.raises(Wrong):
        made.read(handle, made.now()["f"], 4, 3, b"new", 0)


def test_the_model_lets_a_large_file_of_the_source_show_what_is_written_into_it() -> None:
    old, new = bytes(8192), bytes([1]) * 8192
    made = model(old, new)
    handle = made.opened("f", made.now()["f"], 0, 8192)
    assert handle is not None
    made.read(handle, made.now()["f"], 0, 4096, old[:4096], 0)
    made.read(handle, made.now()["f"], 4096, 4096, new[:4096], 0)
    with pytest.raises(Wrong):
        made.read(handle, made.now()["f"], 4096, 4096, old[:2048] + new[:2048], 0)


def test_the_model_finds_an_enoent_for_what_is_there_and_takes_it_for_what_is_not() -> None:
    made = model(b"old", None)
    made.opened("f", made.now()["f"], errno.ENOENT, 0)
    with pytest.raises(Wrong):
        made.opened("f", made.now()["f"], 0, 3)
    with pytest.raises(Wrong, match="10: f is ENOENT"):
        model(b"old").opened("f", model(b"old").now()["f"], errno.ENOENT, 0)


def test_the_model_takes_estale_only_where_it_is_promised() -> None:
    made = model(b"old", b"new", opens_are_reported=False)
    whole(made, b"old")
    made.read_whole("f", made.now()["f"], (errno.ESTALE, 0, b"", 0))
    reporting = model(b"old", b"new")
    with pytest.raises(Wrong, match="ESTALE"):
        reporting.read_whole("f", reporting.now()["f"], (errno.ESTALE, 0, b"", 0))


def test_the_model_finds_attributes_of_a_version_that_was_left_behind() -> None:
    made = model(b"old", b"new")
    made.stated("f", made.now()["f"], (0, 3, 0, 0))
    whole(made, b"new")
    made.stated("f", made.now()["f"], (0, 3, 1, 1))
    with pytest.raises(Wrong, match="26: stat of f"):
        made.stated("f", made.now()["f"], (0, 3, 0, 0))
