"""The drain among several users, below the kernel: their rights, their files, and their turns."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.posix import failpoints
from monarch.posix.acl import ACCESS
from monarch.posix.credentials import USER_BITS, Credentials
from monarch.tiers.source import Source, identity_of
from monarch.writeback.drain import Drain
from monarch.writeback.expected import Expected
from monarch.writeback.journal import Op
from monarch.writeback.op import Kind
from monarch.writeback.source_contents import Place
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_writer import SourceWriter
from tests.conftest import let_others_in
from tests.users import lists
from tests.writeback.rig import Killed, Model, draining, is_killed

Clock = trio.testing.MockClock
ROOT = Credentials(0, 0)
ALICE = Credentials(1001, 1001, (2000,))
MALLORY = Credentials(1002, 1002)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@pytest.fixture
def shared(model: Model) -> Model:
    """A model whose source every user may enter and write."""
    let_others_in(model.source)
    model.source.chmod(0o1777)
    return model


async def until(holds: object, *, virtual_s: float = 300.0) -> None:
    assert callable(holds)
    with trio.fail_after(virtual_s):
        while not holds():
            await trio.sleep(0.05)


@pytest.mark.finding("D1")
async def test_a_directory_of_others_keeps_its_mode(shared: Model, clock: Clock) -> None:
    for name, owner in (("out", 0), ("own", 1001)):
        (shared.source / name).mkdir(mode=0o750)
        os.chown(shared.source / name, owner, owner)
    async with draining(shared) as drain:
        shared.by = ALICE
        shared.mkdir(b"out", 0o777)
        # Made by the same user, but not by this mount.
        shared.mkdir(b"own", 0o777)
        shared.mkdir(b"new", 0o1770)
        await drain.progress.wait(shared.last_seq)
    out, new = (shared.source / name for name in ("out", "new"))
    assert (out.stat().st_uid, stat.S_IMODE(out.stat().st_mode)) == (0, 0o750)
    assert stat.S_IMODE((shared.source / "own").stat().st_mode) == 0o750
    assert (new.stat().st_uid, stat.S_IMODE(new.stat().st_mode)) == (1001, 0o1770)


@pytest.mark.promise(67, 78)
@pytest.mark.parametrize("maker", [ROOT, ALICE])
@pytest.mark.parametrize(("kind", "type_bits"), [("mkdir", 0), ("mknod", stat.S_IFIFO)])
async def test_an_entry_that_a_killed_mount_made_gets_the_later_changes(
    shared: Model,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    type_bits: int,
    maker: Credentials,
) -> None:
    """The mount is killed after it has made the entry, and before it records that."""

    def killed(name: str) -> None:
        if name == "drain-published":
            raise Killed

    shared.by, shared.owner = maker, maker.uid
    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", killed)
        try:
            async with draining(shared) as drain:
                made = Op(kind=kind, path=b"made", ino=7, mode=0o740 | type_bits)
                await drain.progress.wait(shared.record(made))
        except BaseException as error:
            if not is_killed(error):
                raise
    assert stat.S_IMODE((shared.source / "made").stat().st_mode) == 0o740
    shared.drain, shared.by = None, ROOT
    shared.record(Op(kind="attr", path=b"made", ino=7, uid=1002, gid=1002))
    shared.record(Op(kind="attr", path=b"made", ino=7, mode=0o444))
    async with draining(shared, shared.kill()) as drain:
        await drain.progress.wait(shared.last_seq)
        assert drain.backlog().conflicts == 0
    status = (shared.source / "made").stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (1002, 0o444)


@pytest.mark.promise(176)
@pytest.mark.parametrize("recorded", [False, True])
async def test_a_file_drained_whole_after_a_rename_is_readable_for_its_owner_alone(
    shared: Model, clock: Clock, recorded: bool
) -> None:
    (shared.source / "d/a").chmod(0o600)
    os.chown(shared.source / "d/a", 1001, 1001)
    (shared.source / "m").mkdir(mode=0o700)
    os.chown(shared.source / "m", 1002, 1002)
    shared.by, shared.owner = MALLORY, 1001
    async with draining(shared) as drain:
        shared.take(b"d/a")
        renamed = shared.rename(b"d/a", b"m/a")
        if recorded:
            content = shared.whole(shared.tree[b"m/a"].object)
            assert content is not None
            shared.record(replace(content, same=True))
        (shared.source / "d/a").unlink()
        await until(lambda: "m/a" in (drain.backlog().trouble or ""))
        # The owner may not write there, and no other user is given these bytes.
        assert not drain.progress.is_done(renamed)
        assert os.listdir(shared.source / "m") == []
        (shared.source / "m").chmod(0o777)
        await drain.progress.wait(renamed)
    assert (shared.source / "m/a").read_bytes() == b"old d/a"
    assert (shared.source / "m/a").stat().st_uid == 1001


@pytest.mark.promise(65, 81)
@pytest.mark.parametrize("kind", ["new", "linked", "renamed", "replacing"])
@pytest.mark.parametrize(
    ("begun", "is_staged"),
    [(b"d/new", False), (b"d/new", True), (b"d/a", False)],
    ids=["made", "staged", "of the source"],
)
async def test_the_owner_of_a_directory_may_close_it_before_the_last_bytes_come(
    shared: Model,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    begun: bytes,
    is_staged: bool,
) -> None:
    """``is_staged``: the bytes are staged while the directory is still open."""
    for name in ("d", "d/a"):
        owned(shared, name, 0o755)
    change, staged = SourceEntries.change_attributes, threading.Event()

    def changed(*arguments: Any, op: Op, **more: Any) -> Any:
        assert not (is_staged and op.mode == 0o555) or staged.wait(60)
        return change(*arguments, op=op, **more)

    monkeypatch.setattr(SourceEntries, "change_attributes", changed)
    shared.by, shared.owner = ALICE, 1001
    async with draining(shared) as drain:
        if kind == "replacing":
            await drain.progress.wait(shared.write(b"d/old", b"old"))
        if begun not in shared.tree:
            shared.create(begun)
        node = shared.begin(begun)
        shared.store(node, b"first")
        path = {"renamed": b"d/other", "replacing": b"d/old"}.get(kind, begun)
        if kind == "linked":
            shared.link(begun, b"d/other")
        elif path != begun:
            shared.rename(begun, path)
        shared.store(node, b"written")
        shared.chmod(b"d", 0o555)
        shared.end(node)
        last = shared.chmod(b"d", 0o755)
        if is_staged:
            await until(lambda: any(entry.is_ready for entry in drain.queue.entries()))
            staged.set()
        await until(lambda: drain.progress.is_done(last) or drain.backlog().trouble)
        assert drain.backlog().trouble is None
    found = shared.source / os.fsdecode(path)
    assert found.read_bytes() == b"written" and found.stat().st_uid == 1001


@pytest.mark.promise(65, 77)
@pytest.mark.parametrize("kind", ["new", "replace"])
@pytest.mark.parametrize("uid", [1001, 1002])
def test_a_file_of_the_source_that_is_staged_in_a_closed_directory_stays_its_user_s(
    shared: Model, kind: str, uid: int
) -> None:
    (shared.source / "d/old").write_bytes(b"old")
    over = (identity_of((shared.source / "d/old").stat()),) if kind == "replace" else ()
    owned(shared, "d", 0o555)
    path = b"d/old" if kind == "replace" else b"d/new"
    op = Op(kind="content", path=path, paths=(path,), object=7, uid=uid, mode=0o4755, by=ALICE)
    place, expected = Place(), Expected(over=over, was_there=True)
    with closing(Source(os.fsencode(shared.source))) as source:
        staged = SourceWriter(source, "token").staged
        fd = staged.open_place(replace(op, strict=True), place, expected, make=False)
        try:
            staged.apply_attributes(fd, op, place, expected)
            found = os.fstat(fd)
        finally:
            os.close(fd)
    assert place.kind == kind
    # A file of another user is made as Alice could make it.
    mode = 0o4755 if uid == 1001 else 0o755
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (1001, mode)


@pytest.mark.finding("D8", "W15")
async def test_a_file_that_changed_at_the_source_is_kept(shared: Model, clock: Clock) -> None:
    async with draining(shared) as drain:
        shared.begin(b"a")
        (shared.source / "a").write_bytes(b"theirs")
        shared.write(b"a", b"ours")
        await drain.progress.wait(shared.last_seq)
        backlog = drain.backlog()
    assert (shared.source / "a").read_bytes() == b"theirs"
    [kept] = shared.source.glob("a.monarch-conflict-*")
    assert kept.read_bytes() == b"ours"
    assert backlog.conflicts == 1 and backlog.conflict is not None
    assert os.fsencode(kept.name) == backlog.conflict.kept


@pytest.mark.promise(79)
@pytest.mark.parametrize("is_ours", [True, False])
async def test_the_same_bytes_are_kept_beside_a_changed_file_once(
    shared: Model, clock: Clock, is_ours: bool
) -> None:
    async with draining(shared) as drain:
        shared.begin(b"a")
        (shared.source / "a").write_bytes(b"theirs")
        shared.write(b"a", b"ours")
        await drain.progress.wait(shared.last_seq)
        [kept] = shared.source.glob("a.monarch-conflict-*")
        if not is_ours:
            # Another user has put the same bytes there, and may remove them.
            os.chown(kept, 1002, 1002)
        (shared.source / "a").write_bytes(b"theirs again")
        shared.write(b"a", b"ours")
        await drain.progress.wait(shared.last_seq)
        assert drain.backlog().conflicts == (1 if is_ours else 2)
    copies = list(shared.source.glob("a.monarch-conflict-*"))
    assert [copy.read_bytes() for copy in copies] == (1 if is_ours else 2) * [b"ours"]
    assert kept in copies and (shared.source / "a").read_bytes() == b"theirs again"


@pytest.mark.promise(79)
@pytest.mark.fault("U3")
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(
    ("change", "left"),
    [({"mode": 0o600}, 0o600), ({"gid": 2001}, 0o604), ({"mode": 0o666}, 0o644)],
    ids=["closed", "of another group", "opened"],
)
async def test_a_file_that_is_kept_beside_has_no_right_that_was_taken_away_since(
    shared: Model,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    is_staged: bool,
    change: dict[str, Any],
    left: int,
) -> None:
    """Its attributes were changed on the mount after its bytes were recorded, or even staged."""
    mkdir, may_go_on = SourceEntries.mkdir, threading.Event()

    def made(*arguments: Any, **more: Any) -> Any:
        assert may_go_on.wait(60)
        return mkdir(*arguments, **more)

    monkeypatch.setattr(SourceEntries, "mkdir", made)
    shared.by, shared.owner = ALICE, 1001
    async with draining(shared) as drain:
        shared.mkdir(b"first")
        shared.write(b"new", b"ours")
        (shared.source / "new").write_bytes(b"theirs")
        if is_staged:
            await until(lambda: any(entry.is_ready for entry in drain.queue.entries()))
        number = shared.tree[b"new"].object
        shared.record(Op(kind="attr", path=b"new", object=number, **change))
        may_go_on.set()
        await drain.progress.wait(shared.last_seq)
    [kept] = shared.source.glob("new.monarch-conflict-*")
    assert kept.read_bytes() == b"ours"
    status = kept.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (1001, left)
    theirs = (shared.source / "new").stat()
    assert (theirs.st_uid, stat.S_IMODE(theirs.st_mode)) == (0, 0o644)


@pytest.mark.promise(79)
@pytest.mark.fault("U3")
@pytest.mark.parametrize("has_list", [False, True])
def test_a_file_that_is_kept_beside_opens_nothing_to_the_group_of_its_writer(
    shared: Model, has_list: bool
) -> None:
    """The writer is in none of the groups that may read the file, and cannot give it to one."""
    given = {ACCESS: lists.packed(6, 6, 6, 0, {1002: 6}, {})} if has_list else {}
    mode = 0o660 if has_list else 0o664
    op = Op(kind="content", path=b"a", paths=(b"a",), object=7, strict=True, by=MALLORY)
    op = replace(op, uid=1001, gid=2000, mode=mode, xattrs=given)
    place, expected = Place(), Expected(was_there=True)
    with closing(Source(os.fsencode(shared.source))) as source:
        staged = SourceWriter(source, "token").staged
        fd = staged.open_place(op, place, expected, make=False)
        try:
            staged.apply_attributes(fd, op, place, expected)
            found, names = os.fstat(fd), os.listxattr(fd)
            access = os.getxattr(fd, ACCESS) if ACCESS.decode() in names else b""
        finally:
            os.close(fd)
    assert place.kind == "conflict"
    assert (found.st_uid, found.st_gid) == (1002, 1002)
    assert stat.S_IMODE(found.st_mode) == (0o660 if has_list else 0o644)
    assert access == (lists.packed(6, 0, 6, 0, {1002: 6}, {}) if has_list else b"")


@pytest.mark.promise(80)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_user_who_may_not_read_what_the_user_writes_keeps_its_list(
    shared: Model, is_first: bool
) -> None:
    """The daemon is that user's. An attribute that it may not read is before the list, or behind
    it."""
    path, given = shared.source / "a", lists.packed(6, 0, 6, 0, {1002: 2}, {})
    os.chown(path, 1001, 2000)
    attributes = [("user.unread", b"1"), (ACCESS.decode(), given)]
    for name, value in attributes if is_first else attributes[::-1]:
        os.setxattr(path, name, value)
    op = Op(kind="content", path=b"a", paths=(b"a",), object=7, strict=True, by=MALLORY)
    op = replace(op, uid=1001, gid=2000, mode=0o660)
    expected = Expected(known=identity_of(path.stat()), is_file=True)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(1002)
            os.setuid(1002)
            with closing(Source(os.fsencode(shared.source))) as source:
                staged, place = SourceWriter(source, "token").staged, Place()
                staged.apply_attributes(
                    staged.open_place(op, place, expected, make=False), op, place, expected
                )
            code = 0 if place.kind == "over" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    [part] = shared.source.glob(".monarch-*.part")
    assert (part.stat().st_uid, stat.S_IMODE(part.stat().st_mode)) == (1002, 0o660)
    assert os.getxattr(part, ACCESS) == given


@pytest.mark.promise(331)
@pytest.mark.parametrize(
    ("differs", "attributes"),
    [
        (differs, attributes)
        for differs in ("nothing", "bytes", "time", "mode", "owner", "attributes", "kind")
        for attributes in ({}, {b"user.list": b"1"})
        if attributes or differs != "attributes"
    ],
)
async def test_a_file_that_another_node_has_recovered_is_no_conflict(
    shared: Model, clock: Clock, differs: str, attributes: dict[bytes, bytes]
) -> None:
    shared.create(b"new").xattrs.update(attributes)
    shared.write(b"new", b"ours")
    path, replay = shared.source / "new", shared.kill()
    node = shared.tree[b"new"]
    if differs == "kind":
        path.symlink_to("b")
    else:
        path.write_bytes(b"hers" if differs == "bytes" else b"ours")
        path.chmod(0o751 if differs == "mode" else node.mode & 0o777)
        os.chown(path, 1003 if differs == "owner" else -1, -1)
        for name, value in attributes.items():
            os.setxattr(path, name, value + b"2" * (differs == "attributes"))
    # An earlier time could be the same one as a file system with other units keeps it.
    changed_ns = node.mtime_ns + (1 if differs == "time" else 0)
    os.utime(path, ns=(changed_ns, changed_ns), follow_symlinks=False)
    before = path.lstat().st_ino
    async with draining(shared, replay) as drain:
        await drain.progress.settle()
        assert drain.backlog().conflicts == (differs != "nothing")
    kept = [each.read_bytes() for each in shared.source.glob("new.monarch-conflict-*")]
    assert kept == ([] if differs == "nothing" else [b"ours"])
    assert path.lstat().st_ino == before
    assert not list(shared.source.glob(".*part*"))


@pytest.mark.finding("D9")
async def test_a_refused_change_lets_other_users_pass_and_keeps_the_order_of_its_own(
    shared: Model, clock: Clock
) -> None:
    (shared.source / "x").write_bytes(b"blocks")
    async with draining(shared) as drain:
        shared.by = MALLORY
        first = shared.mkdir(b"x")
        second = shared.write(b"mallory", b"1")
        shared.by = ALICE
        third = shared.write(b"alice", b"2")
        beneath = shared.write(b"x/alice", b"3")
        await drain.progress.wait(third)
        assert not (
            drain.progress.is_done(first)
            or drain.progress.is_done(second)
            or drain.progress.is_done(beneath)
        )
        assert drain.progress.has_all(first - 1) and not drain.progress.has_all(third)
        assert "mkdir 'x'" in (drain.backlog().trouble or "")
        assert (shared.source / "alice").read_bytes() == b"2"
        assert (shared.source / "alice").stat().st_uid == 1001
        assert not (shared.source / "mallory").exists()
    # The next mount knows the done changes and continues with the rest.
    replay = shared.kill()
    assert third in replay.done and first not in replay.done
    async with draining(shared, replay) as drain:
        await until(lambda: drain.backlog().failures >= 2)
        (shared.source / "x").unlink()
        (shared.source / "x").mkdir(mode=0o777)
        (shared.source / "x").chmod(0o777)
        await drain.progress.settle()
        assert drain.backlog().trouble is None
    assert (shared.source / "mallory").stat().st_uid == 1002
    assert (shared.source / "x/alice").read_bytes() == b"3"


@pytest.mark.promise(153)
async def test_a_caller_waiting_for_the_source_does_not_wait_for_refused_changes_of_others(
    shared: Model, clock: Clock
) -> None:
    (shared.source / "x").write_bytes(b"blocks")
    (shared.source / "d").chmod(0o777)

    async def waits(path: bytes, object: int, user: Credentials | None, *, steps: int = 50) -> bool:
        bits = None if user is None else user.uid & USER_BITS
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(drain.progress.wait_for, path, object=object, user=bits))
            # In steps: a thread that is at work is no reason for the clock to jump further.
            for _ in range(steps):
                if not nursery.child_tasks:
                    return False
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        return True

    async with draining(shared) as drain:
        shared.by = MALLORY
        shared.mkdir(b"x")
        shared.write(b"d/mallory", b"1")
        refused = shared.tree[b"d/mallory"].object
        shared.by = ALICE
        shared.write(b"d/tmp", b"2")
        shared.rename(b"d/tmp", b"d/alice")
        assert not await waits(b"d", 0, ALICE, steps=2000)
        assert (shared.source / "d/alice").read_bytes() == b"2"
        # The caller has a refused change, the file has one, or the caller is unknown.
        assert await waits(b"d", 0, MALLORY)
        assert await waits(b"d/mallory", refused, ALICE)
        assert await waits(b"d", 0, None) and await waits(b"", 0, None)
        assert not await waits(b"d/alice", 0, None, steps=2000)
        (shared.source / "x").unlink()
        await drain.progress.settle()


@pytest.mark.finding("D1")
async def test_a_journal_without_users_acts_as_the_owner(shared: Model, clock: Clock) -> None:
    (shared.source / "old").mkdir()
    os.chown(shared.source / "old", 1001, 1001)
    (shared.source / "old/his").write_bytes(b"")
    (shared.source / "closed").mkdir(mode=0o700)
    for op in (
        Op(kind="mkdir", path=b"old/new", mode=0o755, uid=1001, gid=1001),
        Op(kind="unlink", path=b"old/his"),
        Op(kind="mkdir", path=b"closed/new", mode=0o755, uid=1002, gid=1002),
    ):
        shared.journal.append(op)
    async with draining(shared, shared.kill()) as drain:
        await until(lambda: drain.backlog().failures >= 1)
        assert "closed/new" in (drain.backlog().trouble or "")
    assert (shared.source / "old/new").stat().st_uid == 1001
    assert os.listdir(shared.source / "old") == ["new"]


@pytest.mark.finding("D1")
async def test_a_file_that_was_copied_up_and_not_written_is_not_drained_again(
    shared: Model, clock: Clock, tmp_path: Path
) -> None:
    # As a chmod of one's own file that is read-only does: the owner need not be able to write it.
    (shared.source / "a").chmod(0o444)
    before = (shared.source / "a").stat().st_ino
    async with draining(shared) as drain:
        shared.take(b"a")
        node = shared.tree[b"a"]
        shared.record(
            Op(
                kind="content",
                path=b"a",
                paths=(b"a",),
                object=node.object,
                size=len(node.content),
                same=True,
                by=MALLORY,
            )
        )
        await drain.progress.wait(shared.last_seq)
        assert drain.backlog().failures == 0
    assert (shared.source / "a").stat().st_ino == before
    assert shared.states.published_[-1][1].source_ino == before


@pytest.mark.finding("D1")
async def test_a_write_by_another_user_clears_the_set_id_bits_of_a_program(
    shared: Model, clock: Clock
) -> None:
    async with draining(shared) as drain:
        shared.by = ALICE
        # The bytes are newer than the record with the special rights when this is carried out.
        shared.write(b"there", b"alice's")
        shared.chmod(b"there", 0o4777)
        await drain.progress.wait(shared.last_seq)
        assert stat.S_IMODE((shared.source / "there").stat().st_mode) == 0o4777
        shared.write(b"new", b"alice's")
        shared.chmod(b"new", 0o4777)
        for name in (b"new", b"there"):
            shared.by = MALLORY
            node = shared.begin(name)
            shared.store(node, b"mallory's")
            # The kernel does that for the writer, and the mount records it as the owner's.
            shared.by = ALICE
            shared.chmod(name, 0o777)
            shared.by = MALLORY
            shared.end(node)
        await drain.progress.wait(shared.last_seq)
        await drain.progress.settle()
    for file in (shared.source / "new", shared.source / "there"):
        assert file.read_bytes() == b"mallory's"
        assert stat.S_IMODE(file.stat().st_mode) == 0o777
        assert file.stat().st_uid == 1001


@pytest.mark.promise(77)
async def test_a_new_file_that_root_gave_away_is_staged_as_such(
    shared: Model, clock: Clock
) -> None:
    shared.by, shared.owner = ALICE, 1002
    async with draining(shared) as drain:
        # Its bytes are staged before it is the turn of its making.
        shared.write(b"given", b"to another")
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "given").stat().st_uid == 1002


async def replaced(model: Model, drain: Drain, content: bytes) -> None:
    """A file that is renamed over another while it is written comes under its new name."""
    model.create(b"beside")
    node = model.begin(b"beside")
    model.rename(b"beside", b"a")
    model.store(node, content)
    await drain.progress.wait(model.last_seq)
    model.end(node)


@pytest.mark.promise(66)
@pytest.mark.parametrize(("user", "bits"), [(ROOT, 0o1777), (ALICE, 0o777), (ALICE, 0o1777)])
async def test_a_file_replaced_by_one_of_another_user_is_never_missing(
    shared: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, user: Credentials, bits: int
) -> None:
    shared.source.chmod(bits)
    for name in ("a", "d/a"):
        os.chown(shared.source / name, 1001, 1001)
    looks = 0

    def looking(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: Any, **kwargs: Any) -> None:
            nonlocal looks
            change(*args, **kwargs)
            (shared.source / "a").stat()
            looks += 1

        return changed

    for change in ("unlink", "rename", "link"):
        monkeypatch.setattr(os, change, looking(getattr(os, change)))
    shared.by, shared.owner = user, 1002
    async with draining(shared) as drain:
        for turn in range(20):
            await replaced(shared, drain, b"%d" % turn)
            await drain.progress.wait(shared.last_seq)
            found = (shared.source / "a").stat()
            assert found.st_uid == 1002
            # So that in a directory with the sticky bit their users may replace it again.
            os.chown(shared.source / "a", 1001, 1001)
        assert drain.backlog().failures == drain.backlog().conflicts == 0
    assert looks >= 20
    assert (shared.source / "a").read_bytes() == b"19"
    assert not list(shared.source.rglob(".monarch-*"))


@pytest.mark.fault("U7")
@pytest.mark.promise(88)
@pytest.mark.finding("D1")
async def test_bytes_of_another_user_are_never_there_with_the_set_id_bit_of_the_owner(
    shared: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def looking(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: Any, **kwargs: Any) -> None:
            change(*args, **kwargs)
            with suppress(FileNotFoundError):
                mode = (shared.source / "program").stat().st_mode
                seen.add(((shared.source / "program").read_bytes(), mode & stat.S_ISUID))

        return changed

    for change in ("chmod", "fchmod", "rename", "link"):
        monkeypatch.setattr(os, change, looking(getattr(os, change)))
    async with draining(shared) as drain:
        shared.by = ALICE
        shared.write(b"program", b"of alice")
        shared.chmod(b"program", 0o4777)
        # The kernel takes the bit, as the owner could, at the first write of another user.
        shared.chmod(b"program", 0o777)
        shared.by = MALLORY
        shared.write(b"program", b"of mallory")
        await until(lambda: drain.backlog().ops == 0)
    assert (b"of mallory", 0) in seen
    assert (b"of mallory", stat.S_ISUID) not in seen


async def test_a_file_that_the_user_may_not_remove_is_not_replaced(
    shared: Model, clock: Clock
) -> None:
    shared.by, shared.owner = ALICE, 1002
    async with draining(shared) as drain:
        await replaced(shared, drain, b"new")
        await until(lambda: drain.backlog().failures >= 1)
    assert (shared.source / "a").read_bytes() == b"old a"
    assert not list(shared.source.rglob(".monarch-*.link"))


@pytest.mark.finding("D9")
async def test_the_file_that_a_refused_rename_replaces_is_known_until_the_rename_is_done(
    shared: Model, clock: Clock
) -> None:
    async with draining(shared) as drain:
        shared.write(b"replaced", b"old")
        shared.write(b"mine", b"new", synced=True)
        await drain.progress.wait(shared.last_seq)
        os.chown(shared.source / "mine", 1002, 1002)
        shared.by = MALLORY
        # The sticky bit keeps the file of root in its place, until its user may do that.
        refused = shared.rename(b"mine", b"replaced")
        shared.by = ALICE
        await drain.progress.wait(shared.write(b"other", b"of another"))
        assert not drain.progress.is_done(refused)
        shared.source.chmod(0o777)
        await drain.progress.settle()
        assert drain.backlog().conflicts == 0
    assert (shared.source / "replaced").read_bytes() == b"new"


def owned(model: Model, name: str, mode: int) -> None:
    """Give what is at the source to Alice."""
    os.chown(model.source / name, 1001, 1001, follow_symlinks=False)
    if not (model.source / name).is_symlink():
        (model.source / name).chmod(mode)


@pytest.mark.fault("U7")
@pytest.mark.promise(159)
@pytest.mark.parametrize("end", ["none", "killed", "compacted"])
async def test_a_file_of_others_under_the_name_of_a_new_file_is_not_changed(
    shared: Model, clock: Clock, end: str
) -> None:
    for name in ("file", "removed"):
        (shared.source / name).write_bytes(b"of alice")
    for name in ("pipe", "removed-pipe"):
        os.mkfifo(shared.source / name)
    (shared.source / "link").symlink_to("a")
    names = ("file", "removed", "link", "pipe", "removed-pipe")
    for name in names:
        owned(shared, name, 0o600)

    def as_root() -> None:
        shared.by = ROOT
        for name in (b"file", b"link"):
            node = shared.tree[name]
            shared.record(Op(kind="attr", path=name, ino=node.ino, uid=1002, gid=1002))
        shared.chmod(b"pipe", 0o666)
        shared.unlink(b"removed")
        shared.unlink(b"removed-pipe")

    async with draining(shared) as drain:
        shared.by = MALLORY
        for name in (b"file", b"removed", b"link"):
            shared.symlink(name, b"a")
        for name in (b"pipe", b"removed-pipe"):
            shared.mknod(name)
        await drain.progress.wait(shared.last_seq)
        if end == "none":
            as_root()
            await drain.progress.wait(shared.last_seq)
    if end != "none":
        shared.drain = None
        as_root()
        replay = shared.kill() if end == "killed" else shared.look_anew()
        async with draining(shared, replay) as drain:
            await drain.progress.settle()
    found = {name: os.lstat(shared.source / name) for name in names}
    assert {status.st_uid for status in found.values()} == {1001}
    assert stat.S_IMODE(found["pipe"].st_mode) == 0o600
    assert os.readlink(next(shared.source.glob("file.monarch-conflict-*"))) == "a"


@pytest.mark.fault("U7")
@pytest.mark.promise(159)
@pytest.mark.parametrize("end", ["none", "killed", "compacted"])
async def test_root_gives_no_right_in_the_directory_of_another_that_is_shared(
    shared: Model, clock: Clock, end: str
) -> None:
    for name in ("mode", "list", "moved"):
        (shared.source / name).mkdir()
        owned(shared, name, 0o700)

    def as_root() -> None:
        shared.by = ROOT
        shared.chmod(b"mode", 0o777)
        ino = shared.tree[b"list"].ino
        shared.record(Op(kind="xattr", path=b"list", ino=ino, xattrs={b"user.list": b"all"}))
        shared.record(Op(kind="attr", path=b"list", ino=ino, uid=1002, gid=1002))

    async with draining(shared) as drain:
        shared.by = MALLORY
        for name in (b"mode", b"list", b"moved"):
            shared.mkdir(name, 0o755)
        await drain.progress.wait(shared.last_seq)
        shared.by = ROOT
        shared.rename(b"moved", b"there")
        shared.chmod(b"there", 0o777)
        await drain.progress.wait(shared.last_seq)
        if end == "none":
            as_root()
            await drain.progress.wait(shared.last_seq)
    if end != "none":
        shared.drain = None
        as_root()
        replay = shared.kill() if end == "killed" else shared.look_anew()
        async with draining(shared, replay) as drain:
            await drain.progress.settle()
    for name in ("mode", "list", "there"):
        status = (shared.source / name).stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (1001, 0o700), name
        assert os.listxattr(shared.source / name) == []


@pytest.mark.fault("U7")
@pytest.mark.promise(160)
async def test_bytes_of_root_do_not_restore_a_program_that_its_owner_removed(
    shared: Model, clock: Clock
) -> None:
    async with draining(shared) as drain:
        shared.by, shared.owner = ALICE, 1001
        for name in (b"there", b"removed", b"replaced", b"left-out"):
            shared.write(name, b"of alice")
            shared.chmod(name, 0o4755)
        await drain.progress.wait(shared.last_seq)
        for name in (b"a", b"d/a"):
            owned(shared, os.fsdecode(name), 0o4755)
            shared.tree[name].mode = 0o4755
        for name in ("replaced", "d/a"):
            (shared.source / "another").write_bytes(b"of others")
            (shared.source / "another").rename(shared.source / name)
        for name in ("removed", "a"):
            (shared.source / name).unlink()
        shared.by = ROOT
        for name in (b"there", b"removed", b"replaced", b"a", b"d/a"):
            node = shared.begin(name)
            shared.store(node, b"of")
            shared.content(node)
            shared.store(node, b"of root")
            shared.setxattr(name, b"user.kind", b"program")
            shared.end(node)
        await drain.progress.wait(shared.last_seq)
        # What the mount has renamed behind a content that was left out is not missed there.
        node = shared.begin(b"left-out")
        shared.store(node, b"a half")
        shared.content(node)
        shared.rename(b"left-out", b"renamed")
        shared.store(node, b"of root")
        await drain.progress.wait(shared.last_seq)
        shared.end(node)
        await drain.progress.wait(shared.last_seq)
    kept = list(shared.source.rglob("*.monarch-conflict-*"))
    # One for each file: of the waiting contents of each, the last one is drained.
    assert len(kept) == 2
    for path in (shared.source / "removed", shared.source / "a", *kept):
        status = path.stat()
        assert path.read_bytes() == b"of root"
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (1001, 0o755)
    for name in ("there", "renamed"):
        assert stat.S_IMODE((shared.source / name).stat().st_mode) == 0o4755, name


@pytest.mark.fault("U7")
@pytest.mark.promise(160)
async def test_a_program_that_its_owner_removed_is_staged_in_advance_without_set_id_bits(
    shared: Model, clock: Clock
) -> None:
    shared.by, shared.owner = ROOT, 1001
    names = (b"a", b"d/a")
    for name in names:
        owned(shared, os.fsdecode(name), 0o4755)
        shared.tree[name].mode = 0o4755
        (shared.source / os.fsdecode(name)).unlink()
    async with draining(shared) as drain:
        # While these are brought the bytes of the programs behind them are staged.
        for number in range(300):
            shared.write(b"before-%d" % number, b"x")
        for name in names:
            shared.write(name, b"of root")
        await drain.progress.wait(shared.last_seq)
    for name in names:
        status = (shared.source / os.fsdecode(name)).stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (1001, 0o755)


@pytest.mark.finding("S5")
@pytest.mark.promise(157)
async def test_attributes_that_the_source_refuses_are_reported_until_it_has_all(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    setxattr = os.setxattr

    def small(path: bytes, name: bytes, value: bytes) -> None:
        if len(value) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        setxattr(path, name, value)

    monkeypatch.setattr(os, "setxattr", small)
    async with draining(model) as drain:
        model.write(b"new", b"1")
        model.setxattr(b"new", b"user.large", b"x" * 4000)
        model.setxattr(b"new", b"user.small", b"x")
        model.content(model.tree[b"new"])
        await drain.progress.wait(model.last_seq)
        expected = {(b"new", b"user.large"): "Argument list too long (E2BIG)"}
        assert drain.writer.log.dropped_xattrs == expected
        assert os.getxattr(model.source / "new", "user.small") == b"x"
        model.setxattr(b"new", b"user.large", None)
        model.content(model.tree[b"new"])
        await drain.progress.wait(model.last_seq)
        assert not drain.writer.log.dropped_xattrs
        model.setxattr(b"new", b"user.large", b"x" * 4000)
        await drain.progress.wait(model.last_seq)
        assert drain.writer.log.dropped_xattrs == expected
        model.unlink(b"new")
        await drain.progress.wait(model.last_seq)
        assert not drain.writer.log.dropped_xattrs


async def test_the_attributes_of_a_file_that_its_user_may_not_write_come_with_its_bytes(
    shared: Model, clock: Clock
) -> None:
    shared.by = ALICE
    shared.owner = ALICE.uid
    async with draining(shared) as drain:
        shared.create(b"x", mode=0o400)
        shared.tree[b"x"].xattrs[b"user.n"] = b"value"
        shared.write(b"x", b"closed")
        await drain.progress.wait(shared.last_seq)
    there = shared.source / "x"
    assert there.stat().st_mode & 0o777 == 0o400
    assert os.getxattr(there, "user.n") == b"value"


@pytest.mark.promise(77)
async def test_the_file_of_another_user_is_linked_where_its_owner_alone_may_rename(
    shared: Model, clock: Clock
) -> None:
    os.chown(shared.source / "a", 1001, 1001)
    (shared.source / "a").chmod(0o666)
    shared.by = MALLORY
    async with draining(shared) as drain:
        shared.link(b"a", b"linked")
        await until(lambda: drain.backlog().ops == 0)
        assert drain.backlog().failures == 0
    assert (shared.source / "a").samefile(shared.source / "linked")
    assert not list(shared.source.glob(".monarch-*.link"))
