"""The command ``monarch pack``: its output, its exit codes, and one line for each failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from monarch.cli.pack import pack as command
from monarch.errors import PackError, SourceError
from monarch.posix import signals
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until
from tests.packs.test_unpack import as_user, needs_root
from tests.packs.trees import contents, make_tree


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments], standalone_mode=False)


def test_the_word_build_may_be_left_out(made: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--chunk", "8KiB", "--seed", "7", "-j", "2")
    short = run(made[0], "-o", tmp_path / "short", *options)
    long = run("build", "-o", tmp_path / "long", *options, made[0], "--json")
    assert not short.exception
    assert not long.exception
    assert contents(tmp_path / "short") == contents(tmp_path / "long") == contents(made[1])
    assert "read from the source in" in short.stdout
    again = run(made[0], "-o", tmp_path / "short", *options)
    assert "complete already: no file was read" in again.stdout
    raw = json.loads(long.stdout)
    assert raw["pack"]["seed"] == 7
    assert raw["bytes_read"] == raw["pack"]["bytes"]


def test_a_file_that_could_not_be_read_has_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(tmp_path / "source", files=4)
    name = "class0/line\nbreak"
    (source / name).write_bytes(b"x")

    def opened(root: int, path: bytes, flags: int) -> int:
        if path == name.encode():
            raise PermissionError(13, os.strerror(13))
        return open_beneath(root, path, flags)

    from monarch.packs import reading

    open_beneath = reading.open_beneath
    monkeypatch.setattr(reading, "open_beneath", opened)
    result = run(source, "-o", tmp_path / "pack", "-q")
    assert isinstance(result.exception, SourceError)
    assert result.exception.exit_code == 4
    (line,) = result.stderr.splitlines()
    assert line.endswith("class0/line\\nbreak: it cannot be opened: Permission denied")
    assert "run the same command again" in str(result.exception)


@needs_root
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("{closed}", "-o", "{top}/pack"), 4),
        (("{top}/tree", "-o", "{closed}"), 14),
        (("info", "{closed}"), 14),
        (("verify", "{closed}"), 14),
        (("unpack", "{closed}", "-o", "{top}/again"), 14),
        (("index", "--rebuild", "{closed}"), 14),
    ],
)
def test_a_directory_that_the_user_may_not_read_is_no_mistake_of_the_command_line(
    arguments: tuple[str, ...], code: int
) -> None:
    # The directories of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "tree").mkdir()
        (top / "closed").mkdir(mode=0o300)
        words = [word.format(top=top, closed=top / "closed") for word in arguments]
        assert exit_code_as(1234, *words) == code
        assert sorted(os.listdir(top)) == ["closed", "tree"]
        assert os.listdir(top / "closed") == []


def exit_code_as(user: int, *arguments: str) -> int:
    """The exit code for an ordinary user, in a process of its own: the real user decides, too."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            error = run(*arguments).exception
            code = getattr(error, "exit_code", 98) if error is not None else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_root
def test_a_directory_in_which_the_user_may_not_write_has_a_remedy_that_helps() -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "tree").mkdir()
        (top / "of root").mkdir(mode=0o755)
        with as_user(1234):
            result = run(top / "tree", "-o", top / "of root")
        assert isinstance(result.exception, PackError)
        assert str(result.exception).endswith("denied; name a directory in which you may write")


@pytest.mark.parametrize("size", ["0", "1KiB", "2GiB", "many"])
def test_a_size_that_no_chunk_has_is_refused(tmp_path: Path, size: str) -> None:
    result = run(tmp_path, "-o", tmp_path / "pack", "--chunk", size)
    assert "size" in str(result.exception)
    assert not (tmp_path / "pack").exists()


