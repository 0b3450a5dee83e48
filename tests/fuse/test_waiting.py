"""Many requests wait for a source that hangs: they delay no other request, and can be ended.

The source is a file system in user space whose calls hang until a rule is taken away.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from monarch.config.settings import LimitSettings
from monarch.types import Ino
from monarch.vfs.interfaces import RELEASED
from tests.conftest import Tree
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import readable
from tests.fuse import wire
from tests.fuse.rig import PATIENCE_S, NoMessage, Rig, eventually, kill, rig
from tests.fuse.wire import Op

# More than the threads that the datapath may have.
MANY = 600
SMALL, LARGE = 1000, 3_000_000
# Callers that are checked at once, once a second.
LOOK = 256
# Calls of the source at once, as configured.
SLOTS = LimitSettings().source_concurrency


@contextmanager
def over(slow: SlowSource, directory: Path, **options: bool) -> Iterator[Rig]:
    with rig(slow.path, directory, fetch_max=SMALL, **options) as made:
        made.init(wire.INIT_NO_OPEN_SUPPORT if options.get("no_open") else 0)
        yield made


@pytest.fixture
def made(slow: SlowSource, tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    """``resident`` has a copy; ``small`` is fetched by the datapath, ``large`` is Python's."""
    tree({"resident": SMALL, "small": SMALL, "large": LARGE, **{f"s{n}": SMALL for n in range(40)}})
    with over(slow, tmp_path) as it:
        it.place("resident")
        yield it


def hand_over(made: Rig, name: str) -> tuple[int, int]:
    """Open a file that is not resident as Python does, bound to the source: inode and handle."""
    ino = made.ino(name)
    unique = made.send_open(ino)
    passed = made.passed()
    fd = os.open(made.source / name, os.O_RDONLY)
    assert made.datapath.bind(ino, fd, tier=0, size=LARGE)
    made.reply_open(passed)
    handle, _, _ = wire.OPEN_OUT.unpack(made.answer(unique).body)
    os.close(fd)
    return ino, handle


def others_are_served(made: Rig) -> None:
    """A resident file is opened and read, names are answered, and Python answers a request."""
    ino = made.ino("resident")
    handle, _, _ = made.open(ino)
    assert made.read(ino, handle, 0, SMALL).body == made.content("resident")
    assert made.release(ino, handle).error == 0
    assert made.lookup(1, b"resident").error == 0
    unique = made.send(Op.STATFS, 1)
    made.reply(made.passed())
    assert made.answer(unique).error == 0


def threads_are_few(made: Rig) -> None:
    assert made.datapath.state().threads <= 32 + SLOTS


@pytest.mark.finding("D3")
@pytest.mark.promise(89)
@pytest.mark.fault("M10")
@pytest.mark.parametrize("reports_opens", [True, False], ids=["open", "no_open"])
def test_any_number_may_wait_for_one_small_file(
    slow: SlowSource, tree: Tree, tmp_path: Path, reports_opens: bool
) -> None:
    tree({"resident": SMALL, "small": SMALL})
    with over(slow, tmp_path, no_open=not reports_opens) as made:
        made.place("resident")
        ino = made.ino("small")
        slow.rules("hang open ^/small")
        if reports_opens:
            waiting = [made.send_open(ino) for _ in range(MANY)]
        else:
            waiting = [made.send_read(ino, 0, 0, SMALL) for _ in range(MANY)]
        eventually(lambda: made.datapath.state().waiting == MANY, "all of them wait")
        if reports_opens:
            others_are_served(made)
        else:
            resident = made.read(made.ino("resident"), 0, 0, SMALL)
            assert resident.body == made.content("resident")
        threads_are_few(made)
        state = made.datapath.state()
        assert state.oldest_wait_s > 0 and state.oldest_request_s >= state.oldest_wait_s
        slow.rules()
        answers = [made.answer(unique) for unique in waiting]
        assert {found.error for found in answers} == {0}
        if not reports_opens:
            assert {found.body for found in answers} == {made.content("small")}
        assert made.datapath.source_traffic().opens == 1
        assert made.datapath.state().waiting == 0
        made.datapath.served()
        made.datapath.taken(ino)
        if reports_opens:
            handle, _, _ = wire.OPEN_OUT.unpack(answers[0].body)
            for _ in waiting:
                made.release(ino, handle)
        assert made.datapath.open_files() == 0
        eventually(lambda: made.datapath.state().oldest_request_s == 0, "nothing is unanswered")


