"""The power fails under a mount: wrong bytes on the disk are never served, and block no mount.

Tier and state are on a disk of their own. A cut is a copy of the disk at that moment, without
the data that was only in the memory of its file system. The copy is mounted, and Monarch uses it.
The file system is ext4 with the options that lose most: names and sizes reach the disk before bytes
do.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment import disks
from tests.equipment.disks import CuttableDisk, Disk
from tests.equipment.inotify import OpenCounter
from tests.mount.command import needs_fuse
from tests.mount.observe import (
    account,
    accounts_agree,
    copies,
    copy_of,
    epoch,
    flip_bit,
    read_through,
    resident,
    settled,
    wait_until,
)

# Reads are served as this machine would choose; what a power cut is about is written in Python.
pytestmark = [
    needs_fuse,
    pytest.mark.modes("auto"),
    pytest.mark.skipif(disks.unavailable() is not None, reason=disks.unavailable() or ""),
]

TIERS = {"fast": "300KB", "large": "20MB"}
OPTIONS = ["limits.inline_max=64KiB", "limits.scrub_bandwidth=0"]
CARELESS = ("data=writeback", "nodelalloc", "noauto_da_alloc", "commit=1")


def files() -> dict[str, bytes]:
    small = {f"{n % 3}/{n}.jpg": contents(str(n), 20_000 + n) for n in range(30)}
    return small | {f"{n}.bin": contents(f"large {n}", 400_000 + n) for n in range(4)}


class Machine:
    """Mounts the source with tiers and state on a disk; ``fails`` takes the power away."""

    def __init__(self, monarch: MonarchCommand, source: Path) -> None:
        self._monarch = monarch
        self._source = source
        self._at = monarch.directory / "tiers"
        self.state = self._at / "state"
        self.turn = 0
        self.power: CuttableDisk

    @contextmanager
    def runs(self, disk: Disk) -> Iterator[None]:
        options = CARELESS if disk.kind == "ext4" else ()
        with disk.mounted(self._at, options) as self.power:
            yield

    def mount(self) -> Mounted:
        return self._monarch.mount(self._source, tiers=TIERS, state=self.state, options=OPTIONS)

    def new_disk(self, kind: str = "ext4") -> Disk:
        self.turn += 1
        size = (320 if kind == "xfs" else 48) << 20
        return Disk(self._monarch.directory / f"disk {self.turn}", kind, size=size)

    def fails(self, mounted: Mounted) -> Disk:
        """What the disk holds as the power fails now; the daemon is gone with it."""
        after = self.power.cut(self._monarch.directory / f"disk after {self.turn}")
        mounted.kill()
        return after

    def makes_copies(self, mounted: Mounted, more: int, *, most: int) -> None:
        """Wait until so many have been made, or as many as are certain to be."""
        target = min(int(account(mounted)["copies"]["done"]) + more, most)
        wait_until(lambda: int(account(mounted)["copies"]["done"]) >= target, "copies are made")

    def others_write(self) -> None:
        """Another program calls sync: all names and sizes go to the disk."""
        with (self._at / "somebody-else's").open("ab") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())

    def records_reach_the_disk(self) -> None:
        """As the kernel may have it at any time."""
        for path in self.state.glob("residency-*"):
            with path.open("rb") as file:
                os.fdatasync(file.fileno())


@pytest.fixture
def machine(monarch: MonarchCommand, source: Path) -> Machine:
    return Machine(monarch, source)


def filled(machine: Machine, content: Mapping[str, bytes]) -> Mounted:
    mounted = machine.mount()
    for _ in range(2):
        epoch(mounted, content)
        settled(mounted)
    assert set(resident(mounted, content)) == set(content)
    return mounted


def all_is_well(mounted: Mounted, content: Mapping[str, bytes]) -> None:
    epoch(mounted, content)
    settled(mounted)
    epoch(mounted, content)
    report = settled(mounted)
    wait_until(
        lambda: int(report["residency"]["files"]) == sum(map(len, copies(mounted).values())),
        "what no record knows is gone",
    )
    accounts_agree(mounted)
    assert not list(mounted.state.rglob("*.part"))


@contextmanager
def readers(
    machine: Machine, mounted: Mounted, content: Mapping[str, bytes], chosen: random.Random
) -> Iterator[None]:
    """Two read whatever comes to their minds, until the mount is gone, and files are evicted."""
    wrong: list[str] = []

    def read(seed: int) -> None:
        mine = random.Random(seed)
        while True:
            name = mine.choice(list(content))
            try:
                if read_through(mounted.path / name) != content[name]:
                    wrong.append(name)
            except OSError:
                return

    threads = [threading.Thread(target=read, args=[chosen.random()]) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a reader hangs on a dead mount"
    assert wrong == []


def _cut_at_some_moment(
    machine: Machine, content: Mapping[str, bytes], *, kind: str, seed: int
) -> None:
    chosen = random.Random(seed)
    with machine.runs(machine.new_disk(kind)):
        if chosen.random() < 0.5:
            # Some are there since a mount that ended well.
            before = machine.mount()
            epoch(before, content, chosen.sample(sorted(content), 10))
            before.umount()
        mounted = machine.mount()
        with readers(machine, mounted, content, chosen):
            for _ in range(chosen.randrange(1, 4)):
                machine.makes_copies(mounted, chosen.randrange(0, 12), most=len(content) - 12)
                what = chosen.choice(["others", "records", "evict", "nothing"])
                if what == "others":
                    machine.others_write()
                elif what == "records":
                    machine.records_reach_the_disk()
                elif what == "evict":
                    mounted.cli("evict", str(mounted.path / str(chosen.randrange(3))))
            if chosen.random() < 0.7:
                machine.others_write()
            after = machine.fails(mounted)
    with machine.runs(after):
        again = machine.mount()
        if chosen.random() < 0.5:
            # Some are first asked for by the mount after it.
            epoch(again, content, chosen.sample(sorted(content), 10))
            again.umount()
            again = machine.mount()
        all_is_well(again, content)
        again.umount()


@pytest.mark.fault("T4", "T6")
@pytest.mark.promise(3, 50)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_whenever_the_power_fails_all_bytes_are_right_afterwards(
    machine: Machine, tree: Tree, kind: str, soak: float
) -> None:
    reason = disks.unavailable(kind)
    if reason:
        pytest.skip(reason)
    content = files()
    tree(content)
    if soak:
        for seed in seeds_for(soak):
            _cut_at_some_moment(machine, content, kind=kind, seed=seed)
        return
    for seed in (1, 2) if kind == "ext4" else (3,):
        _cut_at_some_moment(machine, content, kind=kind, seed=seed)


@pytest.mark.fault("T4", "T6")
@pytest.mark.promise(3, 50)
def test_a_copy_with_its_name_size_and_seal_but_without_its_bytes_is_never_served(
    machine: Machine, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    with machine.runs(machine.new_disk()):
        mounted = filled(machine, content)
        places = {name: copy_of(mounted, name) for name in content}
        seals = {name: place.stat().st_mtime_ns for name, place in places.items()}
        machine.others_write()
        machine.records_reach_the_disk()
        after = machine.fails(mounted)
    with machine.runs(after):
        lost = {
            name
            for name, place in places.items()
            if place.stat().st_mtime_ns == seals[name] and place.read_bytes() != content[name]
        }
        assert lost, "the disk has lost nothing, so this shows nothing"
        again = machine.mount()
        assert lost <= set(resident(again, content))
        first = sorted(content)[::2]
        epoch(again, content, first)
        again.umount()
        # A copy that the mount after the cut did not use is still unverified.
        later = machine.mount()
        with OpenCounter(source) as counter:
            all_is_well(later, content)
            assert set(counter.paths()) == lost - set(first)
        later.umount()


@pytest.mark.fault("T4", "T6")
@pytest.mark.promise(3)
def test_the_disk_knows_that_a_mount_has_begun_before_anything_else(
    machine: Machine, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    with machine.runs(machine.new_disk()):
        filled(machine, content).umount()
        mounted = machine.mount()
        place = copy_of(mounted, "1.bin")
        after = machine.fails(mounted)
    with machine.runs(after):
        flip_bit(place, 1000)
        again = machine.mount()
        with OpenCounter(source) as counter:
            all_is_well(again, content)
            assert counter.paths() == {"1.bin": 1}
        again.umount()


@pytest.mark.fault("T6")
@pytest.mark.promise(50)
def test_after_a_clean_end_a_power_cut_takes_nothing(
    machine: Machine, tree: Tree, source: Path
) -> None:
    content = files()
    tree(content)
    with machine.runs(machine.new_disk()):
        mounted = filled(machine, content)
        mounted.umount()
        after = machine.power.cut(mounted.cli.directory / "after")
    with machine.runs(after):
        again = machine.mount()
        assert account(again)["health"]["state"] == "ok"
        with OpenCounter(source) as counter:
            all_is_well(again, content)
            assert counter.count() == 0
        again.umount()


def seeds_for(seconds: float) -> Iterator[int]:
    """Other seeds each time, each one printed, until the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        yield seed


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> float:
    seconds = request.config.getoption("--soak")
    assert isinstance(seconds, float)
    if seconds > 30:
        request.node.add_marker(pytest.mark.timeout(2 * seconds + 120))
    return seconds
