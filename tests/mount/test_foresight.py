"""What a mount recognises of the order in which jobs read, and what it fetches ahead."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.frameworks.announce import announce
from monarch.text import MiB
from monarch.types import Ino
from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until
from tests.mount.observe import account, epoch, list_late, resident, settled
from tests.placement.simulate import belady_hits

_ANNOUNCER = (
    "import sys, time; from monarch.frameworks.announce import announce;"
    " announced = announce(sys.argv[1:]); time.sleep(600)"
)
# Reads the files whose paths come from the standard input, in a session of its own, each in a
# thread that ends at once. Each line of the output is the number of files that were read.
_READER = """
import sys, threading
for number, line in enumerate(sys.stdin):
    thread = threading.Thread(target=lambda: open(line.rstrip(), "rb").read())
    thread.start()
    thread.join()
    print(number + 1, flush=True)
"""


class Reader:
    """Another job, until the end of a ``with`` block. Then it is killed."""

    def __enter__(self) -> Reader:
        command = [sys.executable, "-c", _READER]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self, mounted: Mounted, names: list[str]) -> None:
        """Returns when all of the files were read."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for name in names:
            self._process.stdin.write(f"{mounted.path / name}\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline(), "the reader has ended"


def streams(mounted: Mounted) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mounted.status()["foresight"]["streams"]
    return found


def images(directory: str, files: int) -> dict[str, bytes]:
    """A data set as for ImageFolder: ten classes."""
    return {
        f"{directory}/class{number % 10}/{number:04}.jpg": contents(f"{directory}{number}", 500)
        for number in range(files)
    }


@pytest.mark.promise(182)
def test_status_shows_in_which_order_each_job_reads(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    train, val = images("train", 400), images("val", 200)
    tree({**train, **val})
    mounted = monarch.mount(source)
    for seed in range(2):
        order = random.Random(seed).sample(sorted(train), len(train))
        epoch(mounted, train, order)
    with Reader() as reader:
        reader.read(mounted, sorted(val))
        report = settled(mounted)["foresight"]
        text = monarch("status", str(mounted.path)).stdout
    shown = {stream["directory"]: stream for stream in report["streams"]}
    assert {name: stream["pattern"] for name, stream in shown.items()} == {
        "train": "shuffled",
        "val": "sequential",
    }
    assert [shown["train"]["epoch"], shown["val"]["epoch"]] == [2, 1]
    assert [shown["train"]["files"], shown["val"]["files"]] == [400, 200]
    assert "train/: shuffled, epoch 2" in text
    assert "val/: sequential" in text
    if monarch.mode != "no_open":
        wait_until(
            lambda: [stream["directory"] for stream in streams(mounted)] == ["train"],
            "the job that has ended is forgotten",
        )


@pytest.mark.promise(182)
@pytest.mark.modes("relay", "passthrough", "python")
def test_threads_that_end_at_once_are_one_job_which_ends_with_its_process(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = images("train", 200)
    tree(content)
    mounted = monarch.mount(source)
    with Reader() as reader:
        reader.read(mounted, shuffled(content))
        settled(mounted)
        (stream,) = streams(mounted)
        assert (stream["pattern"], stream["epoch"], stream["share"]) == ("shuffled", 1, 1.0)
    wait_until(lambda: not streams(mounted), "nothing is left of the job")


@pytest.mark.promise(182)
@pytest.mark.modes("relay", "passthrough", "python")
def test_files_that_were_removed_or_written_are_none_of_those_that_an_epoch_reads(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    """Also those of an earlier mount that the source has still."""
    monarch.allows_log("draining to the source has stopped|EROFS|not drained at the end")
    content = images("train", 300)
    tree(content)
    options = ["write=absorb", "foresight.fill=false", "writeback.end_timeout=1s"]
    mounted = monarch.mount(slow.path, tiers={"fast": "64MiB"}, options=options)
    slow.rules(*(f"err {call} EROFS ." for call in ("create", "write", "unlink", "rename")))
    names = sorted(content)
    removed, written, moved, there = names[:50], names[50:60], names[60:70], names[70:]

    def reads(reader: Reader, order: list[str]) -> tuple[int, float, int]:
        """The files of the directory, the share of them that is read, and the epoch."""
        reader.read(mounted, order)
        found = {each["directory"]: each for each in settled(mounted)["foresight"]["streams"]}
        return found["train"]["files"], found["train"]["share"], found["train"]["epoch"]

    with Reader() as reader:
        assert reads(reader, shuffled(content)) == (300, 1.0, 1)
        for name in removed:
            (mounted.path / name).unlink()
        for name in written:
            (mounted.path / name).write_bytes(b"other")
        for name in moved:
            (mounted.path / name).rename(mounted.path / f"{name}.moved")
        for seed in range(2):
            order = random.Random(seed).sample(there, len(there))
            assert reads(reader, order) == (230, 1.0, seed + 2)
    mounted.umount("--abandon")
    mounted = monarch.mount(slow.path, tiers={"fast": "64MiB"}, options=options)
    with Reader() as reader:
        assert reads(reader, there) == (230, 1.0, 1)
    slow.rules()


ALL_OFF = ("foresight.announced=false", "foresight.ahead=false", "foresight.fill=false")
NATIVE = ("relay", "passthrough", "no_open")


def shuffled(content: dict[str, bytes], seed: int = 1) -> list[str]:
    return random.Random(seed).sample(sorted(content), len(content))


def resident_files(mounted: Mounted) -> int:
    files: int = settled(mounted)["residency"]["files"]
    return files


@pytest.mark.promise(180)
def test_a_random_order_is_filled_and_each_file_is_opened_once_at_the_source(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    train, val = images("train", 400), images("val", 50)
    tree({**train, **val})
    mounted = monarch.mount(source)
    order = shuffled(train)
    with OpenCounter(source) as counter:
        epoch(mounted, train, order[:200])
        wait_until(lambda: resident_files(mounted) == 400, "the directory is filled")
        before = counter.count()
        epoch(mounted, train, order[200:])
        assert counter.count() == before == 400
    report = settled(mounted)["foresight"]
    assert 0 < report["fetched_files"] < 400
    assert (report["unread_files"], report["unread_bytes"]) == (0, 0)
    assert resident(mounted, val) == {}, "no job has read it"


@pytest.mark.promise(180)
def test_an_order_of_the_names_is_fetched_ahead_of_the_reader(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = images("train", 600)
    tree(content)
    mounted = monarch.mount(source)
    order = sorted(content)
    with OpenCounter(source) as counter:
        epoch(mounted, content, order[:256])
        wait_until(lambda: resident_files(mounted) > 256, "files are fetched ahead")
        assert resident_files(mounted) <= 256 + 1024
        wait_until(
            lambda: resident_files(mounted) == len(resident(mounted, order)), "no more is fetched"
        )
        there = resident(mounted, order)
        epoch(mounted, content, order[256:])
        assert counter.count() == 600
    assert set(order[: len(there)]) == set(there), "it is fetched in the order of the reader"


@pytest.mark.modes(*NATIVE)
def test_an_announced_order_is_fetched_before_the_first_open(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    train, val = images("train", 300), images("val", 50)
    tree({**train, **val})
    mounted = monarch.mount(source)
    order = shuffled(train)
    with OpenCounter(source) as counter:
        announced = announce(mounted.path / name for name in order)
        assert announced is not None
        wait_until(lambda: resident_files(mounted) == 300, "all of it is fetched")
        before = counter.count()
        epoch(mounted, train, order)
        assert counter.count() == before == 300
        announced.close()
    report = settled(mounted)["foresight"]
    assert (report["fetched_files"], report["unread_files"]) == (300, 0)
    assert resident(mounted, val) == {}


@pytest.mark.promise(180)
@pytest.mark.modes(*NATIVE)
def test_with_all_of_it_switched_off_no_file_is_fetched_ahead(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = images("train", 400)
    tree(content)
    mounted = monarch.mount(source, options=ALL_OFF)
    order = shuffled(content)
    announced = announce(mounted.path / name for name in order)
    epoch(mounted, content, order[:300])
    epoch(mounted, images("train", 100), sorted(images("train", 100)))
    assert set(resident(mounted, content)) <= {*order[:300], *images("train", 100)}
    assert settled(mounted)["foresight"]["fetched_files"] == 0
    if announced is not None:
        announced.close()


@pytest.mark.promise(180)
@pytest.mark.modes("relay", "passthrough", "python")
def test_no_file_is_fetched_ahead_if_the_source_is_asked_as_the_caller(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """The daemon may read files that no process of the job may open."""
    content = images("train", 400)
    tree(content)
    mounted = monarch.mount(source, options=["source_identity=caller"])
    order = shuffled(content)
    epoch(mounted, content, order[:300])
    assert settled(mounted)["foresight"]["fetched_files"] == 0
    assert set(resident(mounted, content)) <= set(order[:300])


@pytest.mark.promise(187)
@pytest.mark.modes(*NATIVE)
def test_files_that_no_tier_admits_are_read_from_the_window(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """Each file is opened once an epoch at the source, before its reader opens it, and the files of
    a process that is killed leave the window."""
    content = images("train", 400)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": str(400 * 500 // 2)})

    def window() -> dict[str, int]:
        figures: dict[str, int] = settled(mounted)["foresight"]["window"]
        return figures

    # Otherwise the second epoch is of another mount, since the kernel has the pages of the first.
    epochs = 1 if monarch.mode == "no_open" else 2
    for seed in range(epochs):
        order = shuffled(content, seed)
        with OpenCounter(source) as counter:
            announced = announce(mounted.path / name for name in order)
            assert announced is not None
            wait_until(lambda: resident_files(mounted) + window()["files"] == 400, "all is fetched")
            kept, before = resident_files(mounted), counter.count()
            assert before == (400 if seed == 0 else 400 - kept)
            epoch(mounted, content, order)
            assert counter.count() == before
            announced.close()
        assert 100 < kept <= 200
        assert (window()["files"], window()["dropped_files"]) == (0, 0)
    if epochs == 1:
        mounted.umount()
        mounted = monarch.mount(source, tiers={"fast": str(400 * 500 // 2)})
    process = subprocess.Popen(
        [sys.executable, "-c", _ANNOUNCER, *(str(mounted.path / name) for name in order)]
    )
    try:
        wait_until(lambda: window()["files"] == 400 - kept, "the window is filled")
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: window()["files"] == 0, "the window is left")
    assert window()["dropped_files"] == 400 - kept


@pytest.mark.promise(187)
@pytest.mark.modes("no_open")
def test_a_file_whose_pages_the_kernel_has_is_not_fetched_again(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """No reader would get it from the window. The tier has room for half of the files."""
    content = images("train", 200)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": str(200 * 500 // 2)})
    with OpenCounter(source) as counter:
        for seed in range(3):
            order = shuffled(content, seed)
            announced = announce(mounted.path / name for name in order)
            assert announced is not None
            wait_until(
                lambda: account(mounted)["foresight"]["announced"]["entries"] == 200,
                "the mount has the order",
            )
            settled(mounted)
            assert all((mounted.path / name).read_bytes() == content[name] for name in order)
            announced.close()
            wait_until(
                lambda: settled(mounted)["foresight"]["window"]["files"] == 0, "the window is left"
            )
            assert counter.count() == 200, seed
    assert settled(mounted)["foresight"]["window"]["dropped_files"] == 0


@pytest.mark.promise(188)
@pytest.mark.modes("relay", "passthrough")
def test_three_announced_epochs_have_the_hits_of_belady(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """The tier holds half of the files, to the byte."""
    content = images("train", 200)
    tree(content)
    mounted = monarch.mount(source, tiers={"fast": str(200 * 500 // 2)})
    order = [name for seed in range(3) for name in shuffled(content, seed)]
    inos = {name: Ino(number) for number, name in enumerate(content)}
    best = sum(belady_hits([inos[name] for name in order], 100))
    with OpenCounter(source) as counter:
        announced = announce(mounted.path / name for name in order)
        assert announced is not None
        for start in range(0, 600, 200):
            epoch(mounted, content, order[start : start + 200])
            assert resident_files(mounted) == 100
        assert counter.count() == 600 - best
        announced.close()
    assert settled(mounted)["foresight"]["next_use"]["replaced_files"] == 0


def drawn(sampler: str, names: list[str], epochs: int) -> list[list[str]]:
    """What a sampler of PyTorch draws in each epoch."""
    rng, count = random.Random(7), len(names)
    weights = [1 + number % 9 for number in range(count)]
    draw: dict[str, Callable[[], list[str]]] = {
        "RandomSampler": lambda: rng.sample(names, count),
        "WeightedRandomSampler": lambda: rng.choices(names, weights, k=count),
        "SubsetRandomSampler": lambda: rng.sample(names[::2], count // 2),
        "DistributedSampler": lambda: rng.sample(names, count)[::2],
    }
    return [draw[sampler]() for _ in range(epochs)]


@pytest.mark.promise(188)
@pytest.mark.modes("relay")
@pytest.mark.parametrize(
    "sampler",
    ["RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler", "DistributedSampler"],
)
def test_the_hits_of_each_sampler_are_those_of_belady(
    monarch: MonarchCommand,
    tree: Tree,
    source: Path,
    sampler: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tier holds half of the files, and each copy is written before the next open. The mount
    knows the first files of the order before the others."""
    content = images("train", 60)
    tree(content)
    order = [name for names in drawn(sampler, list(content), 4) for name in names]
    capacity = len(set(order)) // 2
    mounted = monarch.mount(source, tiers={"fast": str(capacity * 500)})
    inos = {name: Ino((mounted.path / name).stat().st_ino) for name in content}
    best = sum(belady_hits([inos[name] for name in order], capacity))
    list_late(mounted, monkeypatch)
    with OpenCounter(source) as counter:
        announced = announce(mounted.path / name for name in order)
        assert announced is not None
        for name in order:
            epoch(mounted, content, [name])
            settled(mounted)
        assert counter.count() == len(order) - best
        announced.close()


@pytest.mark.promise(188)
@pytest.mark.modes("relay", "passthrough")
@pytest.mark.parametrize("is_on", [True, False])
def test_copies_that_are_not_used_any_more_leave_for_files_that_are(
    monarch: MonarchCommand, tree: Tree, source: Path, is_on: bool
) -> None:
    """A process that has such a copy open continues to read it."""
    first, second = images("first", 100), images("second", 100)
    tree({**first, **second})
    options = [f"foresight.belady={str(is_on).lower()}", "placement.policy=first_come"]
    mounted = monarch.mount(source, tiers={"fast": str(100 * 500)}, options=options)
    order = [*sorted(first), *sorted(second), *sorted(second)]
    with OpenCounter(source) as counter:
        announced = announce(mounted.path / name for name in order)
        assert announced is not None
        epoch(mounted, first, order[:100])
        settled(mounted)
        assert set(resident(mounted, first)) == set(first)
        with open(mounted.path / order[7], "rb", buffering=0) as file:
            head = file.read(100)
            epoch(mounted, second, order[100:200])
            settled(mounted)
            assert set(resident(mounted, [*first, *second])) == set(second if is_on else first)
            assert head + file.read() == first[order[7]]
        epoch(mounted, second, order[200:])
        assert counter.count() == (200 if is_on else 300)
        announced.close()
    figures = settled(mounted)["foresight"]["next_use"]
    assert figures == {
        "replaced_files": 100 * is_on,
        "replaced_bytes": 100 * 500 * is_on,
    }


@pytest.mark.promise(187)
@pytest.mark.modes("relay", "passthrough", "no_open")
def test_a_file_of_several_reads_comes_from_the_window_once(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    names = [f"{number:02}" for number in range(6)]
    tree(dict.fromkeys(names, 3 * MiB))
    options = ["limits.buffer_max=256MiB"]
    mounted = monarch.mount(source, tiers={"fast": "1MiB"}, options=options)

    def window() -> dict[str, int]:
        figures: dict[str, int] = account(mounted)["foresight"]["window"]
        return figures

    with OpenCounter(source) as opens:
        announced = announce(mounted.path / name for name in names)
        assert announced is not None
        wait_until(lambda: window()["bytes"] == 18 * MiB, "all files are in the window")
        for name in names:
            with (mounted.path / name).open("rb", buffering=0) as file:
                first = file.read(1)
                account(mounted)
                assert first + file.readall() == contents(name, 3 * MiB)
        assert opens.paths() == dict.fromkeys(names, 1)
    assert window()["served_files"] == 6
    announced.close()


@pytest.mark.promise(112)
@pytest.mark.modes("relay", "passthrough", "no_open")
def test_a_file_in_the_window_is_warmed_without_another_read(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    names = [f"{number:02}" for number in range(40)]
    tree(dict.fromkeys(names, 100_000))
    mounted = monarch.mount(source, tiers={"fast": "1MiB"})
    with OpenCounter(source) as opens:
        announced = announce(mounted.path / name for name in names)
        assert announced is not None
        wait_until(lambda: opens.count() == 40, "all files are fetched")
        report = settled(mounted)
        copied = list(resident(mounted, names))
        assert report["foresight"]["window"]["files"] == 40 - len(copied)
        first, second = [mounted.path / name for name in names if name not in copied][:2]
        monarch("evict", *(str(mounted.path / name) for name in copied[:1]))
        monarch("warm", str(first), "--wait")
        refused = monarch("warm", str(second), "--wait", check=False)
        assert refused.returncode == 1
        assert resident(mounted, names) == dict.fromkeys([*copied, first.name][1:], "fast")
        for path in (first, second):
            assert path.read_bytes() == contents(path.name, 100_000)
        assert opens.count() == 40
    announced.close()


@pytest.mark.promise(180)
def test_only_what_is_admitted_is_fetched_ahead_without_a_window(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """The tier holds half of the files: a second epoch opens the other half at the source."""
    content = images("train", 400)
    tree(content)
    options = ["foresight.window=false"]
    mounted = monarch.mount(source, tiers={"fast": str(400 * 500 // 2)}, options=options)
    epoch(mounted, content, shuffled(content))
    kept = resident_files(mounted)
    assert 100 < kept <= 200
    with OpenCounter(source) as counter:
        epoch(mounted, content, shuffled(content, 2))
        assert resident_files(mounted) == kept
        assert counter.count() == 400 - kept
