"""Files that commands write and read as a whole, on full disks, pipes and what users name."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from monarch.cli import json_files, written_files
from monarch.cli.json_files import read_json
from monarch.cli.written_files import replace_whole, require_writable
from monarch.errors import UsageError
from monarch.posix import unfinished
from monarch.posix.files import closing_fd
from monarch.posix.unfinished import is_locked, remove_if_left

CONTENT = "a page of ü\n" * 1000


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    replace_whole(out, CONTENT)
    assert out.read_text("utf-8") == CONTENT
    write_new = written_files._write_new

    def half(file: BinaryIO, content: bytes, mode: int | None) -> None:
        write_new(file, content[: len(content) // 2], mode)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(written_files, "_write_new", half)
    with pytest.raises(OSError, match=r"No space.*page\.html"):
        replace_whole(out, "another page")
    assert out.read_text("utf-8") == CONTENT and list(tmp_path.iterdir()) == [out]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    for content in ("first", b"second"):
        replace_whole(tmp_path / "link", content)
    assert (tmp_path / "there").read_text() == "second" and (tmp_path / "link").is_symlink()


def test_a_file_keeps_its_mode_and_a_link_beside_it_is_not_followed(tmp_path: Path) -> None:
    out, victim = tmp_path / "page.html", tmp_path / "victim"
    out.write_text("old")
    out.chmod(0o604)
    victim.write_text("mine")
    part = tmp_path / f".monarch.{os.getpid()}.part"
    part.symlink_to(victim)
    replace_whole(out, "new")
    assert (out.read_text(), victim.read_text()) == ("new", "mine")
    assert stat.S_IMODE(out.stat().st_mode) == 0o604 and not part.is_symlink()


_KILLED = """
import os, signal, sys
from pathlib import Path
from monarch.cli import written_files
def killed(file, content, mode):
    file.write(content[:1])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
written_files._write_new = killed
written_files.replace_whole(Path(sys.argv[1]), "new")
"""


def test_the_file_of_a_killed_command_is_removed_and_that_of_a_running_one_stays(
    tmp_path: Path,
) -> None:
    out, victim = tmp_path / "page.html", tmp_path / "victim"
    victim.write_text("mine")
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(out)])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".monarch.*.part"))) == 1
    running, link = tmp_path / ".monarch.1.part", tmp_path / ".monarch.2.part"
    link.symlink_to(victim)
    with unfinished._locked_file(running):
        replace_whole(out, "new")
        assert set(tmp_path.iterdir()) == {out, victim, running, link}
    assert (out.read_text(), victim.read_text()) == ("new", "mine")
    replace_whole(out, "newer")
    assert set(tmp_path.iterdir()) == {out, victim, link}


def test_a_part_that_another_command_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def removed(path: Path, fd: int) -> bool:
        if not seen:
            remove_if_left(path, os.O_RDWR, os.unlink)
        seen.append(is_locked(path, fd))
        return seen[-1]

    monkeypatch.setattr(unfinished, "is_locked", removed)
    replace_whole(tmp_path / "page.html", CONTENT)
    assert seen == [False, True] and (tmp_path / "page.html").read_text("utf-8") == CONTENT


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"missing/page\.html"):
        replace_whole(tmp_path / "missing/page.html", CONTENT)


def test_a_check_leaves_a_link_without_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    require_writable(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "there").exists()


@pytest.mark.parametrize("kind", ["pipe", "file", "null"])
def test_standard_output_is_written_whatever_it_is(tmp_path: Path, kind: str) -> None:
    program = (
        "from pathlib import Path; from monarch.cli.written_files import replace_whole;"
        "replace_whole(Path('/dev/stdout'), 'a page')"
    )
    stdout: int = {"pipe": subprocess.PIPE, "null": subprocess.DEVNULL}.get(kind, 0)
    if kind == "file":
        stdout = os.open(tmp_path / "page", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=stdout, check=True, text=True)
    finally:
        if kind == "file":
            os.close(stdout)
    assert (done.stdout or "a page") == "a page"
    assert kind != "file" or (tmp_path / "page").read_text() == "a page"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not JSON"),
        (b'{"a": [1, 2', "is not JSON"),
        (b"[" * 100_000, "nested too deeply|is not JSON"),
        (b"\xff\xfe\x00", "cannot be used"),
        (b"1" * 5000, "cannot be used"),
        (b" " * 2000 + b"1", "larger than"),
        (b'{"a": ["\\ud800"]}', "an unpaired surrogate"),
        (b'{"\\udfff": 1}', "an unpaired surrogate"),
        (b'"\xed\xa0\x80"', "an unpaired surrogate"),
    ],
)
def test_a_file_that_is_no_json_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, complaint: str
) -> None:
    monkeypatch.setattr(json_files, "MOST_BYTES", 2000 if content.startswith(b" ") else 200_000)
    (tmp_path / "a\nb").write_bytes(content)
    with pytest.raises(UsageError, match=complaint) as raised:
        read_json(tmp_path / "a\nb", made_by="monarch analyze run")
    assert "\n" not in str(raised.value) and "`monarch analyze run` writes" in str(raised.value)


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="larger than"):
        read_json(Path("/dev/zero"), made_by="monarch")


def test_a_pipe_with_a_name_is_refused_and_that_of_a_shell_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="fifo is not a regular file"):
        read_json(tmp_path / "fifo", made_by="monarch")
    reader, writer = os.pipe()
    with closing_fd(reader):
        with closing_fd(writer):
            os.write(writer, b"[1]")
        assert read_json(Path(f"/dev/fd/{reader}"), made_by="monarch") == [1]