@pytest.mark.finding("D3")
@pytest.mark.promise(89)
@pytest.mark.fault("M10")
def test_any_number_may_read_large_files_of_the_source(made: Rig, slow: SlowSource) -> None:
    ino, handle = hand_over(made, "large")
    slow.rules("hang read ^/large")
    waiting = {made.send_read(ino, handle, n * 4096, 4096): n * 4096 for n in range(MANY)}
    eventually(lambda: made.datapath.state().waiting == MANY, "all of them wait")
    others_are_served(made)
    threads_are_few(made)
    assert made.datapath.source_traffic().waiting == MANY
    slow.rules()
    content = made.content("large")
    for unique, offset in waiting.items():
        assert made.answer(unique).body == content[offset : offset + 4096]
    assert made.datapath.source_traffic().reads == MANY
    assert made.datapath.source_traffic().waiting == 0
    made.send_release(ino, handle)
    made.passed()


@pytest.mark.finding("D3")
@pytest.mark.promise(89)
def test_only_so_many_that_need_the_source_are_with_python(made: Rig, slow: SlowSource) -> None:
    ino = made.ino("large")
    waiting = [made.send_open(ino) for _ in range(MANY)]
    passed = [made.passed() for _ in range(256)]
    assert made.is_quiet()
    others_are_served(made)
    # Each that is answered makes room for another, until all are answered.
    for count, one in enumerate(passed):
        made.reply_open(one)
        if count + 256 < MANY:
            passed.append(made.passed())
    assert {made.answer(unique).error for unique in waiting} == {0}
    assert len(passed) == MANY and made.is_quiet()
    for _ in waiting:
        made.send_release(ino, ino)
        made.passed()
    eventually(lambda: made.datapath.open_files() == 0, "all are closed")


@pytest.mark.promise(299)
def test_requests_that_wait_for_the_limits_of_their_jobs_leave_their_places(made: Rig) -> None:
    ino = made.ino("large")
    waiting = [made.send_open(ino) for _ in range(300)]
    passed = [made.passed() for _ in range(256)]
    assert made.is_quiet()
    made.datapath.throttled(30)
    passed += [made.passed() for _ in range(30)]
    assert made.is_quiet()
    # They continue: all of them need places again.
    made.datapath.throttled(-30)
    for one in passed[:30]:
        made.reply_open(one)
    assert made.is_quiet()
    for one in passed[30:44]:
        made.reply_open(one)
        passed.append(made.passed())
    for one in passed[44:]:
        made.reply_open(one)
    assert {made.answer(unique).error for unique in waiting} == {0}
    assert len(passed) == 300 and made.is_quiet()
    for _ in waiting:
        made.send_release(ino, ino)
        made.passed()
    eventually(lambda: made.datapath.open_files() == 0, "all are closed")


