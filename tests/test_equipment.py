"""The test equipment itself: what it counts, delays and fails is what it was told to."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.log import JsonFormatter, TextFormatter
from tests.conftest import MonarchCommand, Tree, contents, mounts, processes, trouble
from tests.equipment import slowfs, throttled
from tests.equipment.inotify import OpenCounter
from tests.equipment.slowfs import SlowSource
from tests.equipment.throttled import CappedDisk


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
    started = time.monotonic()
    (slow.path / "a").read_bytes()
    assert time.monotonic() - started < 0.04


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
    reader.join(10)
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
    reader.wait(10)
    assert not os.path.ismount(tmp_path / "slow")


def test_a_killed_slowfs_is_a_source_that_answers_enotconn(slow: SlowSource) -> None:
    slow.kill()
    with pytest.raises(OSError) as failed:
        os.stat(slow.path / "a")
    assert failed.value.errno == errno.ENOTCONN


@pytest.fixture
def forest(tmp_path: Path) -> Path:
    for number in range(20):
        directory = tmp_path / "forest" / f"d{number % 4}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(b"x")
    return tmp_path / "forest"


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

        assert 0.3 < seconds(disk.command(command)) < 1.5
        assert seconds(command) < 0.3
    assert not os.path.ismount(tmp_path / "disk")
    assert not (tmp_path / "disk.img").exists()


def test_a_process_that_left_its_session_is_found_by_its_environment() -> None:
    environment = {**os.environ, "MONARCH_TEST_CASE": "found"}
    sleeper = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    try:
        assert processes("MONARCH_TEST_CASE", "found") == {sleeper.pid: "sleep 60"}
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
