"""A source that fails or hangs: only the processes that need it get the error or wait."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents, own_directory
from tests.equipment.mounts import is_mounted
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    account,
    accounts_agree,
    asked_for,
    ended,
    epoch,
    error_of,
    files,
    read_through,
    resident,
    settled,
    wait_until,
)

SMALL_INLINE = "limits.inline_max=64KiB"


@pytest.mark.fault("S2")
@pytest.mark.promise(9)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOTCONN, errno.ETIMEDOUT])
def test_an_error_of_the_source_goes_to_the_reader_of_that_file_only(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, number: int
) -> None:
    monarch.expects_log("source: '003.jpg'")
    content = files()
    tree(content)
    mounted = monarch.mount(slow.path)
    slow.rules(f"err open {number} ^/003")
    others = [name for name in content if name != "003.jpg"]
    for _ in range(2):
        assert error_of(mounted.path / "003.jpg") == number
        epoch(mounted, content, others)
    report = settled(mounted)
    assert set(resident(mounted, content)) == set(others)
    # A kernel that only reads may ask for the same bytes once more.
    assert list(report["errors"]) == [f"source-{errno.errorcode[number]}"]
    assert sum(report["errors"].values()) == 2 or monarch.mode == "no_open"
    slow.rules()
    epoch(mounted, content)
    settled(mounted)
    assert set(resident(mounted, content)) == set(content)
    accounts_agree(mounted)


@pytest.mark.fault("S3")
@pytest.mark.promise(9)
def test_an_error_in_the_middle_of_a_fetch_is_the_readers_and_leaves_nothing(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("source: '003.jpg'")
    content = files()
    tree(content)
    mounted = monarch.mount(slow.path)
    slow.rules(f"err read {errno.EIO} ^/003")
    assert error_of(mounted.path / "003.jpg") == errno.EIO
    assert settled(mounted)["residency"]["files"] == 0
    slow.rules()
    epoch(mounted, content)
    assert set(resident(mounted, settled(mounted) and content)) == set(content)
    accounts_agree(mounted)


@pytest.mark.fault("S3")
def test_a_copy_that_the_source_interrupts_is_given_up_and_made_later(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("copy to tier fast given up, will be tried again")
    large = contents("large", 2_000_000)
    tree({"large": large})
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    slow.rules("hang read large")
    if monarch.mode == "no_open":
        monarch.expects_log("source: 'large'")
    with asked_for(mounted, "large"):
        stage = own_directory(mounted.tiers["fast"]) / "stage"
        wait_until(lambda: list(stage.iterdir()) != [], "the copy has begun")
        slow.rules(f"err read {errno.EIO} large")
        wait_until(lambda: account(mounted)["copies"]["failed"] > 0, "the copy failed")
        assert account(mounted)["residency"]["wanted"] == 1
        assert mounted.stages() == []
        assert account(mounted)["tiers"][0]["reserved"] == 0
        assert account(mounted)["tiers"][0]["in_service"] is True
    slow.rules()
    # No process opens it: it is still wanted.
    settled(mounted)
    assert mounted.xattr("large") == "fast"
    assert read_through(mounted.path / "large") == large
    accounts_agree(mounted)


_IMPATIENT = """
import sys
from monarch.cli import main, mount, source_watch