@pytest.mark.finding("D3", "D11")
@pytest.mark.promise(11)
@pytest.mark.fault("M8")
def test_a_process_killed_while_its_request_has_no_slot_is_released(
    made: Rig, slow: SlowSource, killed: int
) -> None:
    ino, handle = hand_over(made, "large")
    slow.rules("hang * ^/(large|small|s[0-9])")
    for n in range(SLOTS):
        made.send_read(ino, handle, n * 4096, 4096)
    eventually(lambda: made.datapath.source_traffic().waiting == SLOTS, "all slots are taken")
    # Others wait for the entry that the first is to settle.
    opens = [made.send_open(made.ino("small"), pid=killed) for _ in range(3)]
    opens += [made.send_open(made.ino(f"s{n}"), pid=killed) for n in range(20)]
    reads = [
        made.send_read(ino, handle, n * 4096, 4096, pid=killed) for n in range(SLOTS, SLOTS + 20)
    ]
    eventually(
        lambda: made.datapath.state().waiting == SLOTS + len(opens) + len(reads), "they wait"
    )
    assert made.datapath.open_files() == 1 + len(opens)
    for unique in opens + reads:
        made.interrupt(unique)
    assert {made.answer(unique).error for unique in opens + reads} == {errno.EINTR}
    eventually(lambda: made.datapath.state().waiting == SLOTS, "nothing is kept of them")

    # Those whose entry was settled because the first was killed may have gone to Python.
    def closed() -> bool:
        with suppress(NoMessage):
            made.reply(made.passed(0.05), error=errno.EIO)
        return made.datapath.open_files() == 1

    eventually(closed, "nothing is open for them")
    others_are_served(made)
    slow.rules()
    eventually(lambda: made.datapath.state().waiting == 0, "the others are answered")
    assert made.is_quiet()


@pytest.mark.finding("D3")
@pytest.mark.promise(44)
def test_a_process_waiting_for_its_turn_with_python_is_released(made: Rig, killed: int) -> None:
    ino = made.ino("large")
    for _ in range(256):
        made.send_open(ino)
        made.passed()
    late = [made.send_open(ino, pid=killed) for _ in range(20)]
    eventually(lambda: made.datapath.state().waiting == 256 + 20, "they wait")
    for unique in late:
        made.interrupt(unique)
    assert {made.answer(unique).error for unique in late} == {errno.EINTR}
    assert made.is_quiet()
    assert made.datapath.open_files() == 256


