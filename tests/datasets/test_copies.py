"""Copies of a mount's files are read in the place of the files, and only as these may be read."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch.datasets import copies, files
from monarch.datasets.files import Dataset
from monarch.posix.mounts import MountedFileSystem
from monarch.tiers.contents import copy_name, put_seal
from monarch.tiers.records import Record, Records
from monarch.types import XATTR_COPIES, Identity, Ino
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until

SIZE = 9000
NAMES = ("a/1", "a/2", "b/3")
_SOURCE_INO = 7
_OTHER_USER = 65534


class FakeMount:
    """A directory in the place of a mount. Each copy has other bytes than its file, so it shows
    which of them was read."""

    def __init__(self, root: Path) -> None:
        self.root, self._tier, self._state = root / "mount", root / "tier", root / "state"
        # Where the mount says that its copies are.
        self.tier = self._tier
        for directory in (self.root, self._tier, self._state):
            directory.mkdir()
        self._records = Records(self._state, "g", ["tier"])
        # Unlike those of a daemon, which only its user may open.
        self._records.path.chmod(0o644)
        self.has_acls = False
        self.term = self._records.term
        for name in NAMES:
            path = self.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self.of_file(name))
            path.chmod(0o644)
            self.copy(name)

    def of_file(self, name: str) -> bytes:
        return f"file {name}".encode().ljust(SIZE, b"f")

    def of_copy(self, name: str) -> bytes:
        return f"copy {name}".encode().ljust(SIZE, b"c")

    def copy_of(self, name: str) -> Path:
        return self._tier / copy_name(self._ino(name))

    def copy(self, name: str, *, doubted: bool = False) -> None:
        """Makes the copy of a file as it is now."""
        status = (self.root / name).stat()
        identity = Identity(status.st_size, status.st_mtime_ns, status.st_ctime_ns, _SOURCE_INO)
        path = self.copy_of(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self.of_copy(name))
        path.chmod(0o644)
        with path.open("rb+") as file:
            put_seal(file.fileno(), self._ino(name), identity)
        record = Record(1, identity, bytes(16))
        self._records.put(self._ino(name), record, doubted=doubted)

    def forget(self, name: str) -> None:
        self._records.clear(self._ino(name))

    def value(self, directory: int) -> bytes:
        """The attribute of the mount."""
        return json.dumps(
            {
                "records": str(self._records.path),
                "term": self.term,
                "acls": self.has_acls,
                "directories": {"1": str(self.tier)},
            }
        ).encode()

    def _ino(self, name: str) -> Ino:
        return Ino((self.root / name).stat().st_ino)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMount]:
    # Not in ``tmp_path``, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="monarch-copies-") as directory:
        os.chmod(directory, 0o755)
        made = FakeMount(Path(directory))
        monkeypatch.setattr(copies, "_value", made.value)
        yield made


@pytest.fixture
def asks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_ASK_S", 0.0)


def test_the_copies_of_files_are_read(mount: FakeMount) -> None:
    expected = [mount.of_copy(name) for name in NAMES]
    with Dataset(mount.root) as dataset:
        assert dataset.get_many(NAMES) == expected
        memory = bytearray(3 * SIZE)
        assert dataset.get_many(NAMES, into=memory) == expected
        assert dataset.get_many(["a/../b/3", mount.root / "a/1"]) == [expected[2], expected[0]]
    with Dataset(mount.root / "a") as dataset:
        assert dataset.get_many(["1", "2"]) == expected[:2]


@contextmanager
def free_descriptors(most: int) -> Iterator[None]:
    """At most ``most`` free descriptors for the length of a ``with`` block."""
    free = [number for number in range(4096) if not os.path.exists(f"/proc/self/fd/{number}")]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[most], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.promise(250)
@pytest.mark.parametrize("free", [1, 2, 3, 4])
def test_copies_leave_a_descriptor_to_the_files(mount: FakeMount, free: int) -> None:
    with Dataset(mount.root) as dataset, free_descriptors(free):
        found = dataset.get_many(NAMES)
    # Two for the records and the directory of the copies.
    of = mount.of_copy if free > 2 else mount.of_file
    assert found == [of(name) for name in NAMES]


def rewritten(mount: FakeMount) -> None:
    # Another time, whatever the clock of the file system is.
    (mount.root / "a/1").write_bytes(mount.of_file("a/1"))
    os.utime(mount.root / "a/1", ns=(1, 1))


def changed_attributes(mount: FakeMount) -> None:
    path = mount.root / "a/1"
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.chmod(0o666)


def replaced(mount: FakeMount) -> None:
    (mount.root / "new").write_bytes(mount.of_file("a/1"))
    os.rename(mount.root / "new", mount.root / "a/1")


def unsealed(mount: FakeMount) -> None:
    os.utime(mount.copy_of("a/1"), ns=(1, 1))


def emptied(mount: FakeMount) -> None:
    os.truncate(mount.copy_of("a/1"), 0)


def removed(mount: FakeMount) -> None:
    mount.copy_of("a/1").unlink()


def a_fifo(mount: FakeMount) -> None:
    mount.copy_of("a/1").unlink()
    os.mkfifo(mount.copy_of("a/1"))


def a_link(mount: FakeMount) -> None:
    there = mount.copy_of("a/1")
    there.rename(f"{there}.moved")
    there.symlink_to(f"{there}.moved")


def forgotten(mount: FakeMount) -> None:
    mount.forget("a/1")


def doubted(mount: FakeMount) -> None:
    mount.copy("a/1", doubted=True)


@pytest.mark.promise(252)
@pytest.mark.parametrize(
    "change",
    [
        rewritten,
        changed_attributes,
        replaced,
        unsealed,
        emptied,
        removed,
        a_fifo,
        a_link,
        forgotten,
        doubted,
    ],
)
def test_a_file_is_opened_itself_if_its_copy_is_not_of_its_version(
    mount: FakeMount, change: Callable[[FakeMount], None]
) -> None:
    with Dataset(mount.root) as dataset:
        assert dataset.get("a/1") == mount.of_copy("a/1")
        change(mount)
        expected = [mount.of_file("a/1"), mount.of_copy("a/2"), mount.of_copy("b/3")]
        assert dataset.get_many(NAMES) == expected


@pytest.mark.promise(252)
def test_a_removed_file_and_a_hidden_one_are_not_found(mount: FakeMount) -> None:
    with Dataset(mount.root) as dataset:
        assert dataset.get_many(NAMES[:2]) == [mount.of_copy(name) for name in NAMES[:2]]
        (mount.root / "a/1").unlink()
        with pytest.raises(FileNotFoundError):
            dataset.get("a/1")
        os.rename(mount.root / "a", mount.root / "c")
        with pytest.raises(FileNotFoundError):
            dataset.get("a/2")
        assert dataset.get("c/2") == mount.of_copy("a/2")


def as_another_user(call: Callable[[], bytes]) -> bytes:
    """The result of a call by a user who is neither root nor the owner of the files; empty if it
    was refused."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(_OTHER_USER)
                os.setuid(_OTHER_USER)
            os.write(here, call())
        except PermissionError:
            pass
        finally:
            os._exit(0)
    os.close(here)
    try:
        found = b""
        while part := os.read(there, 1 << 16):
            found += part
    finally:
        os.close(there)
        os.waitpid(child, 0)
    return found