mount._SIGNAL_S, source_watch._STEP_S = 1.0, 0.05
source_watch._SLOW_STEPS, source_watch._HUNG_STEPS = 2, 20
sys.argv[:1] = ["monarch", "mount"]
sys.exit(main.main())
"""


@pytest.mark.fault("S1")
@pytest.mark.promise(346)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("form", ["daemon", "foreground"])
@pytest.mark.parametrize("calls", ["*", "readdir"])
def test_a_mount_of_a_source_that_hangs_says_so_and_ends(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, tmp_path: Path, calls: str, form: str
) -> None:
    """With ``readdir`` the daemon itself hangs, in the scan."""
    source, mountpoint = tree({"f": 10}), tmp_path / "mnt"
    mountpoint.mkdir()
    slow.rules(*(f"hang {call} ." for call in {calls, "statfs"}))
    arguments = [str(slow.path), str(mountpoint), "--tier", f"{tmp_path}/tier:1MiB"]
    more = ["--foreground"] if form == "foreground" else []
    ended = subprocess.run(
        [sys.executable, "-c", _IMPATIENT, *arguments, *more],
        env=monarch.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 4
    assert f"source {slow.path} does not answer yet" in ended.stderr
    assert f"source '{slow.path}' has not answered for 1 s: nothing is mounted" in ended.stderr
    assert not is_mounted(mountpoint)
    slow.rules()
    # Nothing of it is in the way of the next one.
    mounted = monarch.mount(slow.path)
    assert read_through(mounted.path / "f") == (source / "f").read_bytes()


_LATE = """
import os
from pathlib import Path
import trio
from monarch.cli import source_watch
from monarch.daemon import mount as daemon_mount

watch = source_watch._wait
def watch_when_made(source, give_up, answered, ended):
    while not Path(os.environ["MADE"]).exists():
        if ended.wait(0.01):
            return
    watch(source, give_up, answered, ended)

async def wait(mountpoint):
    Path(os.environ["MADE"]).touch()
    await trio.sleep_forever()

