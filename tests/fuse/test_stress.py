"""Real mounts while everything happens at once: right bytes, no error, and nothing left open."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from monarch.control.client import call
from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import (
    account,
    accounts_agree,
    epoch,
    forget_pages,
    settled,
    wait_until,
)
from tests.mount.test_changes import CHANGED

# Without opens, without the datapath, and the two ways of the datapath.
WAYS = ("relay", "passthrough", "no_open")
pytestmark = pytest.mark.modes(*WAYS)

ROOT = Path(__file__).parents[2]
READERS = 3


@pytest.fixture
def seconds(pytestconfig: pytest.Config) -> float:
    soak = pytestconfig.getoption("--soak")
    assert isinstance(soak, float)
    return soak or 2.5


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, seconds: float) -> None:
    if seconds > 60:
        request.node.add_marker(pytest.mark.timeout(2 * seconds + 120))


@contextmanager
def readers(mounted: Mounted, seconds: float, sizes: dict[str, int]) -> Iterator[None]:
    """Processes that read all the time; what one of them finds wrong fails the test."""
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.fuse.reading", str(mounted.path), str(seconds)),
                *(str(seed), json.dumps(sizes)),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(READERS)
    ]
    try:
        yield
        for process in running:
            _, output = process.communicate(timeout=seconds + 60)
            assert process.returncode == 0, output
    finally:
        for process in running:
            process.kill()
            process.communicate()


def nothing_is_open(mounted: Mounted) -> None:
    """Neither in the kernel's view nor as descriptors of the daemon."""

    def left() -> list[str]:
        handles = account(mounted)["handles"]
        held = []
        for fd in Path(f"/proc/{mounted.pid}/fd").iterdir():
            try:
                path = os.readlink(fd)
            except FileNotFoundError:
                continue
            copied = path.partition("/copies-")[2].removesuffix(" (deleted)")
            # Below the directory of a generation lie its copies.
            if "/" in copied or path.startswith(f"{mounted.source}/"):
                held.append(path)
        return [f"{name}: {count}" for name, count in handles.items() if count] + held

    # An entry without an open is kept for a moment.
    deadline = time.monotonic() + 60
    while found := left():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def ask(mounted: Mounted, verb: str, *paths: str) -> None:
    call(mounted.state / "control.sock", verb, {"paths": list(paths)})


@pytest.mark.fault("M7")
def test_readers_see_right_bytes_while_copies_come_and_go(
    monarch: MonarchCommand, tree: Tree, source: Path, seconds: float
) -> None:
    sizes = {f"small{n}": 30_000 + n for n in range(12)}
    sizes |= {"empty": 0, "page": 4096, "middle": 1_500_000, "large": 5_000_000, "big": 7_000_000}
    tree(sizes)
    mounted = monarch.mount(source, tiers={"fast": "8MiB", "slow": "30MiB"})
    dice = random.Random(1)
    with readers(mounted, seconds, sizes):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ask(mounted, dice.choice(("evict", "warm")), *dice.sample(list(sizes), 4))
            time.sleep(dice.random() * 0.02)
    nothing_is_open(mounted)
    epoch(mounted, {name: contents(name, size) for name, size in sizes.items()})
    nothing_is_open(mounted)
    settled(mounted)
    accounts_agree(mounted)


def version(number: int, size: int) -> bytes:
    return bytes([number % 256]) * size


@pytest.mark.promise(1, 40)
@pytest.mark.parametrize("size", [200_000, 6_000_000], ids=["small", "large"])
def test_a_whole_read_is_of_one_version_however_often_the_source_is_replaced(
    monarch: MonarchCommand, tree: Tree, source: Path, seconds: float, size: int
) -> None:
    monarch.expects_log(CHANGED)
    names = ["one", "two"]
    tree({name: version(0, size) for name in names})
    mounted = monarch.mount(source, tiers={"fast": "30MiB"})
    epoch(mounted, {name: version(0, size) for name in names})
    replacer = subprocess.Popen(
        [
            *(sys.executable, "-c", _REPLACE, str(source), str(seconds), str(size)),
            *names,
        ]
    )
    outcomes: dict[str, int] = {}
    dice = random.Random(2)
    try:
        while replacer.poll() is None:
            outcome = _one_version(mounted.path / dice.choice(names), dice)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if dice.random() < 0.3:
                ask(mounted, dice.choice(("evict", "warm")), dice.choice(names))
    finally:
        replacer.kill()
        replacer.wait()
    # However few of its rounds met a new version: now the source is asked.
    ask(mounted, "evict")
    for name in names:
        with (mounted.path / name).open("rb") as file:
            forget_pages(file.fileno())
        outcomes[_one_version(mounted.path / name, dice)] = 1
    assert set(outcomes) <= {"whole", "stale"}, outcomes