@pytest.mark.promise(253)
def test_no_copy_is_read_of_a_file_that_the_user_may_not_read(mount: FakeMount) -> None:
    # The owner of the files, if this is not root, may not read this one either.
    (mount.root / "a/1").chmod(0o000)
    mount.copy("a/1")
    with Dataset(mount.root) as dataset:
        if os.geteuid() == 0:
            assert dataset.get("a/1") == mount.of_copy("a/1")
        assert as_another_user(lambda: bytes(dataset.get("a/1"))) == b""
        assert as_another_user(lambda: bytes(dataset.get("a/2"))) == mount.of_copy("a/2")
        (mount.root / "a").chmod(0o000 if os.geteuid() else 0o700)
        assert as_another_user(lambda: bytes(dataset.get("a/2"))) == b""
        (mount.root / "a").chmod(0o755)


@pytest.mark.promise(252)
@pytest.mark.usefixtures("asks_always")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"{}",
        b'{"records": "/none", "term": 1, "acls": false, "directories": {"1": "/none"}}',
        b'{"records": "/dev/zero", "term": "x", "acls": false, "directories": {}}',
        b'{"records": "/dev/zero", "term": 1, "acls": false, "directories": {"0": "/"}}',
        b'{"records": "/dev/zero", "term": 1, "acls": false, "directories": {"999": "/"}}',
        b'{"records": "/dev/zero", "term": 1, "acls": false, "directories": []}',
        b'{"records": "/dev/zero", "term": 1, "acls": false, "directories": {"1": "/"}}',
        b'{"records": "/dev/zero", "term": 0, "acls": false, "directories": {"1": "/dev/zero"}}',
        b'{"records": 5, "term": 1e999, "acls": null, "directories": {"1": 5}}',
    ],
)
def test_another_value_of_the_attribute_does_no_harm(
    mount: FakeMount, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    with Dataset(mount.root) as dataset:
        assert dataset.get("a/1") == mount.of_copy("a/1")
        monkeypatch.setattr(copies, "_value", lambda directory: value)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            assert dataset.get_many(NAMES) == [mount.of_file(name) for name in NAMES]
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.usefixtures("asks_always")
def test_the_mount_may_withdraw_its_copies(
    mount: FakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(directory: int) -> bytes:
        raise OSError

    with Dataset(mount.root) as dataset:
        assert dataset.get("a/1") == mount.of_copy("a/1")
        mount.term += 1
        assert dataset.get("a/1") == mount.of_file("a/1")
        mount.term -= 1
        assert dataset.get("a/1") == mount.of_copy("a/1")
        monkeypatch.setattr(copies, "_value", none)
        assert dataset.get("a/1") == mount.of_file("a/1")


def test_no_descriptor_is_left(mount: FakeMount) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Dataset(mount.root) as dataset:
        for _ in range(3):
            dataset.get_many(NAMES)
    # The object exists until the test ends.
    assert set(os.listdir("/proc/self/fd")) <= before


SERVED = "fuse.monarch"


@pytest.mark.promise(253)
@pytest.mark.parametrize(
    ("kind", "user", "is_believed"),
    [(SERVED, 0, True), (SERVED, _OTHER_USER, False), ("ext4", None, False), ("fuse", 0, False)],
)
def test_only_a_daemon_of_root_or_of_the_same_user_says_where_copies_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    user: int | None,
    is_believed: bool,
) -> None:
    os.setxattr(tmp_path, XATTR_COPIES, b"anything")
    number = tmp_path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mounted = MountedFileSystem(tmp_path, kind, device, user=user)
    monkeypatch.setattr(copies, "mount_table", lambda: [mounted])
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        if is_believed:
            assert copies._value(directory) == b"anything"
        else:
            with pytest.raises(OSError, match="No data available"):
                copies._value(directory)
    finally:
        os.close(directory)


def test_a_directory_whose_owner_says_where_copies_are_is_read_itself(
    mount: FakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.setxattr(mount.root, XATTR_COPIES, mount.value(0))
    monkeypatch.undo()
    with Dataset(mount.root) as dataset:
        assert dataset.get_many(NAMES) == [mount.of_file(name) for name in NAMES]


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 100_000,
        b'{"records": "/dev/null", "term": 1, "acls": false, "directories": {}}',
        b'{"records": "%s", "term": 1%s, "acls": false, "directories": {}}',
    ],
    ids=["nested", "device", "large"],
)
def test_a_wrong_value_of_the_attribute_is_no_failure(
    mount: FakeMount, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    if b"%s" in value:
        value %= (bytes(mount.root / "a/1"), b"0" * 30)
    monkeypatch.setattr(copies, "_value", lambda directory: value)
    with Dataset(mount.root) as dataset:
        assert dataset.get_many(NAMES) == [mount.of_file(name) for name in NAMES]


@pytest.mark.promise(250)
@pytest.mark.parametrize("rule", ["err read EIO /", "cut 100 /"])
def test_a_file_takes_room_once_although_its_copy_cannot_be_read(
    mount: FakeMount, tmp_path: Path, rule: str
) -> None:
    whole = "direct /"
    with SlowSource(mount.tier, tmp_path / "slow") as tier:
        mount.tier = tier.path
        tier.rules(whole)
        with Dataset(mount.root) as dataset:
            memory = bytearray(3 * SIZE)
            assert dataset.get_many(NAMES, into=memory) == [mount.of_copy(name) for name in NAMES]
            tier.rules(whole, rule)
            assert dataset.get_many(NAMES, into=memory) == [mount.of_file(name) for name in NAMES]
            with pytest.raises(
                ValueError, match="3 files have 27,000 bytes, and the buffer 26,999"
            ):
                dataset.get_many(NAMES, into=bytearray(3 * SIZE - 1))


class _Signalled(Exception):
    pass


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowSource]:
    """Eight files as of a mount, which do not come before the rules are changed."""
    monkeypatch.setattr(files, "reads_ahead", lambda directory: True)
    root = tmp_path / "root"
    root.mkdir()
    for number in range(8):
        (root / f"{number}").write_bytes(b"%d" % number * SIZE)
    with SlowSource(root, tmp_path / "slow") as source:
        source.rules("hang read /")
        yield source