@pytest.mark.finding("D11")
@pytest.mark.promise(11)
@pytest.mark.fault("M8")
def test_a_killed_caller_with_many_groups_is_released(
    made: Rig, slow: SlowSource, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may have any group")
    slow.rules("hang open ^/large")
    groups = list(range(4_000_000_000, 4_000_003_000))
    process = subprocess.Popen(
        ["cat", str(slow.path / "large")], extra_groups=groups, stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: slow.counters()["hanging"] > 0, "it waits")
        os.kill(slow.pid, signal.SIGSTOP)
        kill(process)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert len(status) > 8 * 4096
        unique = made.send(Op.STATFS, 1, pid=process.pid)
        made.passed()
        made.interrupt(unique)
        assert made.answer(unique).error == errno.EINTR
    finally:
        os.kill(slow.pid, signal.SIGCONT)
        process.kill()
        process.wait(60)


CHANGES = (
    *(Op.SETATTR, Op.SYMLINK, Op.MKNOD, Op.MKDIR, Op.UNLINK, Op.RMDIR, Op.RENAME, Op.LINK),
    *(Op.SETXATTR, Op.REMOVEXATTR, Op.RENAME2),
)


@pytest.fixture
def handling() -> Iterator[int]:
    """A stopped process that handles SIGTERM, and has got it: it stays with the process."""
    process = subprocess.Popen(["bash", "-c", "trap : TERM; kill -STOP $$"])
    status = Path(f"/proc/{process.pid}/status")
    eventually(lambda: "State:\tT" in status.read_text(), "it is stopped")
    process.terminate()
    yield process.pid
    process.kill()
    process.wait(60)


def _changing(made: Rig, pid: int) -> list[int]:
    """A process has asked for each kind of change."""
    ino = made.ino("large")
    written = wire.WRITE_IN.pack(ino, 0, 1, 0, 0, os.O_WRONLY, 0) + b"x"
    return [
        *(made.send(opcode, 1, bytes(128), pid=pid) for opcode in CHANGES),
        made.send(Op.WRITE, ino, written, pid=pid),
        made.send_create(b"new", pid=pid),
    ]


def _end_after_all(made: Rig, pid: int, changes: list[int], *, flags: int = os.O_RDONLY) -> None:
    """A process is sent a signal that ends an open with these flags, but none of its changes."""
    opened = made.send_open(made.ino("large"), flags=flags, pid=pid)
    requests = [made.passed() for _ in range(len(changes) + 1)]
    for unique in (*changes, opened):
        made.interrupt(unique)
    assert made.answer(opened).error == errno.EINTR
    for request in requests:
        made.reply(request, error=errno.EDQUOT)
    assert [made.answer(unique).error for unique in changes] == [errno.EDQUOT] * len(changes)
    # The process has had its answer to the open: no other one tells that Python's was handled.
    eventually(lambda: made.datapath.open_files() == 0, "the open file is given up")


@pytest.mark.fault("M8")
@pytest.mark.promise(44)
def test_a_signal_that_a_process_handles_ends_no_change(made: Rig, handling: int) -> None:
    """Python makes the change in any case. A process that repeats the call after EINTR would get
    EEXIST for its own directory."""
    # Such an open is a change for five seconds only, and it is the last request.
    _end_after_all(made, handling, _changing(made, handling), flags=os.O_WRONLY | os.O_TRUNC)


@pytest.mark.fault("M8")
@pytest.mark.promise(44)
@pytest.mark.parametrize("signalled", ["handling", "killed"])
def test_no_signal_ends_an_open_that_empties_a_file_at_once(
    made: Rig, signalled: str, request: pytest.FixtureRequest
) -> None:
    """The file is emptied in any case: after the end of the process, others may have written."""
    pid = request.getfixturevalue(signalled)
    ino = made.ino("large")
    emptying = [
        made.send_open(ino, flags=how | os.O_TRUNC, pid=pid) for how in (os.O_RDONLY, os.O_RDWR)
    ]
    _end_after_all(made, pid, emptying)


@pytest.mark.fault("M8")
@pytest.mark.promise(44)
def test_a_process_that_is_killed_ends_after_its_changes(made: Rig, killed: int) -> None:
    """Python makes the change in any case. Made after the end of the process, it would undo what
    others have written since."""
    _end_after_all(made, killed, _changing(made, killed))


@pytest.mark.fault("M8")
@pytest.mark.promise(44)
def test_a_process_that_is_killed_does_not_wait_for_changes_without_end(
    made: Rig, killed: int
) -> None:
    changes = _changing(made, killed)
    changes.append(made.send_open(made.ino("large"), flags=os.O_WRONLY | os.O_TRUNC, pid=killed))
    requests = [made.passed() for _ in changes]
    for unique in changes:
        made.interrupt(unique)
    assert [made.answer(unique).error for unique in changes] == [errno.EINTR] * len(changes)
    for request in requests:
        made.reply(request, error=errno.EDQUOT)
    eventually(lambda: made.datapath.open_files() == 0, "nothing is open for it")


@pytest.mark.finding("D3")
@pytest.mark.promise(44)
def test_a_process_killed_while_it_waits_elsewhere_than_at_its_signal_is_released(
    made: Rig, slow: SlowSource, stuck: subprocess.Popen[bytes]
) -> None:
    ino = made.ino("small")
    slow.rules("hang open ^/small")
    opens = []
    for count in (1, 2):
        opens.append(made.send_open(ino, pid=stuck.pid))
        eventually(lambda count=count: made.datapath.state().waiting == count, "it waits")
    for unique in opens:
        # A signal that ends nothing. The kernel reports no signal that comes after it.
        made.interrupt(unique)
    with pytest.raises(NoMessage):
        made.answer(opens[0], within_s=0.3)
    # Nothing is known of the file by now, so Python is asked.
    slow.rules("err open EIO ^/small")
    asked = [made.passed(), made.passed()]
    kill(stuck)
    assert [made.answer(unique).error for unique in opens] == [errno.EINTR] * 2
    for passed in asked:
        made.reply(passed, error=errno.EIO)
    eventually(lambda: made.datapath.open_files() == 0, "nothing is open for them")


@pytest.mark.finding("D3", "D11")
@pytest.mark.promise(89)
def test_looking_after_those_that_wait_takes_what_was_interrupted_and_no_more(
    made: Rig, slow: SlowSource
) -> None:
    """The number of waiting requests costs nothing, and 256 of the interrupted ones are checked in
    a second."""
    ino = made.ino("small")
    slow.rules("hang open ^/small")
    waiting = [made.send_open(ino, pid=os.getpid()) for _ in range(MANY)]
    eventually(lambda: made.datapath.state().waiting == MANY, "all of them wait")

    def reads(looks: int) -> tuple[int, float]:
        """Calls of read in this process, of which the datapath is a part, and seconds."""
        began, before = time.monotonic(), _own_reads()
        time.sleep(looks)
        return _own_reads() - before, time.monotonic() - began

    count, _ = reads(2)
    assert count < 40
    before = _own_reads()
    for unique in waiting:
        made.interrupt(unique)
    # Each caller is checked once when its signal comes. A look reads a file of /proc to its end:
    # twice.
    eventually(lambda: _own_reads() - before >= 2 * MANY, "all interrupts have come")
    # Some of these were second looks: the last first ones come a little later.
    reads(2)
    count, seconds = reads(2)
    # A machine under load may need longer for a look.
    while count <= 2 * LOOK and seconds < PATIENCE_S:
        more, lasted = reads(1)
        count, seconds = count + more, seconds + lasted
    assert 2 * LOOK < count < (seconds + 1) * 2 * LOOK + 40
    slow.rules()
    assert {made.answer(unique).error for unique in waiting} == {0}
    assert made.datapath.state().waiting == 0
    made.datapath.taken(ino)


@pytest.mark.finding("D6")
@pytest.mark.promise(90)
def test_the_reported_age_is_that_of_the_oldest_request_without_an_answer(
    made: Rig, killed: int
) -> None:
    first, later = (made.send_open(made.ino("large"), pid=killed) for _ in range(2))
    passed = [made.passed() for _ in range(2)]
    eventually(lambda: made.datapath.state().oldest_request_s > 0.3, "they grow old")
    began = time.monotonic()
    newest = made.send_open(made.ino("large"))
    passed.append(made.passed())
    assert made.datapath.state().oldest_request_s > 0.3
    # In any order: the one that is let go, that Python answers late, and that it answers.
    for unique in (later, first):
        made.interrupt(unique)
        assert made.answer(unique).error == errno.EINTR
    state = made.datapath.state()
    assert state.waiting == 1 and 0 < state.oldest_request_s <= time.monotonic() - began
    for one in passed:
        made.reply(one, error=errno.EIO)
    assert made.answer(newest).error == errno.EIO
    eventually(lambda: made.datapath.state().oldest_request_s == 0, "nothing is unanswered")
    assert made.datapath.state().waiting == 0


@pytest.mark.finding("D6")
@pytest.mark.promise(90)
@pytest.mark.fault("M11")
@pytest.mark.parametrize("how", ["killed", "released", "refused"])
def test_closing_a_file_of_the_source_blocks_no_request(
    tree: Tree, source: Path, tmp_path: Path, how: str, killed: int
) -> None:
    tree({"resident": SMALL, "large": LARGE})
    with (
        SlowSource(source, tmp_path / "flushing", flush=True) as slow,
        over(slow, tmp_path) as made,
    ):
        made.place("resident")
        ino = made.ino("large")
        unique = made.send_open(ino, pid=killed)
        passed = made.passed()
        fd = os.open(slow.path / "large", os.O_RDONLY)
        assert made.datapath.bind(ino, fd, tier=0, size=LARGE)
        slow.rules("hang flush ^/large")
        if how == "killed":
            made.interrupt(unique)
            assert made.answer(unique).error == errno.EINTR
            made.reply_open(passed)
        elif how == "refused":
            made.reply(passed, error=errno.EIO)
            assert made.answer(unique).error == errno.EIO
        else:
            made.reply_open(passed)
            handle, _, _ = wire.OPEN_OUT.unpack(made.answer(unique).body)
            made.send_release(ino, handle)
            made.passed()
        eventually(lambda: slow.counters()["hanging"] == 1, "it is being closed")
        others_are_served(made)
        # It is a call of the source, and seen as one.
        assert made.datapath.source_traffic().waiting == 1
        assert made.datapath.state().oldest_wait_s > 0
        slow.rules()
        eventually(lambda: made.datapath.source_traffic().waiting == 0, "it is closed")
        os.close(fd)


@pytest.mark.finding("D15")
@pytest.mark.promise(90)
def test_python_is_notified_without_waiting_for_itself(made: Rig) -> None:
    ino = made.ino("small")
    handle, _, _ = made.open(ino)
    resident = made.ino("resident")
    answer = made.ask_often((1 << 16) - 1, Op.OPEN, resident, wire.OPEN_IN.pack(0, 0))
    # The ring is full. A thread that has it waits; Python, which empties it, must not.
    assert made.datapath.outdate(ino)
    made.release(ino, handle)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    made.datapath.taken(ino)
    # A thread that waits for room looks a thousand times a second, for ten seconds.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 1000
    served = made.datapath.served()
    assert served[0][:2] == (ino, 0xFE)
    assert served[-1] == (ino, 0xFF, None, 0, 0, 0)
    assert len(served) == (1 << 16) + 1
    handle, _, _ = wire.OPEN_OUT.unpack(answer.body)
    made.ask_often((1 << 16) - 1, Op.RELEASE, resident, wire.RELEASE_IN.pack(handle, 0, 0, 0))
    assert made.datapath.open_files() == 0


@pytest.mark.finding("D15")
def test_a_second_unbinder_waits_for_the_first_ones_writers(
    made: Rig, slow: SlowSource, tmp_path: Path
) -> None:
    ino = Ino(1 << 30)
    unique = made.send_create(b"new")
    passed = made.passed()
    with open(slow.path / "large", "r+b") as file:
        assert made.datapath.bind_written(ino, file.fileno(), tier=1, create=True)
    made.reply_create(passed, ino)
    body = made.answer(unique).body
    handle, _, _ = wire.OPEN_OUT.unpack(body[wire.ENTRY.size + wire.ATTR.size :])
    slow.rules("hang write ^/large")
    made.send_write(ino, handle, 0, b"x" * 100)
    eventually(lambda: slow.counters()["hanging"] > 0, "it writes")
    results: list[bool] = []
    unbinders = [
        threading.Thread(target=lambda: results.append(made.datapath.unbind(ino))) for _ in range(2)
    ]
    for unbinder in unbinders:
        unbinder.start()
    unbinders[1].join(0.3)
    assert results == [] and all(unbinder.is_alive() for unbinder in unbinders)
    slow.rules()
    for unbinder in unbinders:
        unbinder.join(60)
    assert results == [True, True]


@pytest.mark.finding("D15")
@pytest.mark.fault("M4")
def test_the_devices_are_released_without_a_free_descriptor(made: Rig, slow: SlowSource) -> None:
    slow.rules("hang open ^/small")
    made.send_open(made.ino("small"))
    eventually(lambda: slow.counters()["hanging"] > 0, "a thread hangs")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, limits[1]))
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        made.datapath.stop()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # The kernel learns that no process answers any more.
    made.kernel.settimeout(60)
    with suppress(ConnectionResetError):
        assert made.kernel.recv(1) == b""
    slow.rules()
    eventually(lambda: made.datapath.state().threads == 0, "the thread that hung has ended")