def _one_version(path: Path, dice: random.Random) -> str:
    """Read a file piece by piece, with others between: the result."""
    seen: set[int] = set()
    try:
        with path.open("rb", buffering=0) as file:
            if dice.random() < 0.5:
                forget_pages(file.fileno())
            while piece := file.read(dice.choice((4096, 50_000, 1 << 20))):
                seen |= set(piece)
                if dice.random() < 0.05:
                    time.sleep(0.01)
    except OSError as error:
        return "stale" if error.errno == errno.ESTALE else str(error)
    return "whole" if len(seen) <= 1 else f"mixed: {seen}"


_REPLACE = """
import os, sys, time
source, seconds, size, names = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
end, number = time.monotonic() + seconds, 0
while time.monotonic() < end:
    number += 1
    for name in names:
        with open(f"{source}/.new", "wb") as file:
            file.write(bytes([number % 256]) * size)
        os.rename(f"{source}/.new", f"{source}/{name}")
        time.sleep(0.05)
"""


def test_open_files_stay_readable_when_copies_and_mount_are_taken_away(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {name: contents(name, 2_000_000) for name in ("read", "mapped", "kept")}
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    with ExitStack() as stack:
        files = {n: stack.enter_context((mounted.path / n).open("rb", 0)) for n in content}
        pages = stack.enter_context(
            mmap.mmap(files["mapped"].fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        )
        assert files["read"].read(1000) == content["read"][:1000]
        ask(mounted, "evict")
        monarch("umount", "--lazy", str(mounted.path))
        for file in files.values():
            forget_pages(file.fileno())
        assert files["read"].readall() == content["read"][1000:]
        assert pages[:] == content["mapped"]
        assert os.pread(files["kept"].fileno(), 10, 1_000_000) == content["kept"][10**6 :][:10]
        assert psutil.pid_exists(mounted.pid)
    wait_until(lambda: not psutil.pid_exists(mounted.pid), "the daemon ends with the last file")


@pytest.mark.fault("M4", "M7")
def test_a_daemon_of_few_descriptors_serves_thousands_of_open_files(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    sizes = {f"{n:04}": 100 + n for n in range(3000)}
    tree(sizes)
    mounted = monarch.mount(source)
    _, hard = resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (1024, hard))
    for _ in range(2):
        opened = subprocess.run(
            [sys.executable, "-c", _HOLD, str(mounted.path)],
            input=json.dumps({name: contents(name, size).decode() for name, size in sizes.items()}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert opened.returncode == 0, opened.stderr
        nothing_is_open(mounted)
        settled(mounted)
    accounts_agree(mounted)


_HOLD = """
import json, os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 10_000), hard))
expected = json.load(sys.stdin)
held = {name: os.open(f"{sys.argv[1]}/{name}", os.O_RDONLY) for name in expected}
for fd in held.values():
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
wrong = [name for name, fd in held.items() if os.pread(fd, 10_000, 0) != expected[name].encode()]
sys.exit(f"{len(wrong)} files are wrong" if wrong else 0)
"""


@pytest.mark.fault("S1")
@pytest.mark.promise(11)
def test_a_reader_that_waits_for_a_hung_source_can_be_killed(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = {"small": contents("small", 5000), "large": contents("large", 9_000_000)}
    tree(content)
    mounted = monarch.mount(slow.path)
    with ExitStack() as stack:
        slow.rules("hang open ^/small", "hang read ^/large")
        # Two of the same file: one asks the source, the other waits for that. Of the other two one
        # survives a first signal, and the kernel reports no second one.
        waiting = [
            stack.enter_context(_reader(mounted.path / name, offset))
            for name, offset in (
                ("small", 0),
                ("small", 0),
                ("large", 8_500_000),
                ("large", 7 << 20),
            )
        ]
        time.sleep(0.5)
        waiting[3].send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert [process.poll() for process in waiting] == [None] * 4
        for process in waiting:
            process.kill()
        for process in waiting:
            assert process.wait(60) == -signal.SIGKILL
        assert mounted.status()["state"] == "serving"
        slow.rules()
    epoch(mounted, content)
    nothing_is_open(mounted)
    settled(mounted)
    accounts_agree(mounted)


_READ = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
print("about to read", flush=True)
os.pread(os.open(sys.argv[1], os.O_RDONLY), 4096, int(sys.argv[2]))
print("has read", flush=True)
signal.pause()
"""


@contextmanager
def _reader(path: Path, offset: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is about to read there, and never ends by itself."""
    with subprocess.Popen(
        [sys.executable, "-c", _READ, str(path), str(offset)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"about to read\n"
        try:
            yield process
            assert process.stdout.read() == b""
        finally:
            process.kill()
