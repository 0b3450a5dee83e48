"""Many small files are read in one call."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from monarch.datasets import files
from monarch.datasets.files import Dataset, open_dataset
from monarch.posix import workers
from monarch.posix.files import closing_fd
from tests.equipment.interrupts import interrupted_in_each_line
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until

SIZES = [0, 1, 4095, 4096, 110_000, 1 << 20]


@pytest.fixture(params=["native", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the C extension, and without it."""
    assert files._read_many is not None, "the extension was not built"
    if request.param == "python":
        monkeypatch.setattr(files, "_read_many", None)
        monkeypatch.setattr(files, "_views", files._views_in_python)
    return str(request.param)


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, bytes]:
    """Forty files in ``tmp_path``, with their bytes."""
    rng = random.Random(1)
    content = {f"{n % 4}/{n}": rng.randbytes(SIZES[n % len(SIZES)]) for n in range(40)}
    for name, data in content.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return content


@pytest.mark.promise(250)
def test_each_file_has_its_bytes_in_the_order_of_the_names(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    rng = random.Random(2)
    with open_dataset(tmp_path) as dataset:
        for count in (0, 1, 3, 64, 200):
            names = rng.choices(list(tree), k=count)
            views = dataset.get_many(names)
            assert views == [tree[name] for name in names]
            assert all(view.readonly for view in views)
        assert dataset.get(next(iter(tree))) == next(iter(tree.values()))


def test_views_of_earlier_calls_keep_their_bytes(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    names = list(tree)
    with Dataset(tmp_path) as dataset:
        kept = [dataset.get_many(names[n : n + 5]) for n in range(0, 40, 5)]
        dataset.get_many(reversed(names))
    assert [bytes(view) for views in kept for view in views] == list(tree.values())


def test_gaps_that_differ_from_call_to_call_need_no_new_memory(
    tmp_path: Path, tree: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    rooms = 0

    def read(self: Dataset, *arguments: Any, **more: Any) -> Any:
        nonlocal rooms
        rooms += 1
        found, needed, unread = as_it_is(self, *arguments, **more)
        return found, needed * (100 + rooms % 5) // 100, unread

    as_it_is = Dataset._read
    monkeypatch.setattr(Dataset, "_read", read)
    with Dataset(tmp_path) as dataset:
        for _ in range(3):
            views = dataset.get_many(tree)
        monkeypatch.setattr(files.np, "empty", lambda size, kind: made.append(size))
        for _ in range(10):
            views = dataset.get_many(tree)
        assert not made and views == list(tree.values())


def test_a_loop_uses_the_memory_of_earlier_calls_again(
    reader: str, tmp_path: Path, tree: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def empty(size: int, kind: type) -> npt.NDArray[np.uint8]:
        made.append(size)
        return np.zeros(size, kind)

    names = list(tree)
    with Dataset(tmp_path) as dataset:
        kept = dataset.get_many(names)
        for _ in range(2):
            views = dataset.get_many(names)
        monkeypatch.setattr(files.np, "empty", empty)
        for _ in range(10):
            # The views of the call before are dropped when this one has returned.
            views = dataset.get_many(names)
            assert views == list(tree.values())
        assert not made
        held = [dataset.get_many(names) for _ in range(3)]
        assert made
        assert [kept, *held] == [list(tree.values())] * 4


@pytest.mark.parametrize("kind", [bytearray, lambda size: np.empty(size, np.uint8)])
def test_the_bytes_are_read_into_memory_of_the_caller(
    reader: str, tmp_path: Path, tree: dict[str, bytes], kind: Callable[[int], bytearray]
) -> None:
    total = sum(map(len, tree.values()))
    memory = kind(total)
    with Dataset(tmp_path) as dataset:
        views = dataset.get_many(tree, into=memory)
        assert views == list(tree.values())
        assert not any(view.readonly for view in views)
        assert sorted(bytes(memory)) == sorted(b"".join(tree.values()))
        small = kind(total - 1)
        with pytest.raises(ValueError, match=f"40 files have {total:,} bytes, and the buffer"):
            dataset.get_many(tree, into=small)
        with pytest.raises((TypeError, BufferError)):
            dataset.get_many(tree, into=bytes(total))


def test_a_large_file_begins_close_behind_a_page_of_the_memory_of_a_call(
    tmp_path: Path, tree: dict[str, bytes]
) -> None:
    assert files._read_many is not None, "the extension was not built"
    with Dataset(tmp_path) as dataset:
        views = dataset.get_many(tree)
    assert views == list(tree.values())
    large = [np.frombuffer(view, np.uint8).ctypes.data for view in views if len(view) >= 1 << 16]
    assert large and {address % 4096 for address in large} == {32}


def test_a_call_takes_the_interpreter_no_step_for_each_file(
    tmp_path: Path, tree: dict[str, bytes]
) -> None:
    assert files._read_many is not None, "the extension was not built"
    steps = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    def steps_of(names: list[str]) -> int:
        nonlocal steps
        steps, before = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            dataset.get_many(names)
        finally:
            sys.settrace(before)
        return steps

    name = next(name for name, content in tree.items() if len(content) == 4096)
    with Dataset(tmp_path) as dataset:
        dataset.get_many([name] * 100)
        # The least of some: a call asks the mount at times, and makes room for more bytes.
        few, many = (min(steps_of([name] * count) for _ in range(5)) for count in (20, 100))
    assert many == few


@pytest.mark.promise(250)
def test_the_first_file_that_cannot_be_read_is_named(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    names = list(tree)
    with Dataset(tmp_path) as dataset:
        for name, number in [
            ("none", errno.ENOENT),
            ("0", errno.EISDIR),
            ("fifo", errno.EINVAL),
            ("loop", errno.ELOOP),
            (f"{names[0]}/x", errno.ENOTDIR),
        ]:
            with pytest.raises(OSError, match=name) as caught:
                dataset.get_many([*names, name, "none"])
            assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / name))
        with pytest.raises(ValueError, match=r"null byte|embedded"):
            dataset.get_many(["a\0b"])
        assert dataset.get_many(names) == list(tree.values())
        for one in ("ab", b"ab", Path("ab")):
            with pytest.raises(TypeError, match="several names"):
                dataset.get_many(one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="closed"):
        dataset.get(names[0])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Dataset(tmp_path / "nowhere")


def test_names_of_any_bytes_and_links_are_opened_as_by_any_program(
    reader: str, tmp_path: Path
) -> None:
    odd = b"a\xff\n b"
    (tmp_path / os.fsdecode(odd)).write_bytes(b"odd")
    (tmp_path / "link").symlink_to(os.fsdecode(odd))
    with Dataset(os.fsencode(tmp_path)) as dataset:
        assert dataset.get_many([odd, "link", Path("link"), os.fsdecode(odd)]) == [b"odd"] * 4


def test_no_descriptor_and_no_thread_is_left(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    with Dataset(tmp_path) as dataset:
        before = set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))
        for _ in range(20):
            dataset.get_many(tree)
            with pytest.raises(FileNotFoundError):
                dataset.get_many([*tree, "none"])
        assert set(os.listdir("/proc/self/fd")) <= before[0]
    # A thread that was joined ends a little later, and so may threads of earlier tests.
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= before[1], "threads are left")


def test_more_threads_than_a_number_of_the_extension_holds_are_as_many_as_files(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    with Dataset(tmp_path, threads=1 << 31) as dataset:
        assert dataset.get_many(tree) == list(tree.values())


def test_threads_forked_processes_and_pickled_copies_read(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    dataset = Dataset(tmp_path, threads=3)
    right: list[bool] = []

    def read() -> None:
        right.extend(dataset.get_many(tree) == list(tree.values()) for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80
    forked = multiprocessing.get_context("fork").Process(target=_check, args=(dataset, tree))
    forked.start()
    forked.join()
    assert forked.exitcode == 0
    copy = pickle.loads(pickle.dumps(dataset))
    dataset.close()
    assert copy.get_many(tree) == list(tree.values())
    copy.close()


def test_a_process_that_is_forked_after_a_call_reads_by_itself(
    tmp_path: Path, tree: dict[str, bytes]
) -> None:
    # A thread of the call may still wait for the next one, and the new process does not have it.
    names = list(tree)
    with Dataset(tmp_path) as dataset:
        for _ in range(30):
            dataset.get_many(names)
            child = os.fork()
            if child == 0:
                is_right = False
                try:
                    is_right = dataset.get_many(names) == list(tree.values())
                finally:
                    os._exit(not is_right)
            assert os.waitpid(child, 0)[1] == 0


def _check(dataset: Dataset, tree: dict[str, bytes]) -> None:
    if dataset.get_many(tree) != list(tree.values()):
        os._exit(1)


@pytest.mark.promise(250)
def test_an_estimate_of_more_memory_than_there_is_does_no_harm(
    reader: str, tmp_path: Path, tree: dict[str, bytes]
) -> None:
    with Dataset(tmp_path) as dataset:
        # As after a call for one very large file.
        dataset._mean_bytes = float(1 << 56)
        assert dataset.get_many(tree) == list(tree.values())


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowSource]:
    (tmp_path / "root").mkdir()
    with SlowSource(tmp_path / "root", tmp_path / "slow") as source:
        yield source


@pytest.mark.promise(250)
@pytest.mark.parametrize("repeats", [1, 300_000], ids=["small", "without room at first"])
def test_a_data_set_that_is_closed_during_a_call_reads_no_other_directory(
    reader: str, slow: SlowSource, tmp_path: Path, repeats: int
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    right = b"right" * repeats
    for name in ("first", "second"):
        (slow.root / name).write_bytes(right)
        (other / name).write_bytes(b"wrong" * repeats)
    found: list[list[memoryview]] = []
    dataset = Dataset(slow.path, threads=1)
    reading = threading.Thread(target=lambda: found.append(dataset.get_many(["first", "second"])))
    slow.rules("hang open /first")
    reading.start()
    try:
        wait_until(lambda: slow.counters()["hanging"] == 1, "the first file is opened")
        dataset.close()
        # It would get the number of the descriptor.
        with closing_fd(os.open(other, os.O_RDONLY | os.O_DIRECTORY)):
            slow.rules()
            reading.join()
    finally:
        slow.rules()
        reading.join()
    assert found == [[right, right]]
    with pytest.raises(ValueError, match="closed"):
        dataset.get("second")
    assert os.fspath(slow.path) not in _open_files()


class _ReadsAtItsEnd:
    """Reads a file of a data set when both are garbage of one cycle."""

    def __init__(self, dataset: Dataset, other: Path, found: list[object]) -> None:
        self.dataset, self.other, self.found = dataset, other, found
        self.cycle = self
        # Its descriptor is then finalized first.
        gc.collect()

    def __del__(self) -> None:
        # Gets the number of the descriptor if that was closed.
        with closing_fd(os.open(self.other, os.O_RDONLY | os.O_DIRECTORY)):
            try:
                self.found.append(bytes(self.dataset.get("name")))
            except OSError as error:
                self.found.append(error.errno)


@pytest.mark.promise(250)
def test_a_data_set_in_the_garbage_reads_no_other_directory(reader: str, tmp_path: Path) -> None:
    for content in ("right", "wrong"):
        (tmp_path / content).mkdir()
        (tmp_path / content / "name").write_text(content)
    found: list[object] = []
    _ReadsAtItsEnd(Dataset(tmp_path / "right"), tmp_path / "wrong", found)
    gc.collect()
    assert found in ([errno.EBADF], [b"right"])


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{number}")


@pytest.mark.promise(250)
def test_as_many_files_are_open_at_once_as_there_are_free_descriptors(
    reader: str, slow: SlowSource
) -> None:
    names = [f"{number}" for number in range(40)]
    for name in names:
        (slow.root / name).write_bytes(name.encode())
    slow.rules("lat open 20")
    with Dataset(slow.path) as dataset:
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                is_right = _is_read_with_few_descriptors(dataset, names)
            finally:
                os._exit(not is_right)
        assert os.waitpid(child, 0)[1] == 0


def _is_read_with_few_descriptors(dataset: Dataset, names: list[str]) -> bool:
    """In a process of its own."""
    contents = [name.encode() for name in names]
    taken: list[int] = []
    most = max(map(int, os.listdir("/proc/self/fd"))) + 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        dataset.get_many(names)
    except OSError as error:
        if error.errno != errno.EMFILE:
            return False
    else:
        return False
    for count in (1, 2):
        for _ in range(count):
            os.close(taken.pop())
        memory = bytearray(sum(map(len, contents)))
        if dataset.get_many(names) != contents or dataset.get_many(names, into=memory) != contents:
            return False
    return True


@pytest.mark.promise(251)
def test_more_threads_wait_while_the_file_system_is_slow(slow: SlowSource) -> None:
    for number in range(100):
        (slow.root / f"{number}").write_bytes(b"%d" % number)
    most = 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.005):
            most = max(most, len(os.listdir("/proc/self/task")))

    watching = threading.Thread(target=watch)
    watching.start()
    before = slow.counters()["open"], len(os.listdir("/proc/self/task"))
    try:
        slow.rules("lat open 100")
        with Dataset(slow.path, threads=16) as dataset:
            views = dataset.get_many(f"{number}" for number in range(100))
            assert views == [b"%d" % number for number in range(100)]
    finally:
        is_over.set()
        watching.join()
    assert slow.counters()["open"] - before[0] == 100
    # The caller is one of them.
    assert most - before[1] == 15


class _Signalled(Exception):
    pass


@pytest.mark.promise(250)
def test_an_exception_of_a_signal_handler_ends_the_call(reader: str, slow: SlowSource) -> None:
    (slow.root / "file").write_bytes(b"x")

    def handle(number: int, frame: object) -> None:
        raise _Signalled

    def send() -> None:
        wait_until(lambda: slow.counters()["open"] > before, "no file was opened")
        os.kill(os.getpid(), signal.SIGUSR1)

    earlier = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    # Other libraries have functions that the collector calls, and an exception there is ignored.
    gc.disable()
    try:
        slow.rules("lat open 20")
        before = slow.counters()["open"]
        with Dataset(slow.path, threads=2) as dataset:
            sender.start()
            with pytest.raises(_Signalled):
                dataset.get_many(["file"] * 2000)
    finally:
        gc.enable()
        sender.join()
        signal.signal(signal.SIGUSR1, earlier)
    assert slow.counters()["open"] - before < 2000


@pytest.mark.promise(250)
def test_an_exception_in_any_line_ends_the_call_without_the_extension(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal handler may raise between any two lines of the thread that waits."""
    monkeypatch.setattr(files, "_read_many", None)
    (tmp_path / "file").write_bytes(b"x")
    with Dataset(tmp_path, threads=2) as dataset:
        views, interrupted = interrupted_in_each_line(
            lambda: dataset.get_many(["file"] * 5), files, workers
        )
    assert views == [b"x"] * 5
    assert interrupted > 50
