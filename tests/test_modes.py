"""The way that reads take: on machines of many kinds, and on this one."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.config.settings import MountSettings
from monarch.errors import FuseError, UsageError
from monarch.fuse import datapath
from monarch.fuse.datapath_mode import Abilities, check_possible, choose
from monarch.namespace.schema import SnapshotSummary
from monarch.posix.cgroups import memory_bytes
from monarch.text import GiB, KiB, MiB, TiB
from tests.conftest import MonarchCommand, Tree, mounts

ROOT = Path(__file__).parents[1]

NODE = Abilities(built=True, release="6.18.1", may_pass_through=True, memory_bytes=64 * GiB)
USER = dataclasses.replace(NODE, may_pass_through=False)
OLD = dataclasses.replace(NODE, release="5.14.0-503.el9")
BARE = dataclasses.replace(NODE, built=False)


def settings(**keys: Any) -> MountSettings:
    return MountSettings(name="m", source=Path("/pfs/s"), mountpoint=Path("/mnt/m"), **keys)


def files(count: int, size: int) -> SnapshotSummary:
    """The summary of a snapshot with ``count`` files of ``size`` bytes."""
    return SnapshotSummary(
        id="5f0c",
        source=b"/pfs/s",
        created_ns=0,
        entries=count + 1,
        files=count,
        directories=1,
        symlinks=0,
        others=0,
        aliases=0,
        bytes_total=count * size,
        largest=size,
        sizes=((size.bit_length(), count),),
        unreadable=0,
        unreadable_paths=(),
        one_file_system=False,
        scan_seconds=0.0,
    )


SMALL = files(100_000, 112 * KiB)
LARGE = files(1000, 150 * MiB)
MANY = files(1_300_000, 112 * KiB)


@pytest.mark.parametrize(
    ("machine", "summary", "keys", "expected", "why"),
    [
        (
            *(NODE, SMALL, {}, ("relay", "none")),
            "mean file size 112 KiB: an epoch from memory takes about 2.0 s without opens and 5.6 s"
            " with passthrough; needs 21.4 GiB of page cache, 64 GiB available",
        ),
        (USER, SMALL, {}, ("relay", "none"), "of page cache, 64 GiB available"),
        (OLD, SMALL, {}, ("relay", "none"), "of page cache, 64 GiB available"),
        (
            *(NODE, LARGE, {}, ("passthrough", "open")),
            "mean file size 150 MiB: an epoch from memory takes about 17.3 s without opens and 7.9"
            " s with passthrough",
        ),
        (
            *(NODE, MANY, {}, ("passthrough", "open")),
            "mean file size 112 KiB; page cache for 278 GiB is missing, 64 GiB available",
        ),
        (
            *(OLD, MANY, {}, ("relay", "open")),
            "Linux 5.14.0-503.el9 has no passthrough, it needs 6.9",
        ),
        (
            *(USER, LARGE, {}, ("relay", "open")),
            "passthrough needs root (the capability CAP_SYS_ADMIN)",
        ),
        (BARE, SMALL, {}, ("python", "open"), "the native datapath is not built: install gcc"),
        (NODE, SMALL, {"verify": "open"}, ("passthrough", "open"), "verify: open must see every"),
        (USER, SMALL, {"verify": "open"}, ("relay", "open"), "passthrough needs root"),
        (NODE, SMALL, {"open": "open"}, ("passthrough", "open"), "configuration sets open: open"),
        (NODE, LARGE, {"open": "none"}, ("relay", "none"), "the configuration sets open: none"),
        (NODE, SMALL, {"datapath": "relay"}, ("relay", "none"), "needs 21.4 GiB of page cache"),
        (
            *(NODE, LARGE, {"datapath": "relay"}, ("relay", "open")),
            "the configuration sets datapath: relay",
        ),
        (
            *(NODE, SMALL, {"datapath": "passthrough"}, ("passthrough", "open")),
            "the configuration sets datapath: passthrough",
        ),
        (
            *(NODE, SMALL, {"datapath": "python"}, ("python", "open")),
            "the configuration sets datapath: python",
        ),
        (BARE, SMALL, {"datapath": "relay", "open": "none"}, ("python", "open"), "is not built"),
        (BARE, SMALL, {"datapath": "python"}, ("python", "open"), "configuration sets"),
    ],
)
def test_reads_use_the_fastest_possible_mode_and_the_reason_is_reported(
    machine: Abilities,
    summary: SnapshotSummary,
    keys: dict[str, str],
    expected: tuple[str, str],
    why: str,
) -> None:
    choice = choose(settings(**keys), summary, machine, capacity=TiB)
    assert (choice.datapath, choice.open) == expected
    assert why in choice.why
    assert (choice.mode.datapath, choice.mode.open, choice.mode.why) == (*expected, choice.why)


@pytest.mark.parametrize(
    ("count", "size", "memory", "opens"),
    [
        (1024, 512 * KiB, GiB, "none"),
        (1024, 512 * KiB, GiB - 1, "open"),
        (0, 0, GiB, "none"),
        # Empty files have no pages, and each other file has at least one.
        (1_000_000, 0, GiB, "none"),
        (1_000_000, 300, 8 * GiB, "none"),
        (1_000_000, 300, 4 * GiB, "open"),
    ],
)
def test_small_files_fit_when_memory_holds_them_twice(
    count: int, size: int, memory: int, opens: str
) -> None:
    machine = dataclasses.replace(NODE, memory_bytes=memory)
    assert choose(settings(), files(count, size), machine, capacity=TiB).open == opens


# Files of 110 KB a second and MB/s of a large file, from memory: docs/benchmarks.md, "A full run".
MEASURED = {
    ("passthrough", "open"): (18_000, 20_000),
    ("relay", "open"): (18_000, 9_119),
    ("relay", "none"): (51_000, 9_119),
}


def epoch_s(mode: tuple[str, str], count: int, size: int) -> float:
    """The time of an epoch: that of the bytes, and for each file the remaining time of an open."""
    files_s, mb_s = MEASURED[mode]
    return count * (1 / files_s - 0.11 / mb_s) + size / (mb_s * 1e6)


@pytest.mark.promise(195)
@pytest.mark.parametrize("machine", [NODE, USER])
@pytest.mark.parametrize("large", [0, *(MiB << shift for shift in range(6, 15))])
@pytest.mark.parametrize("count", [0, 30, 3000, 300_000])
def test_auto_takes_the_mode_whose_epoch_is_predicted_to_be_shorter(
    machine: Abilities, large: int, count: int
) -> None:
    small = files(count, 112 * KiB)
    summary = dataclasses.replace(
        small, files=count + (large > 0), bytes_total=small.bytes_total + large
    )
    machine = dataclasses.replace(machine, memory_bytes=TiB)
    choice = choose(settings(), summary, machine, capacity=TiB)
    way = "passthrough" if machine.may_pass_through else "relay"
    without, opening = (
        epoch_s(mode, summary.files, summary.bytes_total)
        for mode in (("relay", "none"), (way, "open"))
    )
    assert choice.mode.open == ("none" if without <= 0.9 * opening else "open")
    assert choice.datapath == ("relay" if choice.open == "none" else way)


@pytest.mark.promise(195)
def test_one_large_file_beside_many_images_is_passed_through() -> None:
    images = files(3000, 112 * KiB)
    summary = dataclasses.replace(images, files=3001, bytes_total=images.bytes_total + 2 * GiB)
    choice = choose(settings(), summary, NODE, capacity=TiB)
    assert (choice.datapath, choice.open) == ("passthrough", "open")
    assert "an epoch from memory takes about" in choice.why
    assert choose(settings(open="none"), summary, NODE, capacity=TiB).open == "none"
    assert choose(settings(), images, NODE, capacity=TiB).open == "none"


@pytest.mark.promise(99)
@pytest.mark.finding("B2")
def test_opens_are_seen_where_a_tier_has_files_of_earlier_mounts() -> None:
    choice = choose(settings(), SMALL, NODE, capacity=TiB, holds_written=True)
    assert choice.open == "open" and "written through an earlier mount" in choice.why
    with pytest.raises(UsageError, match="open: none is not possible: a tier has files"):
        choose(settings(open="none"), SMALL, NODE, capacity=TiB, holds_written=True)


@pytest.mark.parametrize(
    ("machine", "why"), [(OLD, "it needs 6.9"), (USER, "needs root"), (BARE, "is not built")]
)
def test_a_passthrough_that_cannot_be_had_is_one_clear_line(machine: Abilities, why: str) -> None:
    asked = settings(datapath="passthrough")
    for attempt in (
        lambda: choose(asked, LARGE, machine, capacity=TiB),
        lambda: check_possible(asked, machine),
    ):
        with pytest.raises(FuseError) as caught:
            attempt()
        assert str(caught.value).startswith("datapath: passthrough is not possible: ")
        assert why in str(caught.value)
        assert str(caught.value).endswith("; set datapath: auto for the best that is possible here")
        assert "\n" not in str(caught.value)


@pytest.mark.fault("U8")
def test_root_without_what_it_acts_for_others_with_neither_writes_nor_reads_as_callers() -> None:
    def refused(asked: MountSettings, lacking: str, *, holds_written: bool = False) -> str:
        machine = dataclasses.replace(NODE, lacking=frozenset({lacking}))
        with pytest.raises(FuseError) as caught:
            choose(asked, SMALL, machine, capacity=TiB, holds_written=holds_written)
        return str(caught.value)

    plain = settings()
    writes = settings(write="absorb")
    assert "draining is not possible: root lacks CAP_FOWNER" in refused(writes, "CAP_FOWNER")
    assert "CAP_SETGID" in refused(plain, "CAP_SETGID", holds_written=True)
    caller = settings(source_identity="caller")
    assert "source_identity: caller is not possible: root lacks CAP_SETUID" in refused(
        caller, "CAP_SETUID"
    )
    for asked, lacking in ((caller, "CAP_CHOWN"), (plain, "CAP_SETUID")):
        machine = dataclasses.replace(NODE, lacking=frozenset({lacking}))
        choose(asked, SMALL, machine, capacity=TiB)


@pytest.mark.parametrize(
    ("release", "cached"),
    [("6.8.12", True), ("6.9.0", False), ("6.12.41+deb13", False), ("6.13.0", True)],
)
def test_listings_are_cached_only_where_they_expire(release: str, cached: bool) -> None:
    machine = dataclasses.replace(NODE, release=release)
    assert choose(settings(), SMALL, machine, capacity=TiB).cache_listings is cached


# --- What this machine is -------------------------------------------------------------------------


def test_this_machine_knows_what_it_can_do() -> None:
    here = Abilities.here()
    assert here.kernel >= (4, 0)
    assert here.built == datapath.built()
    assert here.memory_bytes > 64 * MiB


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what it may do")
def test_a_user_who_may_not_mount_may_not_pass_through() -> None:
    ask = (
        "from monarch.fuse.datapath_mode import Abilities; print(Abilities.here().may_pass_through)"
    )
    drop = "import ctypes, sys; assert ctypes.CDLL(None).prctl(24, int(sys.argv[1])) == 0; "
    again = "import os; os.execv(sys.executable, [sys.executable, '-c', sys.argv[2]])"
    modes = {
        # What a program may do after execve is bounded by this set; 1 is CAP_DAC_OVERRIDE.
        capability: subprocess.run(
            [sys.executable, "-c", drop + again, str(capability), ask],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for capability in (21, 1)
    }
    assert modes == {21: "False", 1: "True"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what it may do")
def test_root_knows_what_it_lacks_for_acting_as_others() -> None:
    ask = (
        "from monarch.fuse.datapath_mode import Abilities; print(*sorted(Abilities.here().lacking))"
    )

    def missing_capabilities(*command: str) -> str:
        done = subprocess.run(
            [*command, sys.executable, "-c", ask], cwd=ROOT, check=True, capture_output=True
        )
        return done.stdout.decode().strip()

    assert missing_capabilities() == ""
    # CAP_SYS_ADMIN has nothing to do with it.
    less = "-sys_admin,-chown,-setgid"
    assert (
        missing_capabilities("setpriv", f"--bounding-set={less}", f"--inh-caps={less}")
        == "CAP_CHOWN CAP_SETGID"
    )


def a_root(directory: Path, groups: str, limits: dict[str, str]) -> Path:
    """A machine with 64 GiB whose process is in ``groups``, as far as memory is asked for."""
    written = {
        "proc/meminfo": "MemTotal:       67108864 kB\nMemFree: 1 kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in limits.items()},
    }
    for name, content in written.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return directory


@pytest.mark.parametrize(
    ("groups", "limits", "memory"),
    [
        ("0::/job\n", {}, 64 * GiB),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "max"}, 64 * GiB),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "8589934592"}, 8 * GiB),
        ("0::/job/step\n", {"job/step/memory.max": "1073741824"}, GiB),
        ("0::/job\n", {"job/memory.max": "1099511627776"}, 64 * GiB),
        ("0::/host/path\n", {"memory.max": "1073741824"}, GiB),
        ("0::/a:b\n", {"a:b/memory.max": "1073741824"}, GiB),
        ("0::/job\n", {"unified/job/memory.max": "1073741824"}, GiB),
        (
            "5:cpu:/\n4:rss,memory:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": "1073741824"},
            GiB,
        ),
        (
            "4:memory:/job\n",
            {"memory/job/memory.limit_in_bytes": "9223372036854771712"},
            64 * GiB,
        ),
        ("4:memory:/host\n", {"memory/memory.limit_in_bytes": "1073741824"}, GiB),
        ("3:cpuset,memory2:/job\n", {"memory/job/memory.limit_in_bytes": "1"}, 64 * GiB),
    ],
)
def test_memory_is_the_machines_or_what_a_control_group_leaves_of_it(
    groups: str, limits: dict[str, str], memory: int, tmp_path: Path
) -> None:
    assert memory_bytes(a_root(tmp_path, groups, limits)) == memory


def test_a_machine_that_does_not_tell_its_memory_holds_no_file_in_it(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == 0
    (a_root(tmp_path, "", {}) / "proc/self/cgroup").unlink()
    assert memory_bytes(tmp_path) == 64 * GiB


# --- A mount --------------------------------------------------------------------------------------


@pytest.mark.modes("auto")
def test_status_tells_the_way_of_reads_and_why(monarch: MonarchCommand, tree: Tree) -> None:
    made = monarch.mount(tree({"a": 10}), options=["datapath=python"])
    assert made.status()["mode"] == {
        "datapath": "python",
        "open": "open",
        "why": "the configuration sets datapath: python",
    }
    shown = monarch("status", str(made.path)).stdout
    assert "python (the configuration sets datapath: python)" in shown


@pytest.mark.modes("auto")
def test_a_contradiction_of_the_command_line_is_reported_before_any_action(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    done = monarch(
        *("mount", str(tree({"a": 10})), str(mountpoint), "--state", str(tmp_path / "state")),
        *("-o", "datapath=passthrough,open=none"),
        check=False,
    )
    assert done.returncode == 2
    assert "open: none and datapath: passthrough exclude each other" in done.stderr
    assert str(mountpoint) not in mounts()
    assert not (tmp_path / "state").exists()


def test_small_files_that_the_tiers_cannot_all_take_are_opened() -> None:
    room = SMALL.bytes_total
    assert choose(settings(), SMALL, NODE, capacity=room).open == "none"
    choice = choose(settings(), SMALL, NODE, capacity=room - 1)
    assert (choice.datapath, choice.open) == ("passthrough", "open")
    assert "does not fit into the tiers" in choice.why


def test_files_of_unknown_size_are_opened() -> None:
    """Without an open a kernel takes a file of size 0 for empty; a caller without permission gets
    the error."""
    unread = dataclasses.replace(SMALL, unreadable=1)
    choice = choose(settings(), unread, NODE, capacity=SMALL.bytes_total)
    assert choice.open == "open"
    assert "could not be read" in choice.why


def measured_rates() -> dict[str, list[float]]:
    """The numbers of each row of the table in docs/benchmarks.md, "A full run"."""
    text = (ROOT / "docs" / "benchmarks.md").read_text().split("### A full run")[1]
    rows: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = [re.search(r"\(([\d.,]+)(k?)\)", cell) for cell in cells]
        rates = [
            float(each[1].replace(",", "")) * (1000 if each[2] else 1) if each else 0.0
            for each in found
        ]
        rows.setdefault(name, rates)
    return rows


def test_auto_takes_the_faster_mode_of_the_published_table() -> None:
    """A model of its own: the table's times for a file of 110 KB and for a byte of a large file
    give the time of any set of files."""
    rows = measured_rates()
    # The columns behind the measured native rate.
    python, relay, passthrough, no_open = range(1, 5)
    small, large = rows["files warm, 1 reader, files/s"], rows["large file warm, MB/s"]
    assert small[python] and large[python]

    def epoch_s(opens: int, moves: int, sizes: list[int]) -> float:
        byte_s = 1 / (large[moves] * 1e6)
        open_s = 1 / small[opens] - 110_000 * byte_s
        return sum(open_s + size * byte_s for size in sizes)

    rng, decided = random.Random(5), 0
    for machine, mode in ((NODE, passthrough), (USER, relay)):
        for _ in range(300):
            mean = math.exp(rng.uniform(math.log(1e3), math.log(1e8)))
            sizes = [int(rng.lognormvariate(math.log(mean), 1)) for _ in range(20)]
            sizes += [10**8] * rng.randrange(2)
            # The bytes of files without an open take the path of relay.
            with_opens, without = epoch_s(mode, mode, sizes), epoch_s(no_open, relay, sizes)
            if 0.88 < without / with_opens < 0.92:
                # The table is rounded.
                continue
            summary = dataclasses.replace(
                files(len(sizes), 1), bytes_total=sum(sizes), largest=max(sizes)
            )
            choice = choose(settings(), summary, machine, capacity=TiB)
            assert (choice.open == "none") == (without < 0.9 * with_opens), sizes
            decided += 1
    assert decided > 400
