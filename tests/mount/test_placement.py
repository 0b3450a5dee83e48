"""The tier of each file, and that no tier ever holds more bytes than its capacity."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from monarch.placement.policy import assign
from monarch.posix.buckets import BUCKETS, bucket
from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    account,
    accounts_agree,
    copies,
    epoch,
    read_through,
    resident,
    settled,
    wait_until,
)

# The uses of a file that its place depends on: opens are reported by Python or by the extension,
# which reports them the same with passthrough, and reads alone where no open is reported.
USES = ("python", "relay", "no_open")


def image_folder(count: int = 200, mean: float = 12_000) -> dict[str, bytes]:
    """Sizes as those of photographs: log-normal. The same in each run."""
    chosen = random.Random(5)
    names = [f"n{number % 10:02d}/{number:04d}.jpeg" for number in range(count)]
    return {name: contents(name, int(chosen.lognormvariate(0, 0.6) * mean) + 1) for name in names}


def total(content: Mapping[str, bytes]) -> int:
    return sum(map(len, content.values()))


def shuffled(content: Mapping[str, bytes], seed: int) -> list[str]:
    names = sorted(content)
    random.Random(seed).shuffle(names)
    return names


def predicted(
    source: Path, content: Mapping[str, bytes], tiers: Mapping[str, int]
) -> dict[str, str]:
    """The tier that the hash gives each file: from sizes and the source's inode numbers alone."""
    bucket_of = {name: bucket((source / name).stat().st_ino) for name in content}
    curve = np.zeros(BUCKETS, dtype=np.uint64)
    for name, number in bucket_of.items():
        curve[number] += np.uint64(len(content[name]))
    everywhere = range(1, len(tiers) + 1)
    table = assign({everywhere: curve}, list(tiers.values()))[everywhere]
    order = list(tiers)
    return {name: order[table[n] - 1] for name, n in bucket_of.items() if table[n]}


def sizes(tiers: Mapping[str, int]) -> dict[str, str]:
    return {name: str(capacity) for name, capacity in tiers.items()}


@pytest.mark.modes(*USES)
def test_tiers_are_filled_fastest_first_when_everything_fits(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number:02d}": contents(str(number), 10_000) for number in range(20)}
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "80000", "large": "1MB"})
    for name in content:
        # One after the other: room that a copy under way may still give back is not room.
        epoch(mounted, content, [name])
        settled(mounted)
    where = resident(mounted, content)
    assert [where[name] for name in sorted(content)] == ["fast"] * 8 + ["large"] * 12
    accounts_agree(mounted)


