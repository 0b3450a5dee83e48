"""``monarch snapshot`` used by a person and by a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MONARCH = [sys.executable, "-m", "monarch", "snapshot"]


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*MONARCH, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def built(source: Path, file: Path) -> Path:
    (source / "line\nbreak \x1b[31m").write_bytes(b"12345")
    (source / "directory").mkdir()
    run("build", source, "-o", file)
    return file


def test_build_and_info(source: Path, built: Path) -> None:
    report = json.loads(run("info", built, "--json").stdout)
    assert (report["files"], report["directories"], report["bytes_total"]) == (1, 2, 5)
    assert report["source"] == str(source)
    assert report["snapshot_bytes"] == built.stat().st_size
    shown = run("info", built).stdout
    assert f"source          {source}" in shown
    assert run("build", source, "-o", built).stdout.startswith(f"{built}: 1 file, 2 directories")
    assert json.loads(run("build", source, "-o", built, "--json").stdout)["entries"] == 3


def test_verify_and_diff_answer_with_their_exit_code(
    source: Path, built: Path, tmp_path: Path
) -> None:
    assert run("verify", source, built).stdout == "no difference\n"
    assert json.loads(run("verify", source, built, "--json").stdout) == []
    (source / "line\nbreak \x1b[31m").write_bytes(b"123456")
    (source / "directory" / "\udcff").touch()
    done = run("verify", source, built, code=1)
    assert done.stdout.splitlines() == [
        r"new           directory/\xff",
        r"changed-size  line\nbreak \x1b[31m  (size, mtime, ctime: 5 -> 6 bytes)",
    ]
    assert "2 differences: 1 changed-size, 1 new" in done.stderr
    assert len(json.loads(run("verify", source, built, "--json", code=1).stdout)) == 2
    assert run("verify", source, built, "--sample", 3, code=1).stdout == done.stdout
    later = tmp_path / "later"
    run("build", source, "-o", later)
    assert run("diff", built, later, code=1).stdout.count("\n") == 2
    assert run("diff", later, later).stdout == "no difference\n"


def test_a_snapshot_may_have_a_name_that_is_not_utf_8(source: Path, tmp_path: Path) -> None:
    named = tmp_path / os.fsdecode(b"a\xff")
    run("build", source, "-o", named)
    run("refresh", source, named)
    assert run("verify", source, named).stdout == "no difference\n"
    assert json.loads(run("info", named, "--json").stdout)["source"] == str(source)


def test_refresh(source: Path, built: Path) -> None:
    (source / "new").touch()
    report = json.loads(run("refresh", source, built, "--quick", "--json").stdout)
    assert (report["added"], report["removed"], report["changed"]) == (1, 0, 0)
    assert report["info"]["files"] == 2
    assert "0 added, 0 removed, 0 changed" in run("refresh", source, built).stdout
    run("verify", source, built)


def test_failures_are_one_line_and_a_code(source: Path, file: Path) -> None:
    for arguments, code in (
        (("build", source / "nothing", "-o", file), 4),
        (("build", source, "-o", file / "no" / "directory"), 5),
        (("info", file), 5),
        (("verify", source, file), 5),
        (("build", source), 2),
    ):
        done = run(*arguments, code=code)
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("monarch: ")


@pytest.mark.parametrize("verb", ["build", "info", "verify", "diff", "refresh"])
def test_help_has_an_example(verb: str) -> None:
    assert f"monarch snapshot {verb} " in run(verb, "--help").stdout.split("Example")[1]


@pytest.mark.finding("D10")
@pytest.mark.finding("B22")
def test_build_takes_a_mode_and_refuses_what_it_cannot_do(source: Path, file: Path) -> None:
    run("build", source, "-o", file, "--mode", "0640")
    assert file.stat().st_mode & 0o777 == 0o640
    for wrong in ("rw", "0999", "04755", "-1"):
        assert (
            "give three octal digits"
            in run("build", source, "-o", file, f"--mode={wrong}", code=2).stderr
        )
    precious = file.with_name("notes.txt")
    precious.write_text("precious")
    fifo = file.with_name("fifo")
    os.mkfifo(fifo)
    for taken in (precious, fifo):
        assert "is not a snapshot" in run("build", source, "-o", taken, code=2).stderr
    assert precious.read_text() == "precious" and fifo.is_fifo()
    # A damaged one is built anew.
    with file.open("r+b") as damaged:
        damaged.write(bytes(4096))
    run("build", source, "-o", file)
    run("info", file)
    done = run("build", source, "-o", source / "x", code=2)
    assert done.stderr.count("\n") == 1 and "name a file outside it" in done.stderr