@pytest.mark.finding("D15")
def test_rights_that_a_write_ends_are_taken_away_by_name(tree: Tree, tmp_path: Path) -> None:
    tree({"a": 1})
    with rig(tmp_path / "source", tmp_path) as made:
        unique = made.send(Op.INIT, 0, wire.INIT_IN.pack(7, 40, 1 << 20, 0, 0))
        passed = made.passed()
        flags = 1 << 19 | 1 << 28
        body = wire.INIT_OUT.pack(7, 38, 1 << 20, flags, 12, 9, 1 << 20, 1, 256, 0, 0, 0)
        made.reply(passed, body)
        answer = wire.INIT_OUT.unpack(made.answer(unique).body)
        assert answer[3] & flags == 0
        # Readers of the source keep their places in the background: there are as many as can be.
        assert answer[4] == 65535


def test_nothing_is_answered_twice_under_interrupts(made: Rig, slow: SlowSource) -> None:
    """Requests whose process is not killed are not released, however often they are interrupted."""
    ino = made.ino("small")
    slow.rules("hang open ^/small")
    waiting = [made.send_open(ino, pid=os.getpid()) for _ in range(40)]
    eventually(lambda: made.datapath.state().waiting == 40, "they wait")
    for unique in waiting:
        made.interrupt(unique)
    with pytest.raises(NoMessage):
        made.any_answer(0.3)
    slow.rules()
    assert {made.answer(unique).error for unique in waiting} == {0}


