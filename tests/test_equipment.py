"""The test equipment itself counts, delays and fails as its rules say."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import JsonFormatter, TextFormatter
from tests.conftest import MonarchCommand, Tree, contents, mounts, processes, trouble
from tests.equipment import slowfs, throttled
from tests.equipment.inotify import OpenCounter
from tests.equipment.interrupts import interrupted_in_each_line
from tests.equipment.remounts import Ending, HistoryChecker, Left
from tests.equipment.slowfs import SlowSource
from tests.equipment.throttled import CappedDisk
from tests.equipment.virtual_clock import virtual_clock
from tests.mount.observe import wait_until


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowSource]:
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"a" * 1000)
    (root / "b").write_bytes(b"b" * 1000)
    with SlowSource(root, tmp_path / "slow", attribute_s=0) as source:
        yield source


def test_slowfs_counts_each_call_that_reaches_the_source(slow: SlowSource) -> None:
    before = slow.counters()
    for _ in range(3):
        assert (slow.path / "a").read_bytes() == b"a" * 1000
    after = slow.counters()
    assert after["open"] - before["open"] == 3
    assert after["readdir"] == before["readdir"]
    os.listdir(slow.path)
    assert slow.counters()["readdir"] == after["readdir"] + 1
    assert after["read_bytes"] - before["read_bytes"] >= 1000


def test_slowfs_delays_each_call_by_its_rule(slow: SlowSource) -> None:
    slow.rules("lat open 40")
    started = time.monotonic()
    (slow.path / "a").read_bytes()
    assert time.monotonic() - started >= 0.04
    slow.rules()

    def is_quick() -> bool:
        started = time.monotonic()
        (slow.path / "a").read_bytes()
        return time.monotonic() - started < 0.04

    # One of many: with the rule none is.
    wait_until(is_quick, "the rule is gone")


def test_slowfs_fails_only_the_paths_of_its_rule(slow: SlowSource) -> None:
    slow.rules(f"err open {errno.EIO} ^/a$")
    with pytest.raises(OSError) as failed:
        (slow.path / "a").read_bytes()
    assert failed.value.errno == errno.EIO
    assert (slow.path / "b").read_bytes() == b"b" * 1000


def test_slowfs_hangs_a_call_until_its_rule_is_gone(slow: SlowSource) -> None:
    slow.rules("hang open ^/a$")
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append((slow.path / "a").read_bytes()))
    reader.start()
    reader.join(0.3)
    assert reader.is_alive()
    assert (slow.path / "b").read_bytes() == b"b" * 1000
    slow.rules()
    reader.join(60)
    assert answers == [b"a" * 1000]


def test_slowfs_ends_while_a_call_hangs(tmp_path: Path) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").touch()
    with SlowSource(tmp_path / "root", tmp_path / "slow") as source:
        source.rules("hang open ^/a$")
        reader = subprocess.Popen(
            ["cat", str(source.path / "a")], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(0.2)
        assert reader.poll() is None
    reader.wait(60)
    assert not os.path.ismount(tmp_path / "slow")


def test_a_killed_slowfs_is_a_source_that_answers_enotconn(slow: SlowSource) -> None:
    slow.kill()
    with pytest.raises(OSError) as failed:
        os.stat(slow.path / "a")
    assert failed.value.errno == errno.ENOTCONN


def test_a_slowfs_that_is_restarted_is_found_at_its_place_without_its_rules(
    slow: SlowSource,
) -> None:
    slow.rules("err open EIO .*")
    slow.restart()
    assert (slow.path / "a").read_bytes() == b"a" * 1000
    slow.kill()
    slow.restart()
    assert (slow.path / "a").read_bytes() == b"a" * 1000


def test_slowfs_counts_the_calls_that_hang(slow: SlowSource) -> None:
    slow.rules("hang open ^/a$", "hang read ^/b$")
    readers = [threading.Thread(target=(slow.path / name).read_bytes) for name in ("a", "b")]
    for reader in readers:
        reader.start()
    wait_until(lambda: slow.counters()["hanging"] == 2, "both hang")
    slow.rules()
    for reader in readers:
        reader.join(60)
    assert slow.counters()["hanging"] == 0


def test_slowfs_knows_errors_by_name_and_of_two_rules_takes_the_last(slow: SlowSource) -> None:
    slow.rules("err open ESTALE .*", "err open ENOTCONN ^/a$")
    for name, number in (("a", errno.ENOTCONN), ("b", errno.ESTALE)):
        with pytest.raises(OSError) as failed:
            os.open(slow.path / name, os.O_RDONLY)
        assert failed.value.errno == number


def test_slowfs_answers_reads_with_half_of_what_was_asked_for(slow: SlowSource) -> None:
    slow.rules("short read ^/a$")
    with open(slow.path / "a", "rb", buffering=0) as file:
        assert [len(file.read(1000)) for _ in range(3)] == [500, 500, 0]
    assert (slow.path / "b").read_bytes() == b"b" * 1000


def test_slowfs_reads_and_writes_one_bit_wrong(slow: SlowSource) -> None:
    slow.rules("flip read ^/a$", "flip write ^/new$")
    assert (slow.path / "a").read_bytes() == b"`" + b"a" * 999
    assert (slow.path / "b").read_bytes() == b"b" * 1000
    (slow.path / "new").write_bytes(b"a" * 1000)
    assert (slow.root / "new").read_bytes() == b"`" + b"a" * 999
    slow.rules()
    assert (slow.path / "a").read_bytes() == b"a" * 1000


def test_slowfs_cuts_what_it_reads_and_fails_behind_a_byte(slow: SlowSource) -> None:
    (slow.root / "a").write_bytes(b"a" * 20_000)
    slow.rules("cut 300 ^/a$")
    with open(slow.path / "a", "rb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_size == 20_000
        assert len(file.read(20_000)) == 300
    slow.rules("bad 8192 ^/a$")
    with open(slow.path / "a", "rb", buffering=0) as file:
        assert len(os.pread(file.fileno(), 8192, 0)) == 8192
        with pytest.raises(OSError) as failed:
            os.pread(file.fileno(), 1, 8192)
        assert failed.value.errno == errno.EIO


def test_slowfs_is_full_after_the_given_number_of_bytes(slow: SlowSource) -> None:
    slow.rules("free 8192")
    assert os.statvfs(slow.path).f_bavail * os.statvfs(slow.path).f_frsize == 8192
    with open(slow.path / "new", "wb", buffering=0) as file:
        assert [file.write(b"x" * 3000) for _ in range(3)] == [3000, 3000, 2192]
        with pytest.raises(OSError) as failed:
            file.write(b"x" * 3000)
    assert failed.value.errno == errno.ENOSPC
    assert (slow.root / "new").stat().st_size == 8192
    assert os.statvfs(slow.path).f_bavail == 0
    slow.rules()
    (slow.path / "new").write_bytes(b"x" * 9000)
    assert os.statvfs(slow.path).f_bavail > 0


def test_slowfs_keeps_what_a_tier_needs(slow: SlowSource) -> None:
    """Times to the nanosecond, modes, holes, names, and what is open while its name goes."""
    with open(slow.path / "new", "w+b", buffering=0) as file:
        file.write(b"new")
        file.truncate(1_000_000)
        os.fchmod(file.fileno(), 0o640)
        os.utime(file.fileno(), ns=(1, 10**18 + 123_456_789))
        os.fsync(file.fileno())
        os.rename(slow.path / "new", slow.path / "b")
        status = os.stat(slow.root / "b")
        assert status.st_mtime_ns == os.stat(slow.path / "b").st_mtime_ns == 10**18 + 123_456_789
        assert status.st_mode & 0o777 == 0o640
        assert status.st_blocks * 512 < 100_000
        assert os.lseek(file.fileno(), 500_000, os.SEEK_HOLE) == 500_000
        os.unlink(slow.path / "b")
        assert os.listdir(slow.root) == ["a"]
        assert os.pread(file.fileno(), 3, 0) == b"new"
    directory = os.open(slow.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
        os.link("a", "c", src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(directory)
    assert (slow.root / "c").stat().st_ino == (slow.root / "a").stat().st_ino


@pytest.fixture
def forest(tmp_path: Path) -> Path:
    for number in range(20):
        directory = tmp_path / "forest" / f"d{number % 4}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(b"x")
    return tmp_path / "forest"


def _last(queue: list[int]) -> int | None:
    while True:
        try:
            found = queue.pop()
        except IndexError:
            break
        if found:
            return found
    return None


def test_an_interrupted_call_leaves_no_exception_that_is_still_handled() -> None:
    """In this form of loop it did, in Python 3.11."""
    result, interrupted = interrupted_in_each_line(lambda: _last([0]), sys.modules[__name__])
    assert result is None
    assert interrupted > 5
    assert sys.exc_info()[1] is None


def test_inotify_counts_each_open_of_a_file_and_no_directory(forest: Path) -> None:
    files = sorted(path for path in forest.rglob("*") if path.is_file())
    with OpenCounter(forest) as opens:
        for _ in range(3):
            for path in files:
                path.read_bytes()
        list(forest.rglob("*"))
        assert opens.count() == 60
        assert opens.paths() == {str(path.relative_to(forest)): 3 for path in files}
        opens.reset()
        assert opens.count() == 0
        for path in files:
            path.stat()
        assert opens.count() == 0


def test_inotify_counts_the_opens_of_another_process(forest: Path) -> None:
    with OpenCounter(forest) as opens:
        subprocess.run(["cat", str(forest / "d0" / "f0"), str(forest / "d1" / "f1")], check=True)
        assert opens.paths() == {"d0/f0": 1, "d1/f1": 1}


def test_inotify_counts_one_file_opened_again_and_again(forest: Path) -> None:
    with OpenCounter(forest) as opens:
        for _ in range(500):
            (forest / "d0" / "f0").read_bytes()
        assert opens.count() == 500


def test_inotify_counts_more_opens_than_the_kernel_queues(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / str(number)).touch()
    with OpenCounter(tmp_path) as opens:
        for _ in range(5):
            for number in range(2000):
                os.close(os.open(tmp_path / str(number), os.O_RDONLY))
        assert opens.count() == 10_000


def test_a_capped_disk_reads_at_its_cap_inside_the_group_only(tmp_path: Path) -> None:
    if reason := throttled.unavailable():
        pytest.skip(reason)
    program = (
        "import sys, time; t = time.monotonic(); open(sys.argv[1], 'rb').read();"
        "print(time.monotonic() - t)"
    )
    with CappedDisk(tmp_path / "disk", size_bytes=64 << 20) as disk:
        file = disk.path / "f"
        file.write_bytes(os.urandom(8 << 20))
        disk.limit(read_bps=16 << 20)
        command = [sys.executable, "-c", program, str(file)]

        def seconds(command: list[str]) -> float:
            disk.forget_cached_pages()
            return float(subprocess.run(command, check=True, capture_output=True).stdout)

        # One of many: other programs may need the processors.
        wait_until(lambda: 0.3 < seconds(disk.command(command)) < 1.5, "it reads at its cap")
        wait_until(lambda: seconds(command) < 0.3, "it reads without a cap")
    assert not os.path.ismount(tmp_path / "disk")
    assert not (tmp_path / "disk.img").exists()


def test_control_c_ends_the_programs_that_tests_start() -> None:
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    ignored = re.search(r"^SigIgn:\s+([0-9a-f]+)$", status, re.MULTILINE)
    assert ignored is not None
    assert not int(ignored[1], 16) >> (signal.SIGINT - 1) & 1


def test_a_run_in_the_background_under_nohup_starts_programs_that_control_c_ends(
    tmp_path: Path,
) -> None:
    case = f"{__file__}::test_control_c_ends_the_programs_that_tests_start"
    # In its default directory pytest would close that of the running tests to other users.
    options = f"-n 0 -q -p no:cacheprovider --basetemp={tmp_path / 'tests'}"
    run = f"{sys.executable} -m pytest {options} {case}"
    # Without job control, as in a script, a command before the & has SIGINT ignored.
    done = subprocess.run(
        ["bash", "-c", f"nohup {run} & wait $!"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_process_that_left_its_session_is_found_by_its_environment() -> None:
    environment = {**os.environ, "MONARCH_TEST_CASE": "found"}
    sleeper = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    try:
        found = {sleeper.pid: "sleep 60"}
        wait_until(lambda: processes("MONARCH_TEST_CASE", "found") == found, "it is found")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert processes("MONARCH_TEST_CASE", "found") == {}


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_trouble_is_found_in_every_format_of_the_log(formatter: logging.Formatter) -> None:
    def line(level: int) -> str:
        record = logging.LogRecord("monarch.x", level, "x.py", 1, "an error of %s", ("x",), None)
        return formatter.format(record)

    assert [trouble(line(level)) for level in (10, 20, 30, 40, 50)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert trouble("Traceback (most recent call last):")


def test_a_command_that_fails_fails_the_test_with_its_message(monarch: MonarchCommand) -> None:
    assert monarch("--version").stdout.startswith("monarch ")
    assert monarch("no-such-verb", check=False).returncode == 2
    with pytest.raises(pytest.fail.Exception, match=re.escape("exited with 2")):
        monarch("no-such-verb")


def test_a_tree_is_the_same_each_time_and_each_file_another(tree: Tree) -> None:
    root = tree({"a": 100, "d/b": 100, "d/empty": 0, "e": None, "f": b"own"})
    assert (root / "a").read_bytes() == contents("a", 100)
    assert (root / "a").read_bytes() != (root / "d" / "b").read_bytes()
    assert (root / "d" / "empty").stat().st_size == 0
    assert (root / "e").is_dir()
    assert (root / "f").read_bytes() == b"own"


def test_a_killed_daemon_leaves_nothing_after_its_test(tmp_path: Path, tree: Tree) -> None:
    monarch = MonarchCommand(tmp_path, "killed")
    mounted = monarch.mount(tree({"a": 100}))
    mounted.kill()
    assert str(mounted.path) in mounts()
    with pytest.raises(OSError) as failed:
        (mounted.path / "a").read_bytes()
    assert failed.value.errno == errno.ENOTCONN
    monarch.close()
    assert str(mounted.path) not in mounts()


def test_a_warning_in_a_daemons_log_fails_its_test_unless_announced(
    tmp_path: Path, tree: Tree
) -> None:
    monarch = MonarchCommand(tmp_path, "warned")
    mounted = monarch.mount(tree({"a": 100}))
    mounted.umount()
    with (mounted.state / "daemon.log").open("a") as log:
        log.write("2026-01-31T12:00:00.000Z warning monarch.x: it is late\n")
    with pytest.raises(pytest.fail.Exception, match="it is late"):
        monarch.close()
    monarch.expects_log("it is (late|early)")
    monarch.close()
    monarch.expects_log("it is noon")
    with pytest.raises(pytest.fail.Exception, match="nothing in the daemon's log matches"):
        monarch.close()


def test_a_stage_left_in_a_tier_fails_its_test(tmp_path: Path, tree: Tree) -> None:
    monarch = MonarchCommand(tmp_path, "staged")
    mounted = monarch.mount(tree({"a": 100}))
    mounted.umount()
    (mounted.tiers["fast"] / "7.part").touch()
    with pytest.raises(pytest.fail.Exception, match="a stage was left"):
        monarch.close()


def test_the_virtual_clock_gives_a_thread_time_to_answer() -> None:
    order: list[str] = []

    async def go() -> None:
        pool = ThreadPool(1, "test", abandon=False)

        async def in_a_thread() -> None:
            await pool.run(time.sleep, 0.05)
            order.append("thread")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_a_thread)
            await trio.sleep(3600)
            order.append("hour")

    with virtual_clock(patience_s=60) as clock:
        trio.run(go, clock=clock)
    assert order == ["thread", "hour"]


def test_the_virtual_clock_does_not_jump_while_a_thread_computes() -> None:
    """Many times as long as it gives a thread that waits."""
    order: list[str] = []

    async def go() -> None:
        pool = ThreadPool(1, "test", abandon=False)

        async def in_a_thread() -> None:
            await pool.run(sum, range(10_000_000))
            order.append("thread")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_a_thread)
            await trio.sleep(3600)
            order.append("hour")

    with virtual_clock() as clock:
        trio.run(go, clock=clock)
    assert order == ["thread", "hour"]


def test_the_virtual_clock_jumps_while_a_thread_waits_for_a_task() -> None:
    async def go() -> None:
        pool, is_due = ThreadPool(1, "test", abandon=False), threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.run, is_due.wait)
            await trio.sleep(3600)
            is_due.set()

    with virtual_clock() as clock:
        trio.run(go, clock=clock)


@pytest.mark.parametrize("wrong", ["", "f", "g"])
def test_the_number_of_links_may_change_of_a_file_of_which_others_have_moved_a_name(
    tmp_path: Path, wrong: str
) -> None:
    """The mount has removed one of two names, which the source still has. Others rename its
    directory, so the file keeps that name. ``wrong``: a file that is shown with another change."""
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    for name in ("f", "g"):
        (source / name).write_bytes(b"bytes")
    (source / "d/link").hardlink_to(source / "f")
    checker = HistoryChecker(source, Left(tmp_path), closely=True)
    shown = checker.at_source()
    del shown[b"d/link"]
    before = shown[b"f"]
    shown[b"f"] = replace(before, more=(*before.more[:3], 1))
    checker.ended(Ending(shown, "kill"))
    checker.others_act(lambda: (source / "d").rename(source / "others-1"), "same")
    now = checker.at_source()
    assert now[b"f"].more[3] == 2
    if not wrong:
        checker.check_shown(now, "same")
        return
    now[wrong.encode()] = replace(now[wrong.encode()], mode=0o600, more=(0, 0, 0, 2))
    with pytest.raises(AssertionError, match=f"b'{wrong}' is "):
        checker.check_shown(now, "same")