def test_info_shows_how_well_the_pack_mixes(made: tuple[Path, Path]) -> None:
    text = run("info", made[1], "--batch", "16")
    assert not text.exception
    assert "by the directories in /; batches of 16 files" in text.stdout
    raw = json.loads(run("info", made[1], "--json", "--batch", "16").stdout)
    assert raw["files"] > 60
    groups = raw["mixing"]["groups"]
    assert [row["group"] for row in groups] == [1, 8, 40, 100, None]
    shared = [row["shared"] for row in groups]
    assert shared == sorted(shared, reverse=True)
    assert 1 < groups[0]["labels"] < 8


def test_info_says_that_the_figures_of_a_batch_that_does_not_exist_are_unknown(
    made: tuple[Path, Path],
) -> None:
    text = run("info", made[1], "--batch", "4096").stdout
    assert "fewer than 4,096 files have bytes; give a smaller --batch" in text
    raw = json.loads(run("info", made[1], "--json", "--batch", "4096").stdout)
    assert {row["labels"] for row in raw["mixing"]["groups"]} == {None}
    assert {row["shared"] for row in raw["mixing"]["groups"]} == {None}


def test_verify_and_rebuild_name_the_damage_and_end_with_1(own: Path, tmp_path: Path) -> None:
    assert run("verify", own, "-q").return_value == 0
    assert run("index", own).return_value == 0
    os.truncate(own / "chunks/000002.chunk", 3000)
    for arguments in (("verify", own), ("index", "--rebuild", own)):
        result = run(*arguments, "-q")
        assert result.return_value == 1
        assert result.stdout.startswith("chunks/000002.chunk: it is cut off")
    raw = json.loads(run("verify", own, "-q", "--json").stdout)
    assert raw["damaged"] == len(raw["damage"]) > 1
    result = run("unpack", own, "-o", tmp_path / "again", "-q")
    assert isinstance(result.exception, PackError)
    assert result.exception.exit_code == 14
    assert not (tmp_path / "again").exists()


PROGRAM = """
import sys
from monarch.cli.main import main
from monarch.posix import signals
signals._PATIENCE_S = 0.2
sys.argv[0] = "monarch"
main()
"""


@pytest.mark.parametrize("command", ["build", "verify", "unpack"])
def test_a_signal_ends_a_command_whose_files_hang(
    command: str, made: tuple[Path, Path], tmp_path: Path
) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    with SlowSource(made[0] if command == "build" else made[1], tmp_path / "slow") as slow:
        slow.rules("hang read jpg$", "hang read chunk$")
        arguments = [command, str(slow.path)]
        if command != "verify":
            arguments += ["-o", str(tmp_path / "to")]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "pack", *arguments, "-q"], stderr=subprocess.PIPE
        )
        try:
            wait_until(lambda: slow.counters()["hanging"] > 0, "a read hangs", timeout_s=60)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            slow.rules()
    assert process.returncode == 130
    assert said == b"monarch: interrupted: a file system does not answer\n"


def test_several_signals_end_a_command_once_and_everything_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process that does not heed a signal in this time, stopped or not, is ended.
    monkeypatch.setattr(signals, "_PATIENCE_S", 600.0)
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = [*map(signal.getsignal, numbers), signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    threads = threading.active_count()
    interrupts = 0
    for _ in range(3):
        try:
            with signals.interruptible_at_once():
                try:
                    for number in numbers[:2]:
                        os.kill(os.getpid(), number)
                    wait_until(lambda: False, "never")
                except KeyboardInterrupt:
                    interrupts += 1
                    os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("a second interrupt")
    assert interrupts == 3
    after = [*map(signal.getsignal, numbers), signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    assert after == before
    assert threading.active_count() <= threads


def test_unpack_counts_the_files(made: tuple[Path, Path], tmp_path: Path) -> None:
    result = run("unpack", made[1], "-o", tmp_path / "again", "-q", "--json")
    raw = json.loads(result.stdout)
    assert raw["files"] == sum(
        1 for path in made[0].rglob("*") if path.is_file() and not path.is_symlink()
    )
