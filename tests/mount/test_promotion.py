"""Copying from the source to a tier: the number of source reads, and the readers' bytes."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash

from monarch.control.client import call
from monarch.text import MiB
from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    account,
    accounts_agree,
    asked_for,
    copies,
    copy_of,
    epoch,
    forget_pages,
    read_through,
    resident,
    settled,
    wait_until,
)

KIB = 1024
# So that a few MiB are a large file.
SMALL_INLINE = "limits.inline_max=64KiB"


def files(count: int, size: int = 20_000) -> dict[str, bytes]:
    names = [f"class{number % 5}/{number:03d}.jpg" for number in range(count)]
    return {name: contents(name, size + 7 * number) for number, name in enumerate(names)}


def timed(fd: int, places: Iterable[int], size: int) -> tuple[bytes, float]:
    """The bytes at each of the places, and the seconds in which they were read."""
    found, seconds = bytearray(), 0.0
    for place in places:
        began = time.monotonic()
        found += os.pread(fd, size, place)
        seconds += time.monotonic() - began
    return bytes(found), seconds


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


Calls = Callable[[], Counter[str]]


@pytest.fixture
def calls(slow: SlowSource) -> Calls:
    """The calls that the source got since the last time it was asked."""
    last = Counter(slow.counters())

    def since() -> Counter[str]:
        now = Counter(slow.counters())
        new = now - last
        last.clear()
        last.update(now)
        return new

    return since


# -- small files: fetched whole by the open --------------------------------------------------------


def test_the_first_epoch_reads_every_file_once_and_later_ones_nothing(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    content = files(40)
    tree(content)
    total = sum(map(len, content.values()))
    mounted = monarch.mount(slow.path)
    calls()
    epoch(mounted, content)
    first = calls()
    assert first["open"] == 40
    assert first["read"] == 40
    assert first["read_bytes"] == total
    report = settled(mounted)
    assert report["source_totals"]["opens"] == 40
    assert report["source_totals"]["bytes"] == total
    assert report["source_totals"]["copy"] == {"opens": 0, "reads": 0, "bytes": 0}
    calls()
    for _ in range(2):
        epoch(mounted, content, sorted(content, reverse=True))
    later = calls()
    assert not later["open"] and not later["read"] and not later["read_bytes"]
    assert settled(mounted)["source_totals"] == report["source_totals"]


def test_a_copy_has_the_bytes_of_its_file(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(10) | {"empty": b"", "zeros": bytes(3 << 20), "one": b"1"}
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    for name, expected in content.items():
        if expected or monarch.mode != "no_open":  # there no process requests an empty file
            assert copy_of(mounted, name).read_bytes() == expected
    accounts_agree(mounted)


def test_a_small_file_read_in_parts_costs_the_source_its_bytes_once(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    size = 100_000
    tree({"parts": size})
    mounted = monarch.mount(slow.path)
    calls()
    with (mounted.path / "parts").open("rb", buffering=0) as file:
        for offset in range(0, size, 9_999):
            forget_pages(file.fileno())
            part = os.pread(file.fileno(), 9_999, offset)
            assert part == contents("parts", size)[offset : offset + 9_999]
    settled(mounted)
    seen = calls()
    assert seen["open"] == 1
    assert seen["read_bytes"] == size


PARTS = {"a": 300 * KIB, "b": 3 * MiB // 2, "c": 3 * MiB}


@pytest.mark.promise(347)
def test_a_small_file_without_a_copy_is_fetched_once_for_all_its_reads(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree(PARTS)
    mounted = monarch.mount(source, tiers={"fast": "64KiB"})
    with OpenCounter(source) as opens:
        for name, size in PARTS.items():
            with (mounted.path / name).open("rb", buffering=0) as file:
                first = file.read(1)
                # Until then the daemon has the bytes in any case.
                account(mounted)
                assert first + file.readall() == contents(name, size)
        assert opens.paths() == dict.fromkeys(PARTS, 1)
    assert account(mounted)["residency"]["wanted"] == 0


@pytest.mark.promise(347)
@pytest.mark.modes("no_open")
def test_the_bytes_of_a_file_leave_when_no_read_comes(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """After a pause, or after the first bytes of 64 other files, the file is fetched anew."""
    names = [f"{number:02}" for number in range(65)]
    tree(dict.fromkeys(names, 300 * KIB))
    mounted = monarch.mount(source, tiers={"fast": "64KiB"})

    def first_byte(name: str) -> None:
        with (mounted.path / name).open("rb", buffering=0) as file:
            forget_pages(file.fileno())
            assert file.read(1) == contents(name, 300 * KIB)[:1]

    with OpenCounter(source) as opens:
        for name in names:
            first_byte(name)
        account(mounted)
        first_byte("00")
        assert opens.paths()["00"] == 2

        def is_fetched_again() -> bool:
            before = opens.count()
            time.sleep(3)
            first_byte("64")
            return opens.count() > before

        wait_until(is_fetched_again, "the bytes have left after a pause")


def read_by_eight_processes(path: Path, expected: bytes, calls: Calls) -> Counter[str]:
    """The calls at the source while eight processes open a file at once and read it."""
    program = "import sys; sys.stdin.read(1); print(open(sys.argv[1], 'rb').read().hex())"
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(8)
    ]
    calls()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write(b"x")
        reader.stdin.flush()
    assert [reader.communicate()[0] for reader in readers] == [expected.hex().encode() + b"\n"] * 8
    return calls()


@pytest.mark.promise(35)
def test_eight_processes_that_open_a_cold_file_at_once_cost_one_open_and_one_read(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    tree({"shared": 50_000})
    mounted = monarch.mount(slow.path)
    slow.rules("lat open 400", "lat read 200")
    content = contents("shared", 50_000)
    seen = read_by_eight_processes(mounted.path / "shared", content, calls)
    assert (seen["open"], seen["read"], seen["read_bytes"]) == (1, 1, 50_000)
    assert settled(mounted)["source_totals"]["opens"] == 1


def test_eight_processes_that_open_a_file_without_a_mount_cost_eight_opens(
    slow: SlowSource, tree: Tree, calls: Calls
) -> None:
    """The opens of the test before are counted one by one."""
    tree({"shared": 50_000})
    seen = read_by_eight_processes(slow.path / "shared", contents("shared", 50_000), calls)
    assert seen["open"] == 8


def test_opening_again_while_the_commit_is_under_way_does_not_ask_the_source_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(30)
    tree(content)
    mounted = monarch.mount(source)
    with OpenCounter(source) as counter:
        for name in content:
            for _ in range(5):
                assert read_through(mounted.path / name) == content[name]
        assert counter.count() == 30
    assert settled(mounted)["source_totals"]["opens"] == 30


# -- large files: copied behind the reader ---------------------------------------------------------


@pytest.mark.promise(36)
def test_a_large_file_is_read_from_the_source_while_its_copy_follows(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    size = 3_000_000
    tree({"large": size})
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    slow.rules("lat read 10")
    calls()
    assert read_through(mounted.path / "large") == contents("large", size)
    report = settled(mounted)
    # The copy shares the reader's descriptor.
    assert calls()["open"] == 1
    totals = report["source_totals"]
    assert totals["opens"] == totals["reader"]["opens"] == 1
    assert totals["reader"]["bytes"] == size
    assert totals["copy"]["bytes"] == size
    assert totals["bytes"] == 2 * size
    assert report["copies"]["bytes"] == size
    assert mounted.xattr("large") == "fast"
    calls()
    assert read_through(mounted.path / "large") == contents("large", size)
    assert not calls()["open"]
    shown_bytes = None if monarch.mode == "passthrough" else size
    assert settled(mounted)["tiers"][0]["bytes"] == shown_bytes


@pytest.mark.finding("C4")
@pytest.mark.promise(36, 37)
@pytest.mark.fault("S18")
def test_where_the_bandwidth_is_the_limit_readers_have_it(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    size = 16 << 20
    tree({"sequential": size // 2, "random": size})
    mounted = monarch.mount(slow.path, tiers={"fast": "100MiB"})
    slow.rules("read_MBps 4")
    calls()
    # While no process reads, because this one is not scheduled, a copy may have all of it.
    copied_alone = 4 << 20
    # A sequential reader is followed, and its bytes cross the network once.
    with (mounted.path / "sequential").open("rb", buffering=0) as file:
        began = time.monotonic()
        found, reading_s = timed(file.fileno(), range(0, size // 2, 1 << 20), 1 << 20)
        idle_s = time.monotonic() - began - reading_s
        assert found == contents("sequential", size // 2)
        settled(mounted)
        assert calls()["read_bytes"] <= (size // 2) + (1 << 20) + idle_s * copied_alone
    # A random reader is not followed. Copies have a small share of the source meanwhile.
    with (mounted.path / "random").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        began = time.monotonic()
        places = range(size - (512 << 10), 0, -(1 << 20))
        _, reading_s = timed(file.fileno(), places, 512 << 10)
        assert account(mounted)["residency"]["files"] == 1
        read = calls()["read_bytes"]
        idle_s = time.monotonic() - began - reading_s
        # 8 MiB by the reader, and a few pieces by the copy.
        assert read <= (11 << 20) + idle_s * copied_alone
    slow.rules()
    settled(mounted)
    assert copy_of(mounted, "random").read_bytes() == contents("random", size)


def test_a_copy_continues_when_its_reader_closes_early(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    size = 2_000_000
    tree({"large": size})
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    slow.rules("lat read 20")
    calls()
    with (mounted.path / "large").open("rb", buffering=0) as file:
        assert file.read(10) == contents("large", size)[:10]
    report = account(mounted)
    assert not report["handles"]["open_files"] or report["residency"]["wanted"] == 1
    settled(mounted)
    assert calls()["open"] == 1
    assert copy_of(mounted, "large").read_bytes() == contents("large", size)


def test_a_large_file_opened_again_during_its_copy_shares_the_open_file(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    size = 2_000_000
    tree({"large": size})
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    slow.rules("hang read large")
    calls()
    with ExitStack() as readers:
        for _ in range(5):
            reader = asked_for(mounted, "large")
            if monarch.mode == "no_open":
                # It waits for its bytes.
                readers.enter_context(reader)
            else:
                with reader:
                    pass
        wait_until(lambda: slow.counters()["hanging"] > 0, "the copy hangs")
        assert mounted.xattr("large", "user.monarch.state") == "wanted"
        slow.rules()
    settled(mounted)
    assert read_through(mounted.path / "large") == contents("large", size)
    assert calls()["open"] == 1


@pytest.mark.promise(6)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_reader_that_holds_a_file_open_across_its_promotion_reads_right_bytes(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    size = 1_000_000
    tree({"large": size})
    expected = contents("large", size)
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    with (mounted.path / "large").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 1000, 0) == expected[:1000]
        settled(mounted)
        assert mounted.xattr("large") == "fast"
        for offset in range(0, size, 100_000):
            forget_pages(file.fileno())
            assert os.pread(file.fileno(), 1000, offset) == expected[offset : offset + 1000]
        # Readers of one file see one version: while it is open it stays where it was opened.
        assert read_through(mounted.path / "large") == expected
        assert account(mounted)["tiers"][0]["opens"] == 0
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the release arrived")
    assert read_through(mounted.path / "large") == expected
    assert account(mounted)["tiers"][0]["opens"] == 1


# -- extended attributes of a file --------------------------------------------------------------


@pytest.mark.promise(30)
def test_the_attributes_of_a_file_tell_where_it_is_at_each_stage(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    size = 500_000
    tree({"large": size})
    path = monarch.mount(slow.path, options=[SMALL_INLINE]).path / "large"
    (mounted,) = monarch.mounted

    def shown_attributes() -> dict[str, str]:
        values = {}
        for name in ("tier", "state", "digest"):
            # Where there is none it is ENODATA, for which listing tools look out.
            with suppress(OSError):
                values[name] = os.getxattr(path, f"user.monarch.{name}").decode()
        return values

    assert shown_attributes() == {"tier": "source", "state": "source"}
    slow.rules("hang read large")
    with asked_for(mounted, "large"):
        wanted = {"tier": "source", "state": "wanted"}
        wait_until(lambda: shown_attributes() == wanted, "its copy is under way")
        slow.rules()
        settled(mounted)
    here = {"tier": "fast", "state": "resident", "digest": digest(contents("large", size))}
    assert shown_attributes() == here
    monarch("evict", str(mounted.path), "large")
    assert shown_attributes() == {"tier": "source", "state": "source"}


# -- warm and evict --------------------------------------------------------------------------------


def test_warm_with_wait_returns_when_everything_is_resident(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(25) | {"large": contents("large", 900_000)}
    tree(content)
    mounted = monarch.mount(source, options=[SMALL_INLINE])
    answer = json.loads(monarch("warm", str(mounted.path), "--wait", "--json").stdout)
    asked = {"files": 26, "bytes": sum(map(len, content.values()))}
    assert answer == {**asked, "refused": 0, "cancelled": False}
    assert resident(mounted, content) == dict.fromkeys(content, "fast")
    accounts_agree(mounted)
    totals = account(mounted)["source_totals"]
    assert totals["copy"] == {
        "opens": 26,
        "reads": totals["copy"]["reads"],
        "bytes": sum(map(len, content.values())),
    }
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        assert counter.count() == 0


def test_warming_what_is_resident_copies_nothing(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(10)
    tree(content)
    mounted = monarch.mount(source)
    for _ in range(2):
        monarch("warm", str(mounted.path), "--wait")
        assert account(mounted)["copies"]["done"] == 10


def test_warm_of_listed_paths_leaves_the_rest_at_the_source(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    content = files(20)
    tree(content)
    mounted = monarch.mount(source)
    asked = {name for name in content if name.startswith("class1/")} | {"class2/002.jpg"}
    listed = tmp_path / "listed"
    listed.write_bytes(os.fsencode(f"class1\n{mounted.path}/class2/002.jpg\n"))
    report = json.loads(
        monarch("warm", str(mounted.path), "--files-from", str(listed), "--json").stdout
    )
    assert report["files"] == len(asked)
    settled(mounted)
    assert set(resident(mounted, content)) == asked


@pytest.mark.finding("B11", "F3")
@pytest.mark.promise(112)
def test_a_warm_tells_bytes_under_way_is_shown_by_status_and_can_be_cancelled(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    sizes = {f"{number:02d}": 8 * MiB for number in range(40)}
    tree(sizes)
    mounted = monarch.mount(
        slow.path, tiers={"fast": "1GiB"}, options=["limits.copy_workers=1,limits.inline_max=1MiB"]
    )
    slow.rules("lat read 40")
    steps: list[dict[str, Any]] = []
    socket = mounted.state / "control.sock"
    first = threading.Thread(
        target=call,
        args=(socket, "warm", {"wait": True}),
        kwargs={"timeout": None, "on_progress": steps.append},
    )
    first.start()
    wait_until(
        lambda: any(at["bytes_done"] - 8 * MiB * at["done"] > 0 for at in list(steps)),
        "bytes of a file under way are counted",
    )
    (shown,) = account(mounted)["warming"]
    assert (shown["total"], shown["bytes_total"]) == (40, 40 * 8 * MiB)
    assert "monarch warm MOUNTPOINT --cancel" in monarch("status", str(mounted.path)).stdout
    assert "1 call of" in monarch("warm", str(mounted.path), "--cancel").stdout
    slow.rules()
    first.join(60)
    assert not first.is_alive()
    assert account(mounted)["warming"] == []
    assert monarch("warm", str(mounted.path), "--cancel").stdout.startswith("0 calls")


def test_warming_more_than_fits_says_so_and_fills_the_tier(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number:02d}": contents(str(number), 10_000) for number in range(20)}
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": "125000"})
    done = monarch("warm", str(mounted.path), "--wait", "--json", check=False)
    assert done.returncode == 1
    report = {"files": 20, "bytes": 200_000, "refused": 8, "cancelled": False}
    assert json.loads(done.stdout) == report
    assert len(resident(mounted, content)) == 12
    accounts_agree(mounted)


def test_an_evicted_file_gives_its_space_back_and_is_read_from_the_source(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(10)
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    gone = {name for name in content if name.startswith("class3/")}
    answer = json.loads(monarch("evict", str(mounted.path), "class3", "--json").stdout)
    assert answer == {"files": 2, "bytes": sum(len(content[name]) for name in gone)}
    assert set(resident(mounted, content)) == set(content) - gone
    accounts_agree(mounted)
    with OpenCounter(source) as counter:
        epoch(mounted, content)
        assert counter.paths() == dict.fromkeys(gone, 1)
    monarch("evict", str(mounted.path))
    assert copies(mounted) == {"fast": {}}
    accounts_agree(mounted)


@pytest.mark.promise(112)
def test_a_file_evicted_while_it_is_warmed_stays_out(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = {f"{where}/{n}": contents(f"{where}{n}", 9000) for where in "ab" for n in range(8)}
    tree(content)
    options = ["limits.copy_workers=1,limits.inline_max=4096"]
    mounted = monarch.mount(slow.path, options=options)
    slow.rules("hang * .*")
    report: list[dict[str, Any]] = []
    arguments = (mounted.state / "control.sock", "warm", {"wait": True})
    asking = threading.Thread(target=lambda: report.append(call(*arguments, timeout=None)))
    asking.start()
    wait_until(lambda: slow.counters()["hanging"] > 0, "a copy is under way")
    wait_until(lambda: account(mounted)["copies"]["queued"] > 0, "others wait for a worker")
    under_way = account(mounted)["copies"]
    # The copy under way, those that wait for a worker, and those that were not asked for yet.
    assert under_way["running"] == 1
    assert under_way["queued"] < 15
    monarch("evict", str(mounted.path), "a")
    slow.rules()
    asking.join()
    kept = {name for name in content if name.startswith("b/")}
    assert report == [{"files": 8, "bytes": 8 * 9000, "refused": 0, "cancelled": False}]
    settled(mounted)
    assert set(resident(mounted, content)) == kept
    accounts_agree(mounted)
    epoch(mounted, content)
    settled(mounted)
    assert set(resident(mounted, content)) == set(content)


@pytest.mark.promise(112)
def test_a_file_evicted_and_warmed_again_while_it_is_copied_stays(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = {name: contents(name, 9000) for name in ("warmed", "read", "left", "queued")}
    tree(content)
    options = ["limits.copy_workers=3,limits.inline_max=4096"]
    mounted = monarch.mount(slow.path, options=options)
    slow.rules("hang * .*")
    monarch("warm", str(mounted.path))
    wait_until(lambda: account(mounted)["copies"]["running"] == 3, "copies are under way")
    wait_until(lambda: slow.counters()["hanging"] >= 1, "the source hangs")
    monarch("evict", str(mounted.path))
    assert account(mounted)["residency"]["wanted"] == 0
    report: list[dict[str, Any]] = []
    arguments = (mounted.state / "control.sock", "warm", {"paths": ["warmed"], "wait": True})
    asking = threading.Thread(target=lambda: report.append(call(*arguments, timeout=None)))
    asking.start()
    reading = threading.Thread(target=read_through, args=[mounted.path / "read"])
    reading.start()
    wait_until(lambda: account(mounted)["residency"]["wanted"] == 2, "both are asked for")
    slow.rules()
    asking.join()
    reading.join()
    settled(mounted)
    assert report == [{"files": 1, "bytes": 9000, "refused": 0, "cancelled": False}]
    assert set(resident(mounted, content)) == {"warmed", "read"}
    accounts_agree(mounted)


@pytest.mark.promise(112)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_evicted_while_its_open_waits_for_the_source_stays_out(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    tree({"file": contents("file", 9000)})
    mounted = monarch.mount(slow.path, options=["limits.inline_max=4096"])
    slow.rules("hang * .*")
    reading = threading.Thread(target=read_through, args=[mounted.path / "file"])
    reading.start()
    wait_until(lambda: slow.counters()["hanging"] > 0, "the open hangs")
    wait_until(lambda: account(mounted)["residency"]["wanted"] == 1, "a copy is decided upon")
    monarch("evict", str(mounted.path), "file")
    slow.rules()
    reading.join()
    settled(mounted)
    assert resident(mounted, ["file"]) == {}
    accounts_agree(mounted)


@pytest.mark.promise(112)
def test_copies_that_are_evicted_before_their_turn_are_not_read(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, calls: Calls
) -> None:
    content = {f"{where}/{n}": contents(f"{where}{n}", 9000) for where in "ab" for n in range(8)}
    tree(content)
    options = ["limits.copy_workers=1,limits.inline_max=4096"]
    mounted = monarch.mount(slow.path, options=options)
    calls()
    slow.rules("hang * .*")
    # A path named twice, once as a part of the other, counts once.
    monarch("warm", str(mounted.path), "a", "a/0", "a/0")
    report: list[dict[str, Any]] = []
    arguments = (mounted.state / "control.sock", "warm", {"paths": ["b", "b/0"], "wait": True})
    asking = threading.Thread(target=lambda: report.append(call(*arguments, timeout=None)))
    asking.start()
    wait_until(lambda: account(mounted)["copies"]["queued"] == 4, "a copy is under way")
    wait_until(lambda: len(account(mounted)["warming"]) == 2, "both are under way")
    (first, second) = account(mounted)["warming"]
    assert (first["total"], second["total"]) == (8, 8)
    monarch("evict", str(mounted.path))
    # No process waits for the source because of an unwanted file.
    asking.join()
    assert report == [{"files": 0, "bytes": 0, "refused": 0, "cancelled": False}]
    assert account(mounted)["warming"] == []
    slow.rules()
    settled(mounted)
    assert resident(mounted, content) == {}
    assert calls()["read_bytes"] <= 9000
    accounts_agree(mounted)


@pytest.mark.promise(5, 41)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_evicted_while_it_is_open_and_mapped_is_read_to_its_end(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    expected = contents("mapped", 1_000_000)
    tree({"mapped": expected})
    mounted = monarch.mount(source)
    epoch(mounted, {"mapped": expected})
    settled(mounted)
    with OpenCounter(source) as counter, (mounted.path / "mapped").open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[:1000] == expected[:1000]
            monarch("evict", str(mounted.path), "mapped")
            assert copies(mounted) == {"fast": {}}
            mapped.madvise(mmap.MADV_DONTNEED)
            forget_pages(file.fileno())
            assert mapped[:] == expected
        forget_pages(file.fileno())
        assert file.read() == expected
        assert counter.count() == 0
    _read_again(mounted, expected)


def _read_again(mounted: Mounted, expected: bytes) -> None:
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the release arrived")
    assert read_through(mounted.path / "mapped") == expected
    settled(mounted)
    assert mounted.xattr("mapped") == "fast"