@pytest.mark.finding("D13")
@pytest.mark.fault("M10")
def test_no_process_has_a_file_open_whose_pages_are_not_stored_yet(
    tree: Tree, tmp_path: Path
) -> None:
    """Else a reader may hold the lock of a page that the thread which stores it waits for.

    The reader of the pages reads nothing here, so one of the files comes to a stop.
    """
    size, count = 1 << 20, 16
    names = [f"f{number:02}" for number in range(count)]
    tree(dict.fromkeys(names, size))
    with rig(tmp_path / "source", tmp_path, fetch_max=size, fetched_at_once=2 * count) as made:
        made.init()
        first = {made.ino(name): made.send_open(made.ino(name)) for name in names}
        eventually(lambda: made.datapath.source_traffic().opens == count, "all are fetched")
        others = {ino: made.send_open(ino) for ino in first}
        eventually(lambda: made.datapath.state().waiting > 0, "others wait for what is stored")
        stored: set[int] = set()
        answered: dict[int, int] = {}
        while len(answered) < 2 * count:
            found = made.any_answer(10)
            if found.unique:
                answered[found.unique] = found.error
                (ino,) = (n for n in first if found.unique in (first[n], others[n]))
                assert ino in stored
            else:
                assert -found.error == wire.NOTIFY_STORE
                stored.add(wire.STORE_OUT.unpack_from(found.body)[0])
        assert set(answered.values()) == {0}
        made.datapath.served()


