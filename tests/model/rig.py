"""The real things that a plan is played on: source, tiers, mounts, daemons and readers."""

from __future__ import annotations

import contextlib
import errno
import json
import marshal
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from monarch.control.client import call
from monarch.errors import MonarchError
from tests.conftest import MODES, MonarchCommand, Mounted, mounts, own_directory
from tests.equipment.processes import is_running
from tests.equipment.waiting import becomes_true, readable
from tests.model.model import Version, Wrong
from tests.model.plan import Settings
from tests.mount.observe import copies

PATIENCE_S = 60.0
_ROOT = Path(__file__).parents[2]
_PIECES = (1 << 20, 65_536, 5000, 131_072)


class Workers:
    """The processes that outlive a plan: readers, and the one that runs Monarch's commands."""

    def __init__(self) -> None:
        self._forge: subprocess.Popen[str] | None = None
        self._readers: dict[int, _Reader] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for reader in self._readers.values():
            reader.end()
        if self._forge is not None:
            self._forge.kill()
            self._forge.communicate()

    def monarch(self, *arguments: str, environment: dict[str, str]) -> str:
        """Run ``monarch ARGUMENTS``; what it wrote. Raises Wrong if it fails."""
        if self._forge is None:
            self._forge = subprocess.Popen(
                [sys.executable, "-m", "tests.model.forge"],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "NO_COLOR": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._forge.stdin is not None and self._forge.stdout is not None
        request = {"arguments": arguments, "environment": environment}
        self._forge.stdin.write(f"{json.dumps(request)}\n")
        self._forge.stdin.flush()
        answer = json.loads(self._forge.stdout.readline())
        if answer["code"]:
            raise Wrong(f"monarch {arguments[0]}: exit code {answer['code']}: {answer['output']}")
        output: str = answer["output"]
        return output

    def reset(self) -> None:
        """Readers close what they have open."""
        for reader in self._readers.values():
            reader.reset()

    def reader(self, number: int) -> _Reader:
        if number not in self._readers or self._readers[number].hangs:
            self._readers[number] = _Reader(number)
        return self._readers[number]


class _Reader:
    """A process that runs ``reader.py``. Commands may be sent before the last is answered."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-S", str(Path(__file__).with_name("reader.py"))),
                str(_PIECES[number % len(_PIECES)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.hangs = False
        self._waiting = 0

    def send(self, *command: Any) -> None:
        assert self._process.stdin is not None
        line = marshal.dumps(command)
        self._process.stdin.write(len(line).to_bytes(4, "little") + line)
        self._waiting += 1

    def receive(self) -> Any:
        """The next answer. Raises Wrong if there is none."""
        deadline = time.monotonic() + PATIENCE_S
        size = int.from_bytes(self._bytes(4, deadline), "little")
        answer = marshal.loads(self._bytes(size, deadline))
        self._waiting -= 1
        return answer

    def _bytes(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        while count:
            ready = readable(self._process.stdout, within_s=deadline - time.monotonic())
            part = self._process.stdout.read(count) if ready else b""
            if not part:
                self.hangs = True
                code = self._process.poll()
                what = "hangs" if code is None else f"ended with {code}"
                raise Wrong(f"11: reader {self._number} {what}")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def reset(self) -> None:
        """Close everything, and skip answers that were not received yet; it is ended if it
        hangs."""
        try:
            self.send("reset")
            while self._waiting:
                self.receive()
        except (Wrong, OSError):
            self.hangs = True
            self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Rig:
    """Everything of one plan lies in ``directory``. ``close`` leaves nothing of it mounted."""

    def __init__(self, directory: Path, settings: Settings, workers: Workers) -> None:
        self._settings = settings
        self._workers = workers
        self._cleanup = ExitStack()
        self.source = directory / "source"
        self._aside = directory / "aside"
        for path in (self.source, self._aside, directory / "mnt"):
            path.mkdir(parents=True)
        tiers = {name: directory / name for name, _ in settings.tiers}
        for path in tiers.values():
            path.mkdir()
        if settings.disk:
            first = tiers[settings.tiers[0][0]]
            option = f"size={settings.disk}"
            _run("mount", "-t", "tmpfs", "-o", option, "tmpfs", str(first))
            self._cleanup.callback(lambda: _run("umount", "-l", str(first)))
        command = MonarchCommand(directory, "", settings.mode)
        self._environment = command.environment()
        self.mounted = Mounted(command, directory / "mnt", self.source, directory / "state", tiers)
        # Where the copies of each file lie, as the last mount numbered them.
        self.inos: dict[str, int] = {}
        self.is_mounted = False
        self._seen_of_log = 0

    def close(self) -> None:
        pid = self.mounted.pid
        if pid and is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while str(self.mounted.path) in mounts():
            _run("umount", "-l", str(self.mounted.path))
        self._workers.reset()
        if pid:
            wait_until(lambda: not is_running(pid), "the daemon ends")
        self._cleanup.close()

    # -- mount and daemon ------------------------------------------------------------------------

    def mount(self, *, refreshed: bool, kind: str = "same") -> set[str]:
        """Mount in one of the ways ``never`` and ``given``, else as before; the names of its
        files."""
        freshness = "never" if kind == "never" else self._settings.freshness
        options = [
            *self._settings.options,
            *MODES[self._settings.mode],
            f"snapshot.freshness={freshness}",
            f"verify={self._settings.verify}",
        ]
        arguments = ["mount", str(self.source), str(self.mounted.path)]
        arguments += ["--state", str(self.mounted.state)]
        for name, size in self._settings.tiers:
            arguments += ["--tier", f"{self.mounted.tiers[name]}:{size}"]
        arguments += ["-o", ",".join(options), *(["--refresh"] if refreshed else [])]
        if kind == "given":
            given = str(self._aside / f"given-{self.mounted.pid}.snapshot")
            build = ("snapshot", "build", str(self.source), "-o", given)
            self._workers.monarch(*build, environment=self._environment)
            arguments += ["--snapshot", given]
        self._workers.monarch(*arguments, environment=self._environment)
        self.mounted.pid = self.ask("ping")["pid"]
        self.is_mounted = True
        self.inos = dict(self._numbered(self.mounted.path))
        return set(self.inos)

    def _numbered(self, directory: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from self._numbered(directory / entry.name, f"{prefix}{entry.name}/")
                else:
                    yield prefix + entry.name, entry.inode()

    def umount(self) -> None:
        self._workers.monarch("umount", str(self.mounted.path), environment=self._environment)
        self.is_mounted = False
        if str(self.mounted.path) in mounts():
            raise Wrong("the mount has outlived monarch umount")
        wait_until(lambda: not is_running(self.mounted.pid), "the daemon ends with its mount")

    def kill(self) -> None:
        os.kill(self.mounted.pid, signal.SIGKILL)
        self.is_mounted = False
        wait_until(lambda: not is_running(self.mounted.pid), "the killed daemon ends")

    def lose_state(self) -> None:
        """The next mount has no snapshot and no records."""
        shutil.rmtree(self.mounted.state)
        self.inos = {}

    def ask(self, verb: str, **params: Any) -> dict[str, Any]:
        """The control socket. Raises MonarchError."""
        return call(self.mounted.state / "control.sock", verb, params, timeout=PATIENCE_S)

    def account(self) -> dict[str, Any]:
        return self.ask("status")

    def settle(self) -> dict[str, Any]:
        """Wait until nothing is on its way to a tier."""
        report: dict[str, Any] = {}

        def quiet() -> bool:
            report.update(self.account())
            waiting = report["copies"]["queued"] + report["copies"]["running"]
            # What finds a full disk rests, longer and longer.
            return not waiting and (bool(self._settings.disk) or not report["residency"]["wanted"])

        wait_until(quiet, "no copy is under way")
        return report

    def closed(self) -> None:
        """Wait until the daemon, too, has closed what its readers have."""

        def left() -> list[str]:
            held = [f"{n}: {count}" for n, count in self.account()["handles"].items() if count]
            for fd in Path(f"/proc/{self.mounted.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    path = os.readlink(fd)
                    copied = path.partition("/copies-")[2].removesuffix(" (deleted)")
                    if "/" in copied or path.startswith(f"{self.source}/"):
                        held.append(path)
            return held

        try:
            wait_until(lambda: not left(), "all is closed")
        except Wrong as error:
            raise Wrong(f"{error}: {left()}") from error

    def check_log(self) -> None:
        """Raises Wrong for what the daemon must never say."""
        text = self.mounted.log_text
        for line in text[self._seen_of_log :].splitlines():
            if "Traceback" in line or " error " in line or " critical " in line:
                raise Wrong(f"the log: {text[text.index(line) :][:3000]}")
        self._seen_of_log = len(text)

    def reader(self, number: int) -> _Reader:
        return self._workers.reader(number)

    # -- the source ------------------------------------------------------------------------------

    def change(
        self, kind: str, name: str, content: bytes | None, *, restless: bool
    ) -> list[Version]:
        """Change a file at the source; the states that it was in on the way, the last the new one.

        ``content`` is what it shall hold; None for a change that leaves the bytes alone.
        ``restless``: a reader may see it while it is being changed.
        """
        path = self.source / name
        between: list[Version] = []
        before = os.lstat(path) if path.exists() else None
        while True:
            match kind:
                case "delete":
                    path.unlink()
                    return [Version(None, None, 0, 0, restless)]
                case "touch":
                    os.utime(path)
                case "chmod":
                    path.chmod(0o600 if path.stat().st_mode & 0o044 else 0o644)
                case "replace":
                    assert content is not None
                    path.parent.mkdir(exist_ok=True)
                    staged = self._aside / "new"
                    staged.write_bytes(content)
                    staged.rename(path)
                case _:
                    assert content is not None
                    between = _write(path, content)
            after = os.lstat(path)
            if before is None or _times(after) != _times(before):
                break
            # A change that cannot be detected (29): the clock of the file system has not moved on.
            time.sleep(0.002)
        content = path.read_bytes()
        return [*between, Version(content, _times(after), after.st_ino, after.st_mode, restless)]

    # -- the tiers ---------------------------------------------------------------------------------

    def damage(self, kind: str, first: str, second: str, dice: random.Random) -> bool:
        """Whether there was something to be damaged."""
        found = [path for name in (first, second) if (path := self.copy_of(name)) is not None]
        if kind == "stranger":
            return self._strangers(dice)
        if not found:
            return False
        path = found[0]
        size = path.stat().st_size
        match kind:
            case "delete":
                path.unlink()
            case "truncate":
                if not size:
                    return False
                os.truncate(path, dice.randrange(size))
            case "flip" | "rot":
                if not size:
                    return False
                place, status = dice.randrange(size), path.stat()
                with path.open("r+b", buffering=0) as file:
                    byte = os.pread(file.fileno(), 1, place)[0]
                    os.pwrite(file.fileno(), bytes([byte ^ 1]), place)
                if kind == "rot":
                    # As when the disk itself forgets: no process has written.
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            case "zeros":
                with path.open("r+b") as file:
                    file.write(bytes(size))
            case _:
                if len(found) < 2 or found[0] == found[1]:
                    return False
                other = found[1]
                if path.stat().st_dev != other.stat().st_dev:
                    return False
                aside = path.with_name("swapped")
                path.rename(aside)
                other.rename(path)
                aside.rename(other)
        return True

    def copy_of(self, name: str) -> Path | None:
        ino = self.inos.get(name)
        found = [tier[ino] for tier in copies(self.mounted).values() if ino in tier]
        return found[0] if found and ino is not None else None

    def _strangers(self, dice: random.Random) -> bool:
        for tier in self.mounted.tiers.values():
            # The disk may be full.
            with contextlib.suppress(OSError):
                for generation in tier.glob("monarch/*/copies-*"):
                    (generation / "2a").mkdir(exist_ok=True)
                    for name in ("2a/256042", "2a/512042"):
                        (generation / name).write_bytes(dice.randbytes(1000))
                if not self.is_mounted:
                    (own_directory(tier) / "stage/77.part").write_bytes(b"left")
        return True

    def strangers(self) -> list[Path]:
        return [
            path
            for tier in self.mounted.tiers.values()
            for pattern in ("*/256042", "*/512042")
            for path in tier.glob(f"monarch/*/copies-*/{pattern}")
        ]

    def fill(self, *, full: bool) -> None:
        """Take what is free on the disk of the first tier, or give it back."""
        if not self._settings.disk:
            return
        filler = self.mounted.tiers[self._settings.tiers[0][0]] / "filler"
        if not full:
            filler.unlink(missing_ok=True)
            return
        try:
            with filler.open("ab", buffering=0) as file:
                while file.write(bytes(65_536)):
                    pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _write(path: Path, content: bytes) -> list[Version]:
    """Write in place; the state in between, if the size changes."""
    old = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        written = file.write(content)
        assert written == len(content)
        if len(old) <= len(content):
            return []
        status = os.fstat(file.fileno())
        file.truncate(len(content))
    if not content:
        return []
    return [Version(content + old[len(content) :], None, status.st_ino, status.st_mode, True)]


def _times(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def wait_until(holds: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Raises Wrong if it does not come true."""
    if not becomes_true(holds, timeout_s=timeout_s, step_s=0.004):
        raise Wrong(f"not within {timeout_s:.0f} s: {what}")


@contextmanager
def rig(directory: Path, settings: Settings, workers: Workers) -> Iterator[Rig]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    made = Rig(directory, settings, workers)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


def is_refused(error: MonarchError) -> bool:
    """Whether the daemon only does not know a name that was asked for."""
    return "no such file" in str(error)
