"""The files of a node that is gone: when they are written, and beside which others."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
import xxhash
from trio.testing import MockClock

from monarch.config.write_patterns import WritePatterns
from monarch.daemon import recovery
from monarch.daemon.recovery import Recovery, can_be_recovered
from monarch.fuse.mountpoint import open_root
from monarch.peers.held import HeldFiles, Record
from monarch.peers.holding import Holding

TOKEN = "0123456789abcdef"
CONTENT = b"the bytes of a checkpoint"


def record_of(
    path: bytes, content: bytes = CONTENT, number: int = 7, mode: int = 0o640, version: int = 0
) -> Record:
    return Record(
        token=TOKEN,
        number=number,
        size=len(content),
        digest=xxhash.xxh3_128_hexdigest(content),
        path=path,
        mode=mode,
        uid=os.geteuid(),
        gid=os.getegid(),
        mtime_ns=1_700_000_000_000_000_000,
        version=version,
    )


class Others:
    """Other nodes that keep files of the owner: their versions of objects, by their names, but of
    none of those that they ``lack``."""

    def __init__(self, **versions: int) -> None:
        self.versions = versions
        self.lack: set[int] = set()
        self.notified: list[tuple[str, int]] = []

    async def keepers(self, token: str) -> list[str]:
        return list(self.versions)

    async def is_left_to(self, members: Sequence[str], record: Record) -> bool:
        if record.number in self.lack:
            return False
        return any(self.versions[member] > record.version for member in members)

    async def recovered(self, members: Sequence[str], record: Record) -> None:
        self.notified += [(member, record.version) for member in members]


class Rig:
    """``alive``: what the source says of the owner; None: it does not answer."""

    def __init__(self, directory: Path, *records: Record) -> None:
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir()
        self.held = HeldFiles(directory / "held", 1 << 20)
        for record in records:
            assert self.held.put(record, lambda take: take(CONTENT))
        self.alive: bool | None = False
        self.is_mounted = True
        self.clock = MockClock()
        self.others = Others()
        self.made = Recovery(
            self.held, self._root, 60.0, self._is_alive, cast(Holding, self.others)
        )
        self.asked_source = 0

    def _root(self) -> int:
        if not self.is_mounted:
            return open_root(self.mountpoint)
        return os.open(self.mountpoint, os.O_PATH | os.O_DIRECTORY)

    async def later(self, seconds: float) -> None:
        """Looks twice, as the task does again and again."""
        await self.made.look()
        self.clock.jump(seconds)
        await self.made.look()

    async def _is_alive(self, token: str) -> bool:
        assert token == TOKEN
        self.asked_source += 1
        await trio.lowlevel.checkpoint()
        if self.alive is None:
            raise OSError
        return self.alive


def play(rig: Rig, scene: Callable[[], Awaitable[None]]) -> None:
    """Plays a scene in virtual time, which only ``Rig.later`` moves."""
    trio.run(scene, clock=rig.clock)


@pytest.mark.promise(331)
def test_files_are_written_when_their_owner_is_gone_for_long_enough(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"ckpt/run/a", mode=0o4640))
    written = rig.mountpoint / "ckpt" / "run" / "a"

    async def scene() -> None:
        await rig.later(50)
        rig.alive = True
        await rig.later(50)
        rig.alive = None
        await rig.later(200)
        rig.alive = False
        await rig.later(50)
        assert not written.exists()
        await rig.later(30)
        assert written.read_bytes() == CONTENT

    play(rig, scene)
    status = written.stat()
    # A set-ID bit is not taken from another node.
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o640, 1_700_000_000_000_000_000)
    assert list(written.parent.iterdir()) == [written]
    assert (rig.held.files, rig.made.recovered) == (0, 1)


def test_another_file_of_the_name_stays(tmp_path: Path) -> None:
    long = b"n" * 255
    records = [record_of(name, number=n) for n, name in enumerate((b"a", b"b", long), start=1)]
    rig = Rig(tmp_path, *records)
    for name, content in ((b"a", b"of this node"), (b"b", CONTENT), (long, b"of this node")):
        (rig.mountpoint / os.fsdecode(name)).write_bytes(content)

    async def scene() -> None:
        await rig.later(80)

    play(rig, scene)
    found = {path.name: path.read_bytes() for path in rig.mountpoint.iterdir()}
    beside = f"{'n' * (255 - 21)}.recovered-01234567-3"
    assert found == {
        "a": b"of this node",
        "a.recovered-01234567-1": CONTENT,
        "b": CONTENT,
        "n" * 255: b"of this node",
        beside: CONTENT,
    }
    assert all(len(name) <= 255 for name in found) and not rig.held.files


def test_a_file_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"a/b", number=1), record_of(b"c", number=2))
    (rig.mountpoint / "a").write_bytes(b"no directory")

    async def scene() -> None:
        await rig.later(80)
        assert (rig.mountpoint / "c").read_bytes() == CONTENT
        assert [record.path for record in rig.held.of(TOKEN)] == [b"a/b"]
        (rig.mountpoint / "a").unlink()
        await rig.later(80)

    play(rig, scene)
    assert (rig.mountpoint / "a" / "b").read_bytes() == CONTENT
    assert rig.made.recovered == 2


@pytest.mark.promise(331)
def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "below").mkdir(parents=True)
    names = (b"link/a", b"link/below/a", b"link/new/a", b"last")
    rig = Rig(tmp_path, *(record_of(name, number=n) for n, name in enumerate(names, start=1)))
    (rig.mountpoint / "link").symlink_to(outside)
    (rig.mountpoint / "last").symlink_to(outside / "a")

    async def scene() -> None:
        await rig.later(80)

    play(rig, scene)
    assert [path.name for path in outside.rglob("*")] == ["below"]
    assert (rig.mountpoint / "last.recovered-01234567-4").read_bytes() == CONTENT
    assert (rig.held.files, rig.made.recovered) == (3, 1)


def test_a_file_of_another_user_gets_no_bytes(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"a"))
    other = rig.mountpoint / "other"
    other.write_bytes(b"of another user")
    (rig.mountpoint / ".01234567-7.recovering").hardlink_to(other)

    async def scene() -> None:
        await rig.later(80)

    play(rig, scene)
    assert set(rig.mountpoint.iterdir()) == {rig.mountpoint / "a", other}
    assert (rig.mountpoint / "a").read_bytes() == CONTENT
    assert other.read_bytes() == b"of another user"


@pytest.mark.fault("N7")
def test_the_node_with_the_latest_version_writes_a_file(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"a", version=5))
    rig.others.versions |= {"earlier": 3, "later": 6}

    async def scene() -> None:
        await rig.later(80)
        assert (rig.held.files, rig.others.notified) == (1, [])
        # The other node may need some time, and may end before it is ready.
        del rig.others.versions["later"]
        await rig.later(40)
        assert (rig.held.files, rig.others.notified) == (0, [("earlier", 5)])

    play(rig, scene)
    assert (rig.mountpoint / "a").read_bytes() == CONTENT


@pytest.mark.fault("N7")
def test_a_node_that_never_writes_its_later_versions_keeps_no_file_from_the_source(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, *(record_of(b"%d" % n, number=n, version=5) for n in range(1, 6)))
    rig.others.versions["claims"] = 6

    async def scene() -> None:
        await rig.later(80)
        # As long as it writes some of them it may take its time.
        for number in range(1, 5):
            await rig.later(recovery._LEFT_S - 100)
            rig.held.forget(TOKEN, number, 6)
            await rig.later(140)
        assert (rig.held.files, rig.made.recovered) == (1, 0)
        await rig.later(recovery._LEFT_S)
        # What it has may come from it still.
        assert (rig.held.files, rig.others.notified) == (0, [("claims", 5)])

    play(rig, scene)
    assert [path.name for path in rig.mountpoint.iterdir()] == ["5"]


@pytest.mark.fault("N7")
def test_own_files_do_not_prolong_the_time_that_is_left_to_other_nodes(
    tmp_path: Path,
) -> None:
    late = range(2, 6)
    records = [record_of(b"%d/a" % n, number=n, version=5) for n in late]
    rig = Rig(tmp_path, record_of(b"1", number=1, version=5), *records)
    rig.others.versions["claims"] = 6
    rig.others.lack.update(late)
    for number in late:
        # In the place of the directory, so the file of this node cannot be written yet.
        (rig.mountpoint / str(number)).touch()

    async def scene() -> None:
        await rig.later(80)
        for number in late:
            assert not (rig.mountpoint / "1").exists()
            (rig.mountpoint / str(number)).unlink()
            await rig.later(recovery._LEFT_S / len(late))
            assert (rig.mountpoint / str(number) / "a").read_bytes() == CONTENT
        assert (rig.mountpoint / "1").read_bytes() == CONTENT

    play(rig, scene)


@pytest.mark.promise(331)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_file_that_another_user_puts_in_the_place_is_not_taken_for_the_kept_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    rig = Rig(tmp_path, record_of(b"a"))
    if is_named:
        (rig.mountpoint / "a").write_bytes(b"of this node")
    rename = recovery.rename_new

    def exchanged(directory: int, name: bytes, to: bytes) -> None:
        staged = rig.mountpoint / os.fsdecode(name)
        staged.unlink()
        staged.write_bytes(b"of another user")
        rename(directory, name, to)

    async def scene() -> None:
        with monkeypatch.context() as change:
            change.setattr(recovery, "rename_new", exchanged)
            await rig.later(80)
            assert (rig.held.files, rig.made.recovered) == (1, 0)
        for path in rig.mountpoint.glob("*.recovered-*"):
            path.unlink()
        await rig.later(40)

    play(rig, scene)
    assert (rig.held.files, rig.made.recovered) == (0, 1)
    assert CONTENT in [path.read_bytes() for path in rig.mountpoint.iterdir()]


@pytest.mark.fault("N7")
def test_a_full_tier_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, record_of(b"a"))

    def full(content: int, fd: int, size: int) -> None:
        os.write(fd, CONTENT[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scene() -> None:
        with monkeypatch.context() as change:
            change.setattr(recovery, "copy_data", full)
            await rig.later(80)
            assert (rig.held.files, list(rig.mountpoint.iterdir())) == (1, [])
        await rig.later(40)

    play(rig, scene)
    assert "'a' of another node is not recovered yet: No space left on device" in caplog.text
    assert (rig.mountpoint / "a").read_bytes() == CONTENT


@pytest.mark.fault("N7")
def test_a_recovery_that_waits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "_LATE_S", 0.0)
    rig, ended = Rig(tmp_path, record_of(b"a")), threading.Event()
    opened = rig.held.open

    def hanging(record: Record) -> int:
        assert ended.wait(60)
        return opened(record)

    monkeypatch.setattr(rig.held, "open", hanging)

    async def scene() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.made.run)
            with trio.fail_after(10_000):
                while "which is being recovered, has waited" not in caplog.text:
                    await trio.testing.wait_all_tasks_blocked()
                    rig.clock.jump(10)
            ended.set()
            while rig.held.files:
                # The thread is not in virtual time.
                await trio.testing.wait_all_tasks_blocked(0.001)
            nursery.cancel_scope.cancel()

    play(rig, scene)
    assert (rig.mountpoint / "a").read_bytes() == CONTENT


def test_the_end_of_a_mount_asks_the_source_less_often_than_itself(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"a"))
    rig.clock.autojump_threshold = 0.0

    async def scene() -> None:
        rig.alive = True
        await rig.made.finish(60.0)

    play(rig, scene)
    assert 0 < rig.asked_source <= 31 and rig.held.files == 1


def test_a_directory_beneath_a_mount_that_is_gone_is_not_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"ckpt/a"))
    rig.is_mounted = False
    with pytest.raises(OSError) as found:
        open_root(rig.mountpoint)
    assert found.value.errno == errno.ENOTCONN

    async def scene() -> None:
        await rig.later(80)

    play(rig, scene)
    assert (rig.held.files, list(rig.mountpoint.iterdir())) == (1, [])


def test_a_file_that_cannot_be_written_leaves_nothing_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, record_of(b"a"))
    (rig.mountpoint / "a").write_bytes(b"of this node")
    # The name beside it is taken, too.
    taken = rig.mountpoint / "a.recovered-01234567-7"
    taken.write_bytes(b"of others")
    tried: list[Record] = []
    opened = rig.held.open

    def opening(record: Record) -> int:
        tried.append(record)
        return opened(record)

    monkeypatch.setattr(rig.held, "open", opening)

    async def scene() -> None:
        await rig.later(80)
        for _ in range(5):
            await rig.later(1)
        assert len(tried) == 1
        await rig.later(40)
        assert len(tried) == 2 and rig.held.files == 1
        assert taken.read_bytes() == b"of others"
        # As after an end behind the rename.
        taken.write_bytes(CONTENT)
        await rig.later(40)
        assert (len(tried), rig.held.files) == (3, 0)

    play(rig, scene)
    assert set(rig.mountpoint.iterdir()) == {rig.mountpoint / "a", taken}


def test_an_owner_is_not_gone_while_the_source_does_not_answer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"a"))

    async def scene() -> None:
        await rig.later(50)
        rig.alive = None
        await rig.later(50)
        # The owner could not renew its lease either.
        rig.alive = False
        await rig.later(50)

    play(rig, scene)
    assert rig.held.files == 1


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("**", b"a", True),
        ("ckpt/**", b"ckpt/a/b.pt", True),
        ("ckpt", b"ckpt/a", True),
        # Neither the file that is written first nor one beside another has such a name.
        ("ckpt/*.pt", b"ckpt/a.pt", False),
        ("ckpt/**", b"other/a", False),
    ],
)
def test_a_file_is_kept_only_where_it_could_be_written(
    pattern: str, path: bytes, found: bool
) -> None:
    assert can_be_recovered(record_of(path), WritePatterns([pattern]).covers) == found


def test_the_end_of_a_mount_waits_for_owners_that_live(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record_of(b"a"))

    async def scene() -> None:
        rig.alive = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.made.finish, 60.0)
            await trio.testing.wait_all_tasks_blocked()
            # The owner has drained it.
            rig.held.forget(TOKEN, 0, 0)
            rig.clock.jump(1)
        # It does not wait for one that is gone, nor for ever.
        assert rig.held.put(record_of(b"a"), lambda take: take(CONTENT))
        rig.alive = False
        await rig.made.finish(60.0)
        rig.alive = True
        await rig.made.finish(0.0)
        assert rig.held.files == 1

    play(rig, scene)
