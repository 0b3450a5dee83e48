"""Files that commands write and read as a whole, on full disks, pipes and what users name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch.cli import json_files
from monarch.cli.json_files import read_json
from monarch.cli.written_files import replace_whole
from monarch.errors import UsageError

CONTENT = "a page of ü\n" * 1000


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    replace_whole(out, CONTENT)
    assert out.read_text("utf-8") == CONTENT
    write_bytes = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        write_bytes(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match=r"No space.*page\.html"):
        replace_whole(out, "another page")
    assert out.read_text("utf-8") == CONTENT and list(tmp_path.iterdir()) == [out]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    for content in ("first", b"second"):
        replace_whole(tmp_path / "link", content)
    assert (tmp_path / "there").read_text() == "second" and (tmp_path / "link").is_symlink()


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