source_watch._wait, daemon_mount.wait_until_answered = watch_when_made, wait
"""


@pytest.mark.fault("S1")
@pytest.mark.promise(346)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("form", ["daemon", "foreground"])
def test_a_source_that_hangs_before_the_mount_is_ready_leaves_no_mount(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, tmp_path: Path, form: str
) -> None:
    tree({"f": 10})
    mountpoint, made = tmp_path / "mnt", tmp_path / "made"
    mountpoint.mkdir()
    arguments = [str(slow.path), str(mountpoint), "--tier", f"{tmp_path}/tier:1MiB"]
    more = ["--foreground"] if form == "foreground" else []
    with subprocess.Popen(
        [sys.executable, "-c", _LATE + _IMPATIENT, *arguments, *more],
        env={**monarch.environment(), "MADE": str(made)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        try:
            wait_until(made.exists, "it is mounted")
            slow.rules("hang statfs .")
            _, said = command.communicate(timeout=100)
        finally:
            command.kill()
            was_left = is_mounted(mountpoint)
            slow.rules()
    # This also removes a mount that was left.
    monarch.mount(slow.path)
    assert (command.returncode, was_left) == (4, False)
    assert "has not answered for 1 s: nothing is mounted" in said


class Waiting:
    """A reader that waits for a source that hangs."""

    def __init__(self, path: Path) -> None:
        self.outcome: bytes | OSError | None = None
        self._thread = threading.Thread(target=self._read, args=(path,))
        self._thread.start()

    def _read(self, path: Path) -> None:
        try:
            self.outcome = read_through(path)
        except OSError as error:
            self.outcome = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(60)
        assert not self.waits, "the reader still hangs"


def hung(mounted: Mounted, slow: SlowSource) -> list[Waiting]:
    """More readers of one hung file than the source is given calls at once."""
    slow.rules("hang open ^/hang")
    readers = [Waiting(mounted.path / f"hang{number}") for number in range(4)]
    wait_until(lambda: slow.counters()["hanging"] >= 1, "the source was asked")
    return readers


@pytest.mark.fault("S1")
@pytest.mark.promise(11)
def test_a_source_that_hangs_holds_up_neither_resident_files_nor_status(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = files()
    hanging = {f"hang{number}": contents(str(number), 5000) for number in range(4)}
    tree(content | hanging)
    mounted = monarch.mount(slow.path, options=["limits.source_concurrency=4"])
    epoch(mounted, content)
    settled(mounted)
    readers = hung(mounted, slow)
    for _ in range(3):
        epoch(mounted, content)
    assert sorted(os.listdir(mounted.path)) == sorted([*content, *hanging])
    assert mounted.status()["state"] == "serving"
    # The source hangs still.
    assert all(reader.waits for reader in readers)
    slow.rules()
    for number, reader in enumerate(readers):
        reader.join()
        assert reader.outcome == hanging[f"hang{number}"]
    settled(mounted)
    accounts_agree(mounted)


@pytest.mark.fault("S1", "M3")
@pytest.mark.parametrize("way", ["SIGTERM", "lazy umount"])
def test_a_source_that_hangs_does_not_keep_the_daemon_from_its_end(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, way: str
) -> None:
    content = files()
    tree(content | {f"hang{number}": contents(str(number), 5000) for number in range(4)})
    mounted = monarch.mount(slow.path)
    epoch(mounted, content)
    settled(mounted)
    readers = hung(mounted, slow)
    if way == "SIGTERM":
        os.kill(mounted.pid, signal.SIGTERM)
    else:
        monarch("umount", str(mounted.path), "--lazy")
        os.kill(mounted.pid, signal.SIGTERM)
    wait_until(lambda: ended(mounted.pid), "the daemon has ended")
    for reader in readers:
        reader.join()
        assert isinstance(reader.outcome, OSError)
    assert mounted.stages() == []
    slow.rules()
    again = monarch.mount(slow.path)
    # A clean end: resident copies are used without a check of the source.
    opens = slow.counters()["open"]
    epoch(again, content)
    assert slow.counters()["open"] == opens
    accounts_agree(again)


# The datapath answers a reader that was killed. Without it the reader waits for the source, and the
# mount is busy.
@pytest.mark.fault("S1")
@pytest.mark.modes("passthrough", "relay", "no_open")
def test_umount_does_not_wait_for_a_source_that_hangs(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    tree({"hang": contents("hang", 5000)})
    # The daemon's Python opens files that are not fetched as a whole.
    mounted = monarch.mount(slow.path, options=["limits.inline_max=1000"])
    slow.rules("hang open ^/hang")
    with subprocess.Popen(["cat", mounted.path / "hang"], stdout=subprocess.DEVNULL) as reader:
        wait_until(lambda: slow.counters()["hanging"] == 1, "the source was asked")
        reader.kill()
    assert monarch("umount", str(mounted.path)).returncode == 0
    assert ended(mounted.pid)


@pytest.mark.fault("S2")
@pytest.mark.promise(10)
def test_a_file_that_the_source_denies_without_any_change_above_it_is_not_forgotten(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    """As a distributed file system does that has lost one of its servers."""
    monarch.expects_log("source: 'd/003.jpg'")
    content = {f"d/{name}": data for name, data in files().items()}
    tree(content)
    mounted = monarch.mount(slow.path)
    denied = mounted.path / "d/003.jpg"
    slow.rules(f"err getattr {errno.ENOENT} 003")
    time.sleep(1.1)  # what the source's client remembers of names
    assert error_of(denied) == errno.EIO
    assert denied.exists()
    assert len(os.listdir(mounted.path / "d")) == len(content)
    slow.rules()
    time.sleep(1.1)
    epoch(mounted, content)
    assert account(mounted)["source_totals"]["opens"] == len(content)


@pytest.mark.fault("S2")
def test_a_source_that_fails_after_a_new_mount_is_not_asked_for_every_copy(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("could not compare with the source")
    monarch.expects_log("source: '")
    content = files(300)
    tree(content)
    mounted = monarch.mount(slow.path)
    epoch(mounted, content)
    settled(mounted)
    mounted.umount()
    time.sleep(1.1)  # what the source's client remembers of names
    slow.rules(f"err getattr {errno.EIO} jpg")
    before = slow.counters()["getattr"]
    again = monarch.mount(slow.path)
    wait_until(lambda: "could not compare" in again.log_text, "the source is found failing")
    assert slow.counters()["getattr"] - before < 150
    epoch(again, content)
    assert account(again)["source_totals"]["opens"] == 0
    slow.rules()