@pytest.mark.finding("D14")
@pytest.mark.fault("M10")
def test_events_that_python_missed_while_it_slept_wake_it(tree: Tree, tmp_path: Path) -> None:
    """Python is notified of the last release of an outdated copy while it reads the events."""
    tree({"a": SMALL})
    with rig(tmp_path / "source", tmp_path) as made:
        made.init()
        ino = made.place("a")
        for _ in range(300):
            handle, _, _ = made.open(ino)
            made.datapath.outdate(ino)
            seen = [what for _, what, *_ in made.datapath.served() if what == RELEASED]
            unique = made.send_release(ino, handle)
            while not seen:
                # As Python does: it looks when it is woken, and only then.
                assert readable(made.datapath, within_s=60), "no event wakes it"
                seen = [what for _, what, *_ in made.datapath.served() if what == RELEASED]
            assert made.answer(unique).error == 0


@pytest.mark.finding("D15")
@pytest.mark.promise(51)
@pytest.mark.fault("M4")
def test_the_last_descriptors_are_not_for_files_of_the_source(made: Rig) -> None:
    """A large cold file takes two of them, the second one only while there are enough."""
    ino = made.ino("large")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    fd = os.open(made.source / "large", os.O_RDONLY)
    try:
        lowest = os.dup(fd)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, 2 * lowest), limits[1]))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        while not taken or taken[-1] < most - most // 4:
            taken.append(os.dup(fd))
        before = len(os.listdir("/proc/self/fd"))
        unique = made.send_open(ino)
        passed = made.passed()
        assert not made.datapath.bind(ino, fd, tier=0, size=LARGE)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "none is kept")
        # What is here is served to the last.
        others_are_served(made)
        made.reply_open(passed)
        handle = wire.OPEN_OUT.unpack(made.answer(unique).body)[0]
        made.send_release(ino, handle)
        made.passed()
        while taken:
            os.close(taken.pop())
        unique = made.send_open(ino)
        passed = made.passed()
        assert made.datapath.bind(ino, fd, tier=0, size=LARGE)
        made.reply(passed, error=errno.EIO)
        assert made.answer(unique).error == errno.EIO
    finally:
        for held in (*taken, fd):
            os.close(held)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.finding("K4", "K5")
