"""The drain between real objects and a real source that fails, hangs, is full or was changed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.posix import failpoints
from monarch.text import MiB
from monarch.writeback.journal import Op
from tests.conftest import require_root
from tests.equipment import disks
from tests.equipment.slowfs import SlowSource
from tests.mount.command import ordinary_user
from tests.writeback.remounts import Rig
from tests.writeback.rig import Killed, Model, draining, is_killed, parts, read_tree

Clock = trio.testing.MockClock


async def until(holds: Callable[[], bool], *, virtual_s: float = 300.0) -> None:
    with trio.fail_after(virtual_s):
        while not holds():
            await trio.sleep(0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A source with 2 MiB of free space."""
    require_root()
    with disks.in_memory(tmp_path / "small", 2) as path:
        yield path


# -- files and names at the source ---------------------------------------------------------------


async def test_a_file_appears_whole_with_its_mode_times_and_attributes(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.write(b"big", os.urandom(5 * MiB + 12345), synced=True)
        model.write(b"empty", b"")
        model.setxattr(b"big", b"user.kind", b"\0model")
        model.utime(b"big", 1_234_567_891_234_567_890)
        model.chmod(b"big", 0o4751)
        model.link(b"big", b"d/big")
        await drain.progress.wait(model.last_seq)
        backlog = drain.backlog()
    model.check_all_is_there()
    assert (backlog.ops, backlog.files, backlog.bytes, backlog.trouble) == (0, 0, 0, None)
    assert (backlog.drained_files, backlog.drained_bytes) == (2, 5 * MiB + 12345)
    number, identity = model.states.published_[0]
    assert (number, identity.size) == (1, 5 * MiB + 12345)


async def test_holes_stay_holes(model: Model, clock: Clock) -> None:
    node = model.create(b"sparse")
    size = 40 * MiB
    fd = model.objects.open(node.object)
    os.pwrite(fd, b"middle", 20 * MiB)
    os.ftruncate(fd, size)
    os.close(fd)
    node.content = bytes(20 * MiB) + b"middle" + bytes(20 * MiB - 6)
    model.content(node, synced=True)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    there = (model.source / "sparse").stat()
    assert (there.st_size, there.st_blocks * 512 < 2 * MiB) == (size, True)
    assert (model.source / "sparse").read_bytes() == node.content


async def test_the_next_mount_continues_where_this_one_stopped(model: Model, clock: Clock) -> None:
    async with draining(model) as drain:
        model.write(b"first", b"1")
        await drain.progress.wait(model.last_seq)
    model.write(b"second", b"22")
    async with draining(model, model.kill()) as drain:
        assert drain.backlog().files == 1
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().drained_bytes == 2
    model.check_all_is_there()
    assert not model.kill().recorded_ns


async def test_a_journal_that_was_written_anew_loses_no_change_of_a_drained_file(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        for name in (b"a", b"b", b"c"):
            model.write(name, name)
        await drain.progress.wait(model.last_seq)
    done = model.last_seq
    model.chmod(b"a", 0o640)
    model.setxattr(b"a", b"user.k", b"v")
    model.link(b"b", b"d/b")
    model.rename(b"c", b"e")
    # A new snapshot knows what the source has; then the daemon is killed again.
    undone = [(seq, op) for seq, op in model.kill().ops if seq > done]
    assert len(undone) == 4
    model.journal.compact(undone, position=model.journal.file.position)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_bytes_that_the_source_has_are_not_drained_twice(model: Model, clock: Clock) -> None:
    async with draining(model) as drain:
        node = model.begin(b"a")
        model.store(node, b"new")
        await drain.progress.wait(model.content(node, synced=True))
        there = (model.source / "a").stat()
        model.setxattr(b"a", b"user.x", b"1")
        node.is_recorded = False
        model.end(node)
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().drained_files == 1
    assert (model.source / "a").stat().st_ino == there.st_ino
    model.check_all_is_there()


async def test_a_file_that_replaces_another_takes_its_place_atomically(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = set()
    monkeypatch.setattr(
        failpoints, "failpoint", lambda name: shown.add((model.source / "a").read_bytes())
    )
    async with draining(model) as drain:
        for number in range(5):
            model.write(b"tmp", b"%d" % number * 5 * MiB, synced=True)
            model.rename(b"tmp", b"a")
        await drain.progress.wait(model.last_seq)
    assert shown <= {b"old a", *(b"%d" % number * 5 * MiB for number in range(5))}
    model.check_all_is_there()


async def test_a_file_removed_before_its_turn_is_never_drained(model: Model, clock: Clock) -> None:
    for number in range(10):
        model.write(b"tmp", b"%d" % number)
        model.unlink(b"tmp")
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().drained_files == 0
    model.check_all_is_there()


async def test_a_file_open_for_writing_waits_for_its_close(model: Model, clock: Clock) -> None:
    node = model.begin(b"a")
    model.store(node, b"whole")
    model.content(node, synced=True)
    model.store(node, b"ha")
    async with draining(model) as drain:
        drain.put(*model.recorded[0])
        drain.put(model.last_seq, Op(kind="content", path=b"a", paths=(b"a",), object=1, size=5))
        await drain.progress.wait(model.last_seq)
        assert (model.source / "a").read_bytes() == b"old a"
        model.write(b"another", b"is not held up")
        await drain.progress.wait(model.last_seq)
        model.store(node, b"half and half")
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_a_file_replaced_by_one_without_content_stays_and_is_published_under_no_other_name(
    model: Model, clock: Clock
) -> None:
    node = model.create(b"tmp")
    node.writers = 1
    model.store(node, b"half")
    replaced = model.rename(b"tmp", b"a")
    model.store(node, b"two halves")
    model.rename(b"a", b"e")
    model.store(node, b"three halves")
    async with draining(model) as drain:
        for seq, op in model.recorded:
            if seq > replaced and not drain.progress.is_done(replaced):
                await drain.progress.wait(replaced)
                assert (model.source / "a").read_bytes() == b"old a"
            drain.put(seq, op)
        await drain.progress.wait(model.last_seq)
        assert sorted(os.listdir(model.source)) == ["b", "c", "d"]
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_a_close_without_another_write_drains_the_rest(model: Model, clock: Clock) -> None:
    async with draining(model) as drain:
        node = model.begin(b"a")
        model.store(node, b"whole")
        model.content(node, synced=True)
        # Now its time is not the one that was recorded.
        model.utime(b"a", 5)
        node.lowest = 0
        await drain.progress.wait(model.last_seq)
        assert (model.source / "a").read_bytes() == b"old a"
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_a_file_that_is_written_again_is_staged_when_it_was_published(
    model: Model, clock: Clock
) -> None:
    for number in range(4):
        model.write(b"a", b"%d" % number * 6 * MiB)
        model.write(b"other", b"%d" % number * 6 * MiB)
    async with draining(model, model.kill(), workers=4) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().failures == 0
    model.check_all_is_there()


async def test_a_file_that_is_rewritten_while_it_is_copied_is_not_torn(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "failpoint", lambda name: model.look())
    model.write(b"a", b"1" * 12 * MiB)
    async with draining(model, model.kill(), bandwidth=1024) as drain:
        # Eight of it go at once, the rest an hour later.
        await until(lambda: any(part.stat().st_size == 8 * MiB for part in parts(model.source)))
        node = model.begin(b"a")
        model.store(node, b"2" * 12 * MiB)
        await trio.sleep(10_000)
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_copies_are_made_at_once_and_published_in_order(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    names = [b"%d" % number for number in range(8)]

    def reached(name: str) -> None:
        if name == "drain-renamed":
            staged.append(len(parts(model.source)))
            there = [name for name in names if (model.source / os.fsdecode(name)).exists()]
            assert there == names[: len(there)]

    monkeypatch.setattr(failpoints, "failpoint", reached)
    for name in names:
        model.write(name, name * 1000)
    async with draining(model, model.kill(), workers=4) as drain:
        await drain.progress.wait(model.last_seq)
    assert max(staged) > 1
    model.check_all_is_there()


# -- a source that does not take it ------------------------------------------------------------


async def test_a_full_source_keeps_the_order_and_is_tried_until_there_is_room(
    model: Model, small_disk: Path, clock: Clock
) -> None:
    (small_disk / "filler").write_bytes(bytes(MiB))
    (small_disk / "ckpt").write_bytes(b"old")
    model.tree[b"ckpt"] = read_tree(small_disk)[b"ckpt"]
    model.write(b"tmp", b"x" * (3 * MiB // 2), synced=True)
    model.rename(b"tmp", b"ckpt")
    model.mkdir(b"later")
    async with draining(model, model.kill(), root=small_disk) as drain:
        await until(lambda: drain.backlog().failures >= 5)
        backlog = drain.backlog()
        assert backlog.trouble is not None and "No space left on device (ENOSPC)" in backlog.trouble
        assert (backlog.ops, backlog.files) == (3, 1)
        assert sorted(os.listdir(small_disk))[-2:] == ["ckpt", "filler"]
        assert (small_disk / "ckpt").read_bytes() == b"old"
        (small_disk / "filler").unlink()
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().trouble is None
    assert (small_disk / "ckpt").stat().st_size == 3 * MiB // 2
    assert sorted(os.listdir(small_disk)) == ["ckpt", "later"]


async def test_the_pauses_double_to_a_minute_and_a_wish_ends_them(
    model: Model, slow: SlowSource, patient_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    ten, token = trio.Event(), trio.lowlevel.current_trio_token()

    def reached(name: str) -> None:
        if name == "drain-staged":
            tries.append(patient_clock.current_time())
            if len(tries) == 11:
                token.run_sync_soon(ten.set)

    monkeypatch.setattr(failpoints, "failpoint", reached)
    slow.rules("err rename EACCES .*")
    model.write(b"file", b"bytes")
    async with draining(model, model.kill(), root=slow.path) as drain:
        await ten.wait()
        pauses = [later - earlier for earlier, later in pairwise(tries[:11])]
        assert [round(pause) for pause in pauses] == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
        slow.rules()
        began = trio.current_time()
        await drain.progress.wait(model.last_seq)
        assert trio.current_time() - began < 10
    assert (model.source / "file").read_bytes() == b"bytes"


@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename", "mkdir", "unlink"])
async def test_an_error_of_any_call_is_outlived(
    model: Model, slow: SlowSource, clock: Clock, call: str
) -> None:
    model.mkdir(b"new")
    model.write(b"new/file", b"bytes")
    model.rename(b"new/file", b"a")
    model.unlink(b"d/a")
    slow.rules(f"err {call} EIO .*")
    async with draining(model, model.kill(), root=slow.path) as drain:
        await until(lambda: drain.backlog().failures >= 2)
        slow.rules()
        await drain.progress.wait(model.last_seq)
    assert (model.source / "a").read_bytes() == b"bytes"
    assert sorted(os.listdir(model.source)) == ["a", "b", "c", "d", "new"]
    assert os.listdir(model.source / "d") == os.listdir(model.source / "new") == []


async def test_bytes_that_arrive_as_others_are_found_and_never_shown(
    model: Model, slow: SlowSource, clock: Clock
) -> None:
    model.write(b"a", b"bytes")
    slow.rules("flip write .*")
    async with draining(model, model.kill(), root=slow.path) as drain:
        await until(lambda: drain.backlog().failures >= 2)
        assert (model.source / "a").read_bytes() == b"old a"
        slow.rules()
        await drain.progress.wait(model.last_seq)
    assert (model.source / "a").read_bytes() == b"bytes"


async def test_a_source_that_hangs_holds_up_neither_the_loop_nor_the_end(
    model: Model, slow: SlowSource, clock: Clock
) -> None:
    model.write(b"file", b"bytes")
    model.mkdir(b"later")
    slow.rules("hang fsync .*")
    async with draining(model, model.kill(), root=slow.path) as drain:
        with trio.move_on_after(1000):
            await drain.progress.wait(model.last_seq)
        assert drain.backlog().ops == 2 or drain.backlog().ops == 3
        assert not (model.source / "file").exists()
    slow.rules()
    async with draining(model, model.kill(), root=slow.path) as drain:
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_a_source_with_a_dead_client_is_used_again_when_it_is_mounted_again(
    model: Model, slow: SlowSource, clock: Clock
) -> None:
    async with draining(model, root=slow.path) as drain:
        model.write(b"first", b"1")
        await drain.progress.wait(model.last_seq)
        slow.kill()
        model.write(b"second", b"2")
        await until(lambda: drain.backlog().failures >= 2)
        slow.restart()
        # The descriptor of the root is tried by the machine's clock, not by the test's.
        while drain.backlog().ops:
            await trio.sleep(1)
    model.check_all_is_there()


async def test_where_a_second_name_cannot_be_a_hard_link_it_is_a_copy(
    model: Model, small_disk: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    # Another file system in the midst of the source, as an administrator may have it.
    subprocess.run(["mount", "--bind", str(small_disk), str(model.source / "d")], check=True)
    try:
        async with draining(model) as drain:
            model.write(b"one", b"bytes")
            model.link(b"one", b"d/two")
            await drain.progress.wait(model.last_seq)
            model.write(b"d/two", b"other bytes")
            model.chmod(b"one", 0o600)
            await drain.progress.wait(model.last_seq)
        assert os.listdir(small_disk) == ["two"]
        for name in ("one", "d/two"):
            assert (model.source / name).read_bytes() == b"other bytes"
    finally:
        subprocess.run(["umount", "-l", str(model.source / "d")], check=True)
    assert caplog.text.count("hard links") == 1


# -- a source that others change ---------------------------------------------------------------


async def test_a_directory_that_others_removed_is_made_again(
    model: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (model.source / "d").chmod(0o750)
    async with draining(model) as drain:
        model.mkdir(b"d/e")
        await drain.progress.wait(model.last_seq)
        shutil.rmtree(model.source / "d/e")
        model.write(b"d/e/file", b"bytes")
        await drain.progress.wait(model.last_seq)
    assert (model.source / "d/e/file").read_bytes() == b"bytes"
    assert (model.source / "d/e").stat().st_mode & 0o777 == 0o750
    assert "was removed by others" in caplog.text


async def test_files_that_others_put_into_a_directory_stay_when_it_is_removed(
    model: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (model.source / "d/theirs").write_bytes(b"theirs")
    async with draining(model) as drain:
        model.unlink(b"d/a")
        model.rmdir(b"d")
        model.write(b"later", b"bytes")
        await drain.progress.wait(model.last_seq)
    assert os.listdir(model.source / "d") == ["theirs"]
    assert "others have put something there" in caplog.text


async def test_a_link_in_the_place_of_a_directory_leads_nothing_out_of_the_source(
    model: Model, clock: Clock, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"untouched")
    shutil.rmtree(model.source / "d")
    (model.source / "d").symlink_to(outside)
    model.write(b"d/new", b"bytes")
    model.unlink(b"d/a")
    model.chmod(b"a", 0o600)
    async with draining(model, model.kill()) as drain:
        await until(lambda: drain.backlog().failures >= 2)
        assert "'d/new': Not a directory" in (drain.backlog().trouble or "")
        assert os.listdir(outside) == ["a"]
        (model.source / "d").unlink()
        await drain.progress.wait(model.last_seq)
    assert (model.source / "d/new").read_bytes() == b"bytes"


async def test_a_link_in_the_place_of_a_file_is_not_followed(
    model: Model, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_bytes(b"untouched")
    (tmp_path / "outside").chmod(0o600)
    (model.source / "a").unlink()
    (model.source / "a").symlink_to(tmp_path / "outside")
    async with draining(model) as drain:
        model.chmod(b"a", 0o777)
        model.utime(b"a", 5)
        await drain.progress.wait(model.last_seq)
        model.write(b"a", b"bytes")
        await drain.progress.wait(model.last_seq)
    assert (tmp_path / "outside").read_bytes() == b"untouched"
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o600
    # The link is not what was known as a file, even if it has got its number.
    assert (model.source / "a").readlink() == tmp_path / "outside"
    [kept] = model.source.glob("a.monarch-conflict-*")
    assert kept.read_bytes() == b"bytes"


# -- a tier that has lost something ------------------------------------------------------------


async def test_an_object_without_its_bytes_is_reported_and_later_records_are_drained(
    model: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    model.write(b"whole", b"1" * 100, synced=True)
    for name in (b"a", b"b"):
        model.write(b"tmp", b"2" * 100, synced=True)
        model.rename(b"tmp", name)
    model.write(b"behind", b"3" * 100)
    replay = model.kill()
    for name, damage in ((b"a", os.unlink), (b"b", lambda path: os.truncate(path, 50))):
        number = model.tree[name].object
        path = model.directory / f"{number & 0xFF:02x}" / str(number)
        status = path.stat()
        damage(path)  # type: ignore[operator]
        if path.exists():
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    async with draining(model, replay, catch_up=False) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().lost == (b"tmp", b"tmp")
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 and all("is lost" in record.message for record in errors)
    assert (model.source / "a").read_bytes() == b"old a"
    assert (model.source / "b").read_bytes() == b"old b"
    assert (model.source / "behind").read_bytes() == b"3" * 100
    model.journal.close()
    replay = model.open()
    assert {op.object for _, op in replay.ops} == {1, 4}


# -- power cuts of the tier ---------------------------------------------------------------------


def history(model: Model) -> None:
    """Names that come and go and come again, so that each mark that is lost could do harm."""
    model.mkdir(b"run")
    for number in range(3):
        model.write(b"run/tmp", b"checkpoint %d" % number, synced=True)
        model.rename(b"run/tmp", b"run/last")
        model.link(b"run/last", b"run/%d" % number)
    model.rename(b"run", b"kept")
    model.mkdir(b"run")
    model.write(b"run/last", b"of another run", synced=True)
    model.rename(b"a", b"d/b")
    model.rename(b"b", b"a")
    model.rename(b"d/b", b"b")
    model.unlink(b"kept/0")
    model.write(b"kept/0", b"again", synced=True)
    model.rename(b"kept/0", b"kept/00")
    model.symlink(b"kept/0", b"00")
    model.unlink(b"kept/0")
    model.mkdir(b"kept/0")
    model.rename(b"kept/0", b"kept/folder")
    model.rmdir(b"kept/folder")
    model.mknod(b"kept/folder")
    model.setxattr(b"a", b"user.x", b"1")
    model.write(b"a", b"new a", synced=True)
    model.chmod(b"a", 0o600)
    model.unlink(b"c")
    model.link(b"a", b"c")


async def drained_but_cut_off(model: Model, turn: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Drain until a step is passed for the turn-th time, then lose all marks that may be lost."""
    replay, passed = model.kill(), 0

    def reached(name: str) -> None:
        nonlocal passed
        passed += name in ("drain-published", "drain-renamed", "drain-linked", "drain-marked")
        if passed >= turn:
            raise Killed(name)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(failpoints, "failpoint", reached)
            async with draining(model, replay) as drain:
                await drain.progress.wait(model.last_seq)
    except BaseException as error:
        if not is_killed(error):
            raise
    os.truncate(model.directory / "journal", model.journal.file.synced_bytes)
    return passed >= turn


async def test_marks_that_a_power_cut_takes_at_any_moment_do_no_harm(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    turn, is_cut = 0, True
    while is_cut:
        turn += 1 if pytestconfig.getoption("--soak") else 3
        place = tmp_path / str(turn)
        (place / "source/d").mkdir(parents=True)
        (place / "tier").mkdir()
        for name in ("a", "b"):
            (place / "source" / name).write_bytes(name.encode())
        (place / "source/c").hardlink_to(place / "source/b")
        model = Model(place / "source", place / "tier")
        history(model)
        model.journal.sync()
        is_cut = await drained_but_cut_off(model, turn, monkeypatch)
        if turn % 2 == 0:
            # And once more on the way, from where that left it.
            await drained_but_cut_off(model, 7, monkeypatch)
        async with draining(model, model.kill()) as drain:
            await drain.progress.wait(model.last_seq)
        model.check_all_is_there()
        model.journal.close()
        shutil.rmtree(place)
    assert turn > 50


# -- an ordinary user, and manners ---------------------------------------------------------------

_AS_A_USER = """
import os, sys
from functools import partial
from monarch.tiers.source import Source
from monarch.types import Identity
from monarch.writeback.expected import Expected
from monarch.writeback.source_contents import Place
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.op import Op
home = SourceWriter(Source(os.fsencode(sys.argv[1])), "t")
steps = []
for number in (1, 2):
    name = b"%d" % number
    op = Op(kind="content", path=name, paths=(name,), object=number, mode=0o6755, uid=0, gid=0)
    place, expected = Place(), Expected()
    fd = home.staged.open_place(op, place, expected, make=True)
    home.staged.apply_attributes(fd, op, place, expected)
    publish = home.publishing.publish
    steps.append(partial(publish, op=op, size=0, place=place, expected=expected))
device = Op(kind="mknod", path=b"n", mode=0o20600, rdev=1)
steps.append(lambda folders: home.entries.mknod(folders, device, Expected()))
made, error = home.carry_out(steps)
assert error is None and len(made) == 3, (made, error)
"""


def test_an_ordinary_users_files_keep_their_owner_and_one_warning_is_logged() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    with ordinary_user(uuid.uuid4().hex) as user:
        source = user.mkdir("source")
        done = user.run(user.python, "-c", _AS_A_USER, str(source))
        assert done.returncode == 0, done.stderr
        for name in ("1", "2"):
            status = (source / name).stat()
            # Without the rights that were another user's.
            assert (status.st_uid, status.st_mode & 0o7777) == (65534, 0o755)
        assert sorted(os.listdir(source)) == ["1", "2"]
        assert done.stderr.count("does not take owners") == 1
        assert done.stderr.count("does not take special files") == 1


async def test_readers_of_the_source_have_priority_until_a_caller_waits_or_room_runs_out(
    model: Model, patient_clock: Clock
) -> None:
    pressed = False
    model.write(b"big", bytes(20 * MiB))
    async with draining(
        model, model.kill(), busy=lambda now: True, is_urgent=lambda waiting: pressed
    ) as drain:
        await trio.sleep(3)
        assert not (model.source / "big").exists()
        pressed = True
        began = trio.current_time()
        await until(lambda: drain.backlog().ops == 0)
        assert trio.current_time() - began < 10


async def test_the_drain_keeps_to_its_bandwidth(model: Model, patient_clock: Clock) -> None:
    model.write(b"big", bytes(range(256)) * 4096 * 28)
    async with draining(model, model.kill(), bandwidth=MiB) as drain:
        began = trio.current_time()
        await drain.progress.wait(model.last_seq)
        # 28 MiB and a look for the end, of which 8 may go at once.
        assert 20 <= trio.current_time() - began <= 26


@pytest.mark.finding("S7")
@pytest.mark.promise(158)
async def test_times_of_directories_are_those_of_the_drain_unless_they_were_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        for name in (b"plain", b"dated"):
            await session.mkdir(name)
            await session.write(name + b"/file", b"bytes")
        await session.utime(b"dated", 10**18)
        await session.front.recorder.sync()
    (rig.root / "begun").mkdir()
    begun_ns = (rig.root / "begun").stat().st_mtime_ns
    async with rig.mount() as session:
        await session.drained()
    assert (rig.source / "dated").stat().st_mtime_ns == 10**18
    assert (rig.source / "plain").stat().st_mtime_ns >= begun_ns