@pytest.mark.promise(34)
@pytest.mark.modes(*USES)
def test_files_that_do_not_all_fit_are_admitted_exactly_as_the_hash_says(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = image_folder()
    tree(content)
    tiers = {"fast": total(content) // 5, "large": 2 * total(content) // 5}
    mounted = monarch.mount(source, tiers=sizes(tiers))
    expected = predicted(source, content, tiers)
    assert {"fast", "large"} == set(expected.values())
    epoch(mounted, content, shuffled(content, 1))
    first = settled(mounted)
    assert resident(mounted, content) == expected
    accounts_agree(mounted)
    left = set(content) - set(expected)
    for seed in (2, 3):
        with OpenCounter(source) as counter:
            epoch(mounted, content, shuffled(content, seed))
            assert counter.paths() == dict.fromkeys(left, 1)
    # The fixed share stays: nothing is written to a tier after the first epoch.
    assert settled(mounted)["copies"] == first["copies"]
    assert resident(mounted, content) == expected


@pytest.mark.promise(285)
@pytest.mark.modes("relay", "passthrough")
def test_a_simulation_of_the_snapshot_has_the_hits_of_the_mount(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = image_folder()
    tree(content)
    capacity = 2 * total(content) // 5
    mounted = monarch.mount(source, tiers={"fast": str(capacity)})
    epoch(mounted, content, shuffled(content, 1))
    settled(mounted)
    copied = len(copies(mounted)["fast"])
    with OpenCounter(source) as counter:
        epoch(mounted, content, shuffled(content, 2))
        hits = len(content) - sum(counter.paths().values())
    options = ("--capacity", str(capacity), "--policies", "no_evict", "--epochs", "2", "--json")
    answer = monarch("simulate", mounted.status()["snapshot"]["file"], *options).stdout
    (only,) = json.loads(answer)["policies"]
    assert [each["hits"] for each in only["epochs"]] == [0, hits]
    assert [each["copies"] for each in only["epochs"]] == [copied, 0]


@pytest.mark.modes(*USES)
def test_first_come_places_exactly_what_fits_in_the_order_of_arrival(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number:02d}": contents(str(number), 10_000) for number in range(40)}
    tree(content)
    # 0.37 of the data set, and a little that is no file.
    mounted = monarch.mount(
        source, tiers={"fast": "157777"}, options=["placement.policy=first_come"]
    )
    order = shuffled(content, 7)
    epoch(mounted, content, order)
    settled(mounted)
    assert set(resident(mounted, content)) == set(order[:15])
    with OpenCounter(source) as counter:
        epoch(mounted, content, shuffled(content, 8))
        assert set(counter.paths()) == set(order[15:])
    accounts_agree(mounted)


@pytest.mark.modes(*USES)
def test_least_recently_used_keeps_its_capacity_and_hits_less_than_a_fixed_share(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number:02d}": contents(str(number), 10_000) for number in range(40)}
    tree(content)
    hits = {}
    for policy in ("lru", "first_come"):
        mounted = monarch.mount(
            source,
            monarch.directory / f"mnt-{policy}",
            tiers={policy: "200000"},
            state=monarch.directory / f"state-{policy}",
            options=[f"placement.policy={policy}"],
        )
        for seed in range(4):
            for name in shuffled(content, seed):
                epoch(mounted, content, [name])
                settled(mounted)
        report = account(mounted)
        hits[policy] = 4 * len(content) - report["source_totals"]["reader"]["opens"]
        assert report["tiers"][0]["used"] == 200_000
        accounts_agree(mounted)
    # Three epochs in which half of the files can be resident.
    assert hits["first_come"] == 3 * 20
    assert 0 < hits["lru"] < hits["first_come"]


@pytest.mark.modes(*USES)
def test_least_recently_used_drops_what_was_not_used_and_counts_it(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {name: contents(name, 10_000) for name in "abcd"}
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "30000"}, options=["placement.policy=lru"])
    for name in "abcabd":
        epoch(mounted, content, [name])
        settled(mounted)
    assert set(resident(mounted, content)) == {"a", "b", "d"}
    accounts_agree(mounted)


@pytest.mark.fault("S1")
@pytest.mark.promise(32)
@pytest.mark.modes(*USES)
def test_a_copy_leaves_at_once_for_a_file_that_the_source_does_not_give_yet(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = {name: contents(name, 30_000) for name in ("a", "b", "slow")}
    tree(content)
    mounted = monarch.mount(
        slow.path,
        tiers={"fast": "60000"},
        options=["placement.policy=lru", "limits.inline_max=4KiB"],
    )
    for name in "ab":
        epoch(mounted, content, [name])
        settled(mounted)
    slow.rules("hang open /slow$")
    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(read_through, mounted.path / "slow")
        wait_until(lambda: account(mounted)["tiers"][0]["files"] == 1, "room is made for it")
        # It is back in the place of the other, and not to be taken for the copy that has left.
        epoch(mounted, content, ["a"])
        wait_until(lambda: mounted.xattr("a") == "fast", "it has a copy again")
        slow.rules()
        assert waiting.result() == content["slow"]
    settled(mounted)
    accounts_agree(mounted)
    assert "a" in resident(mounted, content)
    epoch(mounted, content, "a")


@pytest.mark.fault("S3")
@pytest.mark.promise(32)
@pytest.mark.modes(*USES)
def test_a_copy_that_left_for_a_file_that_the_source_fails_to_give_is_gone(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("'broken': Input/output error")
    content = {name: contents(name, 30_000) for name in ("a", "b", "broken")}
    tree(content)
    mounted = monarch.mount(
        slow.path,
        tiers={"fast": "60000"},
        options=["placement.policy=lru", "limits.inline_max=4KiB"],
    )
    for name in "ab":
        epoch(mounted, content, [name])
        settled(mounted)
    slow.rules("err open EIO /broken$")
    with pytest.raises(OSError, match="Input/output error"):
        read_through(mounted.path / "broken")
    accounts_agree(mounted)


@pytest.mark.modes(*USES)
def test_a_file_that_is_too_big_does_not_keep_the_others_out(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {"00-huge": contents("huge", 900_000)}
    content |= {f"{number:02d}": contents(str(number), 10_000) for number in range(1, 11)}
    tree(content)
    for policy in ("no_evict", "first_come", "lru"):
        mounted = monarch.mount(
            source,
            monarch.directory / f"mnt-{policy}",
            tiers={policy: "100000"},
            state=monarch.directory / f"state-{policy}",
            options=[f"placement.policy={policy}"],
        )
        epoch(mounted, content, sorted(content))
        settled(mounted)
        assert set(resident(mounted, content)) == set(content) - {"00-huge"}, policy
        accounts_agree(mounted)


@contextmanager
def watched(mounted: Mounted) -> Iterator[dict[str, int]]:
    """The most bytes that lay in each tier at one moment, stages included, seen from outside.

    A listing of a directory takes its time. What two looks one after the other both found was there
    at the moment between them, so this never counts more than there was.
    """
    most = dict.fromkeys(mounted.tiers, 0)
    stop = threading.Event()

    def look() -> None:
        before: dict[str, dict[tuple[int, str], int]] = {name: {} for name in mounted.tiers}
        looks_left = 2
        while looks_left:
            if stop.wait(0.002):
                looks_left -= 1
            for name, directory in mounted.tiers.items():
                now = _files(directory)
                both = now.keys() & before[name].keys()
                seen = sum(min(now[key], before[name][key]) for key in both)
                most[name] = max(most[name], seen)
                before[name] = now

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join()


def _files(tier: Path) -> dict[tuple[int, str], int]:
    """The sizes of the files in a tier; one keeps its key when it is committed by a rename."""
    found = {}
    for pattern in ("monarch/*/stage/*", "monarch/*/copies-*/*/*"):
        for path in tier.glob(pattern):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[status.st_ino, path.stem] = status.st_size
    return found


@pytest.mark.promise(32)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_no_tier_holds_a_byte_too_much_while_four_readers_run(
    monarch: MonarchCommand, tree: Tree, source: Path, policy: str
) -> None:
    content = image_folder(120)
    tree(content)
    tiers = {f"fast-{policy}": total(content) // 6, f"large-{policy}": total(content) // 4}
    mounted = monarch.mount(source, tiers=sizes(tiers), options=[f"placement.policy={policy}"])
    failures: list[str] = []

    def read(order: Sequence[str]) -> None:
        for name in order:
            if read_through(mounted.path / name) != content[name]:
                failures.append(name)

    with watched(mounted) as most:
        readers = [
            threading.Thread(target=read, args=(shuffled(content, 10 * reader + 1),))
            for reader in range(4)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        settled(mounted)
    assert failures == []
    for name, capacity in tiers.items():
        assert 0 < most[name] <= capacity
    accounts_agree(mounted)


@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_tier_may_be_a_directory_in_memory(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = image_folder(30)
    tree(content)
    with TemporaryDirectory(prefix="monarch-test-", suffix="x", dir="/dev/shm") as memory:
        mounted = monarch.mount(
            source, tiers={}, arguments=["--tier", f"{memory}:10MB", "-o", "verify=open"]
        )
        mounted.tiers[Path(memory).name] = Path(memory)
        epoch(mounted, content)
        settled(mounted)
        with OpenCounter(source) as counter:
            epoch(mounted, content)
            assert counter.count() == 0
        assert len(copies(mounted)[Path(memory).name]) == 30
        accounts_agree(mounted)
        mounted.umount()
