"""The command line in a real terminal: ``--watch``, resizing, completion by bash, and nohup."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, mounts, processes
from tests.equipment.waiting import readable
from tests.mount.command import needs_fuse, registered, wait_until

pytestmark = [needs_fuse, pytest.mark.modes("relay")]

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\a]")


class Terminal:
    """The other side of the terminal that a process has: what is shown, and what is typed."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.master = master
        self.process = process
        self.shown = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str, *, timeout_s: float = 100) -> str:
        """Read until the pattern was shown; all that was shown up to its end, and forget that."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.shown)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not shown: {self.shown!r}"
            if readable(self.master, within_s=left):
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text


@contextmanager
def terminal(
    command: Sequence[str], environment: Mapping[str, str], directory: Path
) -> Iterator[Terminal]:
    """``command`` in a session of its own, with a terminal of 24 rows and 80 columns."""
    master, slave = pty.openpty()

    def take_over() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    names = ("COLUMNS", "LINES", "NO_COLOR")
    plain = {name: value for name, value in environment.items() if name not in names}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=take_over,
        env={**plain, "TERM": "xterm", "INPUTRC": "/dev/null"},
        cwd=directory,
    )
    os.close(slave)
    shown = Terminal(master, process)
    shown.resize(24, 80)
    try:
        yield shown
    finally:
        shown.hang_up()
        process.kill()
        process.wait()


def lines_of(frame: str) -> list[str]:
    return [_ESCAPES.sub("", line).rstrip() for line in frame.split("\n")]


@pytest.mark.finding("B8")
def test_watching_follows_the_size_of_the_terminal_and_leaves_it_as_it_was(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    made = monarch.mount(tree({"a": b"content"}))
    command = [sys.executable, "-m", "monarch", "status", "--watch", str(made.path)]
    with terminal(command, monarch.environment(), tmp_path) as shown:
        begin = shown.until(re.escape("\x1b[?1049h"))
        assert "\x1b[?1049l" not in begin
        for rows, columns in ((24, 80), (12, 50), (60, 120)):
            shown.resize(rows, columns)
            # The frame under way may be of the size before; the second one is of this size.
            for _ in range(2):
                shown.until(re.escape("\x1b[H"))
            frame = lines_of(shown.until(re.escape("\x1b[H")).removesuffix("\x1b[H"))
            assert frame[0] == "health: ok"
            assert max(map(len, frame)) <= columns
            assert len(frame) <= rows
            assert any("more lines in a higher window" in line for line in frame) == (rows < 60)
        shown.type("\x03")
        shown.until(re.escape("\x1b[?1049l"))
        assert shown.process.wait(100) == 0


def command_of(directory: Path) -> Path:
    """A directory with a command named ``monarch``, for PATH."""
    place = directory / "bin"
    place.mkdir()
    for name, arguments in (("python", ""), ("monarch", "-m monarch")):
        command = place / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        command.chmod(0o755)
    return place


@contextmanager
def bash(monarch: MonarchCommand, directory: Path) -> Iterator[Terminal]:
    """An interactive bash whose prompt is ``$> ``."""
    environment = monarch.environment()
    path = f"{command_of(directory)}:{environment['PATH']}"
    command = ["bash", "--norc", "--noprofile", "-i"]
    started = {**environment, "PATH": path, "PS1": "$> ", "HISTFILE": "/dev/null"}
    with terminal(command, started, directory) as shown:
        shown.until(r"\$> ")
        yield shown


@needs_bash
@pytest.mark.finding("B12")
@pytest.mark.promise(114)
def test_the_tab_key_completes_in_an_interactive_bash(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    made = monarch.mount(tree({"a": b"content"}))
    with bash(monarch, tmp_path) as shown:
        shown.type('eval "$(monarch completion bash)"; echo rea""dy\n')
        shown.until(r"ready\r?\n")
        shown.until(r"\$> ")
        mount = str(made.path)
        for typed, completed in (
            ("monarch umo", "monarch umount "),
            (f"monarch status {mount[:-1]}", f"monarch status {mount} "),
            ("monarch mount sour", "monarch mount source/"),
            ("monarch mount -o limits.copy_wor", "monarch mount -o limits.copy_workers="),
        ):
            shown.type(typed + "\t")
            shown.until(re.escape(completed))
            # What is typed next stands where bash has put the cursor.
            shown.type("X")
            assert shown.until("X") == "X", typed
            shown.type("\x15")
        shown.type("exit\n")
        assert shown.process.wait(100) == 0


def running(monarch: MonarchCommand) -> list[str]:
    return list(processes("MONARCH_TEST_CASE", monarch.case).values())


@needs_bash
def test_nohup_and_the_background_keep_a_mount_when_the_terminal_goes(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source, mnt = tree({"a": b"content"}), tmp_path / "mnt"
    mnt.mkdir()
    made: Mounted = registered(monarch, mnt, source, tmp_path / "state", {"t": tmp_path / "t"})
    with bash(monarch, tmp_path) as shown:
        arguments = f"source mnt --state {made.state} --tier {tmp_path}/t:1MiB"
        shown.type(f"nohup monarch mount {arguments} > nohup.log 2>&1 &\n")
        shown.until(r"\[1\] \d+")
        # Before that it is the shell's own child, which the hang-up would end.
        wait_until(
            lambda: any("-m monarch mount source" in line for line in running(monarch)),
            "it is not started",
        )
        shown.hang_up()
        shown.process.wait(100)
    wait_until(lambda: str(mnt) in mounts(), "it was not mounted")
    wait_until(lambda: "source is at" in (tmp_path / "nohup.log").read_text(), "it does not say so")
    made.pid = int(made.status()["pid"])
    assert (mnt / "a").read_bytes() == b"content"
    made.umount()