def _wait_until_all_are_asked_for(source: SlowSource) -> None:
    wait_until(lambda: source.counters()["hanging"] == 8, "all files are asked for")


@pytest.mark.promise(251)
def test_one_thread_asks_for_all_small_files_before_the_first_has_come(
    waiting: SlowSource,
) -> None:
    found: list[memoryview] = []

    def read() -> None:
        with Dataset(waiting.path, threads=8) as dataset:
            found.extend(dataset.get_many(f"{number}" for number in range(8)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        _wait_until_all_are_asked_for(waiting)
    finally:
        waiting.rules()
        reader.join()
    assert found == [b"%d" % number * SIZE for number in range(8)]


@pytest.mark.promise(251)
def test_no_more_files_are_asked_for_than_there_may_be_threads(waiting: SlowSource) -> None:
    def read() -> None:
        with Dataset(waiting.path, threads=5) as dataset:
            found.extend(dataset.get_many(f"{number}" for number in range(8)))

    found: list[memoryview] = []
    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: waiting.counters()["hanging"] == 5, "five files are asked for")
        # It waits for the first of them.
        assert waiting.counters()["open"] == 5
    finally:
        waiting.rules()
        reader.join()
    assert found == [b"%d" % number * SIZE for number in range(8)]


@pytest.mark.promise(250)
def test_few_free_descriptors_are_enough_for_files_that_are_asked_for_together(
    waiting: SlowSource,
) -> None:
    waiting.rules()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Dataset(waiting.path, threads=8) as dataset:
        # Before the limit: the mode of the mount is asked for once.
        assert dataset.get_many(["0"]) == [b"0" * SIZE]
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, limits[1]))
        try:
            found = dataset.get_many(f"{number}" for number in range(8))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == [b"%d" % number * SIZE for number in range(8)]


@pytest.mark.promise(250)
def test_an_exception_of_a_signal_handler_leaves_no_file_open_that_was_asked_for(
    waiting: SlowSource,
) -> None:
    def handle(number: int, frame: object) -> None:
        raise _Signalled

    def send() -> None:
        try:
            _wait_until_all_are_asked_for(waiting)
            os.kill(os.getpid(), signal.SIGUSR1)
            # The handlers of signals run in intervals of a tenth of a second.
            time.sleep(0.2)
        finally:
            waiting.rules()

    earlier = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    # An exception in a function that the collector calls is ignored.
    gc.disable()
    try:
        with Dataset(waiting.path, threads=8) as dataset:
            before = set(os.listdir("/proc/self/fd"))
            sender.start()
            with pytest.raises(_Signalled):
                dataset.get_many(f"{number}" for number in range(8))
            sender.join()
            assert set(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()
        sender.join()
        signal.signal(signal.SIGUSR1, earlier)
