"""Changes that the drain has made at the source, and that the journal does not mark: the mount is
killed between the two."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable

import pytest
import trio.testing

from monarch.posix import failpoints
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Replay
from tests.writeback.rig import Killed, Model, draining, is_killed
from tests.writeback.test_others import ALICE, MALLORY, ROOT, owned, shared, until

__all__ = ["shared"]

Clock = trio.testing.MockClock

pytestmark = [
    pytest.mark.promise(67),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user"),
]


class Killer:
    """Kills the mount of a model at the failpoint ``point``."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model = model
        self._monkeypatch = monkeypatch
        self.point = ""

    async def next_mount(self, play: Callable[[Drain], Awaitable[None]]) -> Replay:
        """Plays changes, which arm the failpoint and do not come to their end; returns what the
        next mount finds."""
        with self._monkeypatch.context() as patched:
            patched.setattr(failpoints, "failpoint", self._reached)
            try:
                async with draining(self._model, abandon=False) as drain:
                    await play(drain)
            except BaseException as error:
                if not is_killed(error):
                    raise
            else:
                pytest.fail(f"failpoint {self.point} was not reached")
        return self._model.kill()

    def _reached(self, name: str) -> None:
        if name == self.point:
            raise Killed(name)


@pytest.fixture
def killer(shared: Model, monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(shared, monkeypatch)


@pytest.mark.promise(65)
@pytest.mark.parametrize("change", ["rewritten", "appended"])
async def test_bytes_of_another_user_come_after_a_kill_where_that_user_may_make_no_file(
    shared: Model, clock: Clock, killer: Killer, change: str
) -> None:
    """The file was created on the mount. ``change``: another user has written it anew, and the
    killed mount has published these bytes; or has appended, and some of the bytes are there."""
    owned(shared, "d", 0o755)
    shared.by, shared.owner = ALICE, 1001

    async def play(drain: Drain) -> None:
        shared.create(b"d/new", mode=0o666)
        await drain.progress.wait(shared.write(b"d/new", b"of alice"))
        shared.by = MALLORY
        if change == "rewritten":
            killer.point = "drain-renamed"
            await drain.progress.wait(shared.write(b"d/new", b"of mallory"))
        killer.point = "drain-staged"
        node = shared.begin(b"d/new")
        shared.append(node, b" and of mallory")
        shared.end(node)
        await drain.progress.wait(shared.last_seq)

    replay = await killer.next_mount(play)
    # Its owner has changed it at the source meanwhile.
    (shared.source / "d/new").chmod(0o662)
    async with draining(shared, replay) as drain:
        seq = shared.write(b"d/new", b"anew") if change == "appended" else shared.last_seq
        await until(lambda: drain.progress.is_done(seq) or drain.backlog().trouble)
        assert drain.backlog().trouble is None
    found = shared.source / "d/new"
    assert found.read_bytes() == (b"anew" if change == "appended" else b"of mallory")
    assert (found.stat().st_uid, stat.S_IMODE(found.stat().st_mode)) == (1001, 0o662)


@pytest.mark.promise(88)
@pytest.mark.parametrize("journal", ["", "rewritten"])
@pytest.mark.parametrize("is_newer", [False, True])
async def test_set_id_bits_come_after_a_kill_although_the_bytes_came_without_them(
    shared: Model, clock: Clock, killer: Killer, is_newer: bool, journal: str
) -> None:
    """A file of the source gets a new name while it is written. Its newest bytes come without a
    record of their own, and so without the bits. ``is_newer``: a process writes again on the
    next mount. ``journal``: that has a new snapshot."""
    shared.by, shared.owner = ROOT, 0

    async def play(drain: Drain) -> None:
        node = shared.begin(b"a")
        shared.store(node, b"half")
        shared.content(node)
        shared.store(node, b"other")
        shared.rename(b"a", b"renamed")
        shared.chmod(b"renamed", 0o2755)
        shared.store(node, b"newer")
        await until(lambda: drain.backlog().ops == 0)
        killer.point = "drain-renamed"
        shared.store(node, b"")
        shared.content(node)
        shared.store(node, b"newest")
        node.writers = 0
        await drain.progress.wait(shared.last_seq)

    replay = await killer.next_mount(play)
    renamed = shared.source / "renamed"
    assert (renamed.read_bytes(), stat.S_IMODE(renamed.stat().st_mode)) == (b"newest", 0o755)
    if journal:
        replay = shared.look_anew()
    async with draining(shared, replay, catch_up=not is_newer) as drain:
        if is_newer:
            node = shared.begin(b"renamed")
            shared.store(node, b"newer than that")
            shared.end(node)
        await drain.progress.wait(shared.last_seq)
    assert renamed.read_bytes() == shared.tree[b"renamed"].content
    assert stat.S_IMODE(renamed.stat().st_mode) == 0o2755


@pytest.mark.promise(88, 160)
async def test_set_id_bits_that_the_owner_has_removed_after_a_kill_stay_away(
    shared: Model, clock: Clock, killer: Killer
) -> None:
    """The killed mount has published the recorded bytes with the bits."""
    owned(shared, "a", 0o755)
    shared.by, shared.owner = ROOT, 1001

    async def play(drain: Drain) -> None:
        shared.chmod(b"a", 0o2755)
        await drain.progress.wait(shared.last_seq)
        killer.point = "drain-renamed"
        await drain.progress.wait(shared.write(b"a", b"of root"))

    replay = await killer.next_mount(play)
    assert stat.S_IMODE((shared.source / "a").stat().st_mode) == 0o2755
    (shared.source / "a").chmod(0o755)
    async with draining(shared, replay) as drain:
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "a").read_bytes() == b"of root"
    assert stat.S_IMODE((shared.source / "a").stat().st_mode) == 0o755
