"""The output of ``status`` during a real fault (word, kind, start time), and ``ok`` after it."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, require_root
from tests.equipment import disks, slowfs
from tests.equipment.slowfs import SlowSource
from tests.faults.limits import control_group
from tests.mount.observe import (
    account,
    copy_of,
    ended,
    epoch,
    files,
    flip_bit,
    read_through,
    settled,
    wait_until,
)

# What is the same in every mode is shown in the one without the datapath and in one with it.
TWO = pytest.mark.modes("python", "relay")


def health(mounted: Mounted) -> dict[str, Any]:
    report: dict[str, Any] = account(mounted)["health"]
    return report


def kinds(mounted: Mounted) -> set[str]:
    return {problem["kind"] for problem in health(mounted)["problems"]}


def is_ok(mounted: Mounted) -> None:
    """All is over, by itself."""
    wait_until(lambda: health(mounted)["state"] == "ok", "all is ok again", timeout_s=100)
    assert health(mounted) == {"state": "ok", "why": "", "problems": []}


def problem(mounted: Mounted, kind: str, *, state: str, after_ns: int) -> dict[str, Any]:
    """The only problem, once it is there; the status, the log and the metrics agree on it."""
    wait_until(lambda: kinds(mounted) == {kind}, f"{kind} is reported, not {kinds(mounted)}")
    report = health(mounted)
    (found,) = report["problems"]
    assert report["state"] == state
    assert report["why"] == found["what"]
    # Since it began, not since it was asked for, and a clock of the kernel's ticks is coarse.
    assert after_ns - 10**8 <= found["since_ns"] <= time.time_ns()
    assert found["remedy"]
    cli = mounted.cli
    check = cli("status", str(mounted.path / "below"), "--check", check=False)
    assert check.returncode == {"degraded": 11, "failing": 12}[state]
    assert check.stdout.startswith(f"{mounted.path}: {state}: ")
    shown = cli("status", str(mounted.path)).stdout
    assert f"health: {state}" in shown
    flat = " ".join(shown.split())
    assert " ".join(found["what"].split()[:4]) in flat
    assert re.search(r", since (\d{4}-\d\d-\d\d )?\d\d:\d\d", flat)
    assert re.search(rf"{re.escape(str(mounted.path))}.* {state} *$", cli("status").stdout, re.M)
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    require_root()
    with disks.in_memory(tmp_path / "small", 4) as path:
        yield path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowSource]:
    """A disk that fails by the given rules, below the tier ``fast``. Name it before ``monarch``."""
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    backing = tmp_path / "disk"
    backing.mkdir()
    with SlowSource(backing, tmp_path / "tiers" / "fast") as slowed:
        yield slowed


def tier_on(disk: Path, monarch: MonarchCommand) -> None:
    """The tier ``fast`` of the next mount is a directory of that disk."""
    tiers = monarch.directory / "tiers"
    tiers.mkdir()
    (disk / "fast").mkdir()
    (tiers / "fast").symlink_to(disk / "fast")


# -- ok --------------------------------------------------------------------------------------------


@TWO
@pytest.mark.promise(55)
def test_a_mount_that_has_filled_its_tier_is_ok(monarch: MonarchCommand, tree: Tree) -> None:
    content = files()
    mounted = monarch.mount(tree(content), tiers={"fast": "40KB"})
    epoch(mounted, content)
    settled(mounted)
    assert account(mounted)["tiers"][0]["free"] < 10_000
    is_ok(mounted)
    check = monarch("status", "--check", str(mounted.path))
    assert check.stdout == f"{mounted.path}: ok\n"
    assert "health: ok" in monarch("status", str(mounted.path)).stdout


@pytest.mark.modes("relay")
@pytest.mark.promise(55)
def test_the_page_of_metrics_shows_the_state_and_every_kind(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("source: '003.jpg': Input/output error")
    content = files()
    tree(content)
    mounted = monarch.mount(
        slow.path, options=["metrics.enabled=true", "metrics.address=localhost:0"]
    )
    address = re.search(r"metrics at (http://\S+)", mounted.log_text)
    assert address is not None

    def page() -> dict[str, float]:
        with urllib.request.urlopen(address[1], timeout=100) as answer:
            text = answer.read().decode()
        return {
            name: float(value)
            for name, value in re.findall(r"^(monarch_health\S*) (\S+)$", text, re.MULTILINE)
        }

    assert page()['monarch_health{state="ok"}'] == 1
    assert set(page().values()) == {0, 1}
    slow.rules(f"err * {errno.EIO} ^/003")
    with pytest.raises(OSError):
        read_through(mounted.path / "003.jpg")
    failing = page()
    assert failing['monarch_health{state="ok"}'] == 0
    assert failing['monarch_health{state="failing"}'] == 1
    assert failing['monarch_health_problems{kind="source-errors"}'] == 1
    assert failing['monarch_health_problems{kind="tier-out"}'] == 0


# -- the source ------------------------------------------------------------------------------------


@pytest.mark.fault("S2")
@pytest.mark.promise(55, 57)
def test_a_source_that_answers_with_errors_is_failing_for_a_minute_and_one_line_of_the_log(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, pytestconfig: pytest.Config
) -> None:
    monarch.expects_log(
        r"source: '0\d\d.jpg': Input/output error \(EIO\); any caller that waited for it got that"
    )
    content = files(30)
    tree(content)
    mounted = monarch.mount(slow.path)
    epoch(mounted, content, ["000.jpg"])
    slow.rules(f"err * {errno.EIO} jpg$")
    before_ns = time.time_ns()
    for _ in range(10):
        for name in content:
            if name == "000.jpg":
                epoch(mounted, content, [name])
                continue
            with pytest.raises(OSError) as failed:
                read_through(mounted.path / name)
            assert failed.value.errno == errno.EIO
    found = problem(mounted, "source-errors", state="failing", after_ns=before_ns)
    assert found["what"] == f"the source {slow.path} answers with errors: Input/output error (EIO)"
    assert f"ls {slow.path}" in found["remedy"]
    report = [line for line in mounted.log_text.splitlines() if "source: '" in line]
    assert len(report) == 1, "one line a minute, not one a read"
    slow.rules()
    epoch(mounted, content)
    if pytestconfig.getoption("--soak"):  # it waits for the end of that minute
        is_ok(mounted)


@pytest.mark.modes("python", "passthrough", "no_open")
@pytest.mark.fault("S1")
@pytest.mark.promise(55)
def test_a_source_that_hangs_is_failing_until_it_answers(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = files(2)
    tree(content)
    mounted = monarch.mount(slow.path)
    epoch(mounted, content, ["000.jpg"])
    settled(mounted)
    slow.rules("hang open ^/001")
    before_ns = time.time_ns()
    reader = subprocess.Popen(["cat", str(mounted.path / "001.jpg")], stdout=subprocess.PIPE)
    try:
        found = problem(mounted, "source-hangs", state="failing", after_ns=before_ns)
        assert found["what"].startswith(f"the source {slow.path} does not answer")
        assert f"stat {slow.path}" in found["remedy"]
        epoch(mounted, content, ["000.jpg"])
    finally:
        slow.rules()
        answer, _ = reader.communicate(timeout=100)
    assert answer == content["001.jpg"]
    is_ok(mounted)


@TWO
@pytest.mark.fault("S4")
@pytest.mark.promise(55)
def test_a_change_at_the_source_is_reported_until_the_snapshot_is_refreshed(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("changed at the source since the snapshot")
    source = tree({"d/a": 1000, "e/b": 1000})
    mounted = monarch.mount(source)
    before_ns = time.time_ns()
    (source / "d/a").write_bytes(b"new")
    assert read_through(mounted.path / "d/a") == b"new"
    found = problem(mounted, "files-changed", state="degraded", after_ns=before_ns)
    assert found["what"] == "1 file changed at the source since the snapshot"
    assert "--refresh" in found["remedy"]
    mounted.umount()
    # Found while it is mounted, since a mount compares nothing at first with a foreign snapshot.
    (source / "e/new").write_bytes(b"new")
    again = monarch.mount(source, snapshot=mounted.state / "snapshot.lmdb")
    wait_until(lambda: "snapshot-stale" in kinds(again), "the new name is noticed")
    whats = [problem["what"] for problem in health(again)["problems"]]
    assert (
        "1 directory changed at the source since the snapshot: new files there are not shown"
        in whats
    )
    again.umount()
    is_ok(monarch.mount(source, arguments=["--refresh"]))


# -- the tiers -------------------------------------------------------------------------------------


@TWO
@pytest.mark.fault("T2")
@pytest.mark.promise(55, 57)
def test_a_tier_that_becomes_read_only_is_reported_and_comes_back(
    disk: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log(r"copy to tier fast given up.*Read-only file system \(EROFS\)")
    content = files()
    mounted = monarch.mount(
        tree(content), tiers={"fast": "1MB"}, options=["limits.tier_probe=500ms"]
    )
    epoch(mounted, content, ["000.jpg"])
    settled(mounted)
    # As ext4 does when its disk has failed: what is there is read.
    disk.rules(*(f"err {call} EROFS ." for call in ("create", "write", "unlink", "rename")))
    before_ns = time.time_ns()
    epoch(mounted, content)
    found = problem(mounted, "tier-out", state="degraded", after_ns=before_ns)
    assert found["what"] == "tier fast is out of service: Read-only file system"
    assert str(mounted.tiers["fast"]) in found["remedy"]
    epoch(mounted, content)
    disk.rules()
    is_ok(mounted)
    epoch(mounted, content)
    assert account(mounted)["health"]["state"] == "ok"


@TWO
@pytest.mark.fault("T1")
@pytest.mark.promise(55)
def test_a_tier_on_a_disk_that_others_filled_is_reported_and_accepts_copies_again(
    small_disk: Path, monarch: MonarchCommand, tree: Tree
) -> None:
    # A copy notices it, or the probe of the tier before any copy does, which logs nothing.
    monarch.allows_log("copy to tier fast given up")
    content = files()
    tier_on(small_disk, monarch)
    mounted = monarch.mount(
        tree(content), tiers={"fast": "1MB"}, options=["limits.tier_probe=500ms"]
    )
    filler = disks.fill(small_disk)
    before_ns = time.time_ns()
    epoch(mounted, content)
    found = problem(mounted, "tier-full", state="degraded", after_ns=before_ns)
    assert found["what"].startswith(
        "tier fast stores no copies, other files have filled its disk: "
    )
    assert f"df {mounted.tiers['fast']}" in found["remedy"]
    filler.unlink()
    is_ok(mounted)


@TWO
@pytest.mark.fault("T9")
@pytest.mark.promise(55)
def test_a_tier_that_hangs_is_reported_and_comes_back(
    disk: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("tier fast is out of service")
    content = files()
    options = ["limits.tier_probe=500ms", "limits.tier_timeout=1s"]
    mounted = monarch.mount(tree(content), tiers={"fast": "1MB"}, options=options)
    epoch(mounted, content, ["000.jpg"])
    settled(mounted)
    disk.rules("hang write .")
    before_ns = time.time_ns()
    epoch(mounted, content)
    found = problem(mounted, "tier-slow", state="degraded", after_ns=before_ns)
    assert found["what"].startswith("tier fast is too slow and not used now: no answer within 1 s")
    epoch(mounted, content)
    disk.rules()
    is_ok(mounted)
    settled(mounted)


@TWO
@pytest.mark.fault("T4", "T6")
@pytest.mark.promise(55)
def test_unverified_copies_after_an_unclean_end_are_reported_until_all_are_verified(
    monarch: MonarchCommand, tree: Tree
) -> None:
    content = files()
    source = tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    mounted.kill()
    before_ns = time.time_ns()
    again = monarch.mount(source, options=["limits.scrub_bandwidth=0"])
    found = problem(again, "copies-unverified", state="degraded", after_ns=before_ns)
    assert f"{len(content)} copies have not been verified yet" in found["what"]
    epoch(again, content)
    is_ok(again)


@TWO
@pytest.mark.fault("T4")
@pytest.mark.promise(55, 57)
def test_a_damaged_copy_is_reported(monarch: MonarchCommand, tree: Tree) -> None:
    monarch.expects_log(r"tier fast: copy of '00[01].jpg' dropped, and the source read instead: .*")
    content = files()
    mounted = monarch.mount(tree(content), options=["verify=open"])
    epoch(mounted, content)
    settled(mounted)
    before_ns = time.time_ns()
    for name in ("000.jpg", "001.jpg"):
        flip_bit(copy_of(mounted, name))
    epoch(mounted, content)
    found = problem(mounted, "copies-damaged", state="degraded", after_ns=before_ns)
    assert found["what"].startswith("2 copies were damaged and removed; the source served")
    assert f"monarch fsck {mounted.path}" in found["remedy"]


# -- ourselves and the machine ---------------------------------------------------------------------


@pytest.mark.fault("M6")
@pytest.mark.promise(55, 57)
def test_an_unexpected_error_is_reported_with_one_traceback(
    monarch: MonarchCommand, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monarch.expects_log("internal error in getxattr\\(\\): returned .*EIO")
    monarch.expects_log("Traceback")
    content = files(3)
    source = tree(content)
    monkeypatch.setenv("MONARCH_POINT", "handler-getxattr:1:raise")
    mounted = monarch.mount(source)
    before_ns = time.time_ns()
    with pytest.raises(OSError) as failed:
        mounted.xattr("000.jpg")
    assert failed.value.errno == errno.EIO
    found = problem(mounted, "internal-error", state="degraded", after_ns=before_ns)
    assert str(mounted.state / "daemon.log") in found["remedy"]
    assert mounted.log_text.count("Traceback") == 1
    epoch(mounted, content)
    assert mounted.xattr("000.jpg") in ("source", "fast")


@TWO
@pytest.mark.promise(55)
def test_a_log_that_cannot_be_written_is_reported_and_later_states_what_may_be_missing(
    small_disk: Path, monarch: MonarchCommand, tree: Tree
) -> None:
    content = files()
    log = small_disk / "monarch.log"
    mounted = monarch.mount(tree(content), options=[f"log.file={log}"])
    epoch(mounted, content)
    settled(mounted)
    filler = disks.fill(small_disk)
    # The last page of the file itself has room, too.
    rest = -log.stat().st_size % os.sysconf("SC_PAGE_SIZE")
    with log.open("ab") as file:
        file.write((b"x" * rest)[1:] + b"\n" * min(rest, 1))
    before_ns = time.time_ns()
    copy_of(mounted, "000.jpg").unlink()
    epoch(mounted, content)
    found = problem(mounted, "log-unwritable", state="degraded", after_ns=before_ns)
    assert "No space left on device" in found["what"]
    assert str(log) in found["what"]
    epoch(mounted, content)
    filler.unlink()
    is_ok(mounted)
    assert "lines may be missing here: the log could not be written for a while" in log.read_text()


@TWO
@pytest.mark.fault("M4")
@pytest.mark.promise(55)
def test_a_shortage_of_descriptors_is_reported_until_more_are_free(
    monarch: MonarchCommand, tree: Tree
) -> None:
    content = files()
    mounted = monarch.mount(tree(content))
    epoch(mounted, content)
    settled(mounted)
    before = resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        # The daemon needs more than the last three of forty descriptors to answer `status`.
        for _ in range(60):
            client = held.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(os.fspath(mounted.state / "control.sock"))
        # Connections are accepted in their order: these have their descriptors before this one.
        mounted.status()
        _run_short(mounted, before, content)
    is_ok(mounted)


def _run_short(mounted: Mounted, before: tuple[int, int], content: Mapping[str, bytes]) -> None:
    used = psutil.Process(mounted.pid).num_fds()
    few = int(used / 0.91)
    before_ns = time.time_ns()
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (few, before[1]))
    found = problem(mounted, "descriptors-scarce", state="degraded", after_ns=before_ns)
    assert f"of {few} file descriptors are in use" in found["what"]
    assert f"prlimit --pid {mounted.pid} " in found["remedy"]
    epoch(mounted, content)
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.modes("relay")
@pytest.mark.fault("M4")
@pytest.mark.promise(55)
def test_a_shortage_of_memory_in_the_control_group_is_reported_until_it_has_more(
    monarch: MonarchCommand, tree: Tree
) -> None:
    content = files()
    source = tree(content)
    monarch.forked = False
    with control_group("memory") as group:
        # What is taken counts where it was taken: it has to start there.
        group.add(os.getpid())
        try:
            mounted = monarch.mount(source)
        finally:
            (group.directory.parent / "cgroup.procs").write_text(str(os.getpid()))
        epoch(mounted, content)
        settled(mounted)
        is_ok(mounted)
        text = (group.directory / "memory.stat").read_text()
        pinned = sum(
            int(number)
            for number in re.findall(r"^(?:anon|shmem|total_rss|total_shmem) (\d+)$", text, re.M)
        )
        before_ns = time.time_ns()
        group.limit(int(pinned / 0.93))
        found = problem(mounted, "memory-scarce", state="degraded", after_ns=before_ns)
        assert str(group.directory) in found["what"]
        epoch(mounted, content)
        group.limit(None)
        is_ok(mounted)
        mounted.umount()
        wait_until(lambda: ended(mounted.pid), "the daemon has ended")