@pytest.mark.parametrize(
    ("write", "pages", "agreed"),
    [
        # Of libfuse where pages have 4 KiB and 64 KiB, and one that would take more than we do.
        (1 << 20, 256, (1 << 20, 256)),
        (1 << 20, 16, (1 << 20, 16)),
        (4 << 20, 1024, (1 << 20, 256)),
    ],
)
def test_no_message_is_larger_than_the_buffers(
    tree: Tree, tmp_path: Path, write: int, pages: int, agreed: tuple[int, int]
) -> None:
    tree({"a": 1})
    with rig(tmp_path / "source", tmp_path) as made:
        unique = made.send(Op.INIT, 0, wire.INIT_IN.pack(7, 40, 1 << 20, 0, 0))
        body = wire.INIT_OUT.pack(7, 38, 1 << 20, 0, 12, 9, write, 1, pages, 0, 0, 0)
        # Of libfuse 3.10 to 3.17: 80 bytes with the header.
        assert len(body) + 16 == 80
        made.reply(made.passed(), body)
        answer = wire.INIT_OUT.unpack(made.answer(unique).body)
        assert (answer[6], answer[8]) == agreed


@pytest.mark.finding("K5")
def test_a_short_answer_of_an_older_libfuse_is_passed_as_it_is(tree: Tree, tmp_path: Path) -> None:
    tree({"a": 1})
    with rig(tmp_path / "source", tmp_path) as made:
        unique = made.send(Op.INIT, 0, wire.INIT_IN.pack(7, 22, 1 << 20, 0, 0))
        short = wire.INIT_OUT.pack(7, 22, 1 << 20, 0, 12, 9, 1 << 20, 1, 0, 0, 0, 0)[:24]
        made.reply(made.passed(), short)
        assert made.answer(unique).body == short


@pytest.mark.finding("D14")
def test_both_sides_of_a_wake_up_are_ordered() -> None:
    """Each stores, then loads what the other has stored. A lost wake-up is too rare for a test."""
    code = Path(__file__).parents[2] / "monarch/fuse/native"
    fence = "__atomic_thread_fence(__ATOMIC_SEQ_CST);"
    for name, function, fenced in (
        ("_events.c", "void wake_python(", (fence, "if (LOAD(dp->awake)")),
        ("_python.c", "*datapath_events(", ("STORE(dp->awake, 0);", fence, "next_event(")),
    ):
        body = (code / name).read_text().partition(function)[2].partition("\n}\n")[0]
        places = [body.find(text) for text in fenced]
        assert -1 not in places and places == sorted(places), name


def _own_reads() -> int:
    (line,) = (x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("syscr:"))
    return int(line.split()[1])
