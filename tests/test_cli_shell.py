"""The frame of all commands: help, mistakes, exit codes, completion, and output."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monarch import errors
from monarch.cli import main, output
from monarch.cli.analyze import UNSURE
from monarch.cli.status import CHECK_CODES
from monarch.control.registry import MountRecord, Registry
from tests.conftest import fork_server

HEAVY = {"pyfuse3", "lmdb", "trio", "pydantic", "yaml", "rich", "numpy", "prometheus_client"}


NOSPACE = ["nospace"]


def monarch(*arguments: str | bytes, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "monarch", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environ},
    )


def forked(*arguments: str | bytes, **environ: str) -> subprocess.CompletedProcess[str]:
    """As ``monarch``, where the start of Python does not matter."""
    return fork_server.run([*map(os.fsdecode, arguments)], {**os.environ, **environ}, 100)


def loaded_by(*arguments: str, **environ: str) -> set[str]:
    """The modules that a command line imports."""
    code = f"""
import atexit, sys
atexit.register(lambda: sys.stderr.write("\\n".join(sys.modules)))
sys.argv = ["monarch", *{arguments!r}]
from monarch.cli.main import main
sys.exit(main())
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environ},
    )
    assert "monarch.cli.main" in run.stderr
    return set(run.stderr.splitlines())


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_tells_every_verb_and_exit_code(option: str) -> None:
    run = monarch(option)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: monarch ")
    for verb in main.VERBS:
        assert f"\n  {verb} " in run.stdout
    for code in main.EXIT_CODES:
        assert f"\n  {code} " in run.stdout


def test_help_and_completion_load_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("--help")
    assert not HEAVY & loaded_by("--version")
    assert not HEAVY & loaded_by("no-such-verb")
    words = {"_MONARCH_COMPLETE": "bash_complete", "COMP_WORDS": "monarch ", "COMP_CWORD": "1"}
    assert not HEAVY & loaded_by(**words)


def test_help_is_fast() -> None:
    # Time of the processor, which other work on the machine does not stretch.
    before = os.times().children_user
    assert monarch("--help").returncode == 0
    assert os.times().children_user - before < 1.0


def test_every_verb_of_the_table_can_be_loaded_and_tells_its_help() -> None:
    for verb, entry in main.VERBS.items():
        run = forked(verb, "--help")
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith(f"Usage: monarch {verb} ")
        assert entry.help.endswith(".")


def test_every_error_has_its_exit_code_in_the_table() -> None:
    classes = [errors.MonarchError]
    for cls in classes:
        classes += cls.__subclasses__()
    answers = {0, *CHECK_CODES.values(), UNSURE, 130}
    assert {cls.exit_code for cls in classes} | answers == set(main.EXIT_CODES)


def test_version() -> None:
    run = monarch("--version")
    assert run.returncode == 0
    assert run.stdout.startswith("monarch ")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "missing command (see 'monarch --help')"),
        (["mout"], "no such command 'mout'; did you mean 'mount'? (see 'monarch --help')"),
        (["umuont", "/x"], "did you mean 'umount'?"),
        (["xyzzy"], "no such command 'xyzzy'; there are mount, umount"),
        ([""], "no such command ''"),
        (["a\nb\x1b[2J"], "no such command 'a\\nb\\x1b[2J'"),
        ([b"caf\xe9"], "no such command 'caf\\udce9'"),
        (["--verison"], "(see 'monarch --help')"),
        (["completion"], "(see 'monarch completion --help')"),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (["completion", "bash", "more"], "unexpected extra argument"),
        (["completion", "--loud", "bash"], "no such option"),
    ],
)
@pytest.mark.fault("I2")
def test_a_wrong_command_line_is_reported_in_one_line(
    arguments: list[str | bytes], reported: str
) -> None:
    run = forked(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("monarch: ")
    assert run.stderr.count("\n") == 1
    assert "--help')" in run.stderr
    assert reported in run.stderr


@pytest.mark.finding("B7")
@pytest.mark.parametrize("group", ["ckpt", "snapshot"])
def test_a_group_alone_shows_its_help_on_several_lines(group: str) -> None:
    run = forked(group)
    assert (run.returncode, run.stdout) == (2, "")
    lines = run.stderr.splitlines()
    assert lines[0].lower().startswith(f"usage: monarch {group} ")
    assert "Commands:" in lines and len(lines) > 10


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_names_our_variable(shell: str) -> None:
    run = forked("completion", shell)
    assert run.returncode == 0
    assert f"_MONARCH_COMPLETE={shell}_complete" in run.stdout


def test_completion_offers_the_verbs_that_begin_so() -> None:
    words = {"_MONARCH_COMPLETE": "bash_complete", "COMP_WORDS": "monarch s", "COMP_CWORD": "1"}
    expected = ["plain,status", "plain,snapshot", "plain,simulate"]
    assert forked(**words).stdout.split() == expected


def completed(completion: str, directory: Path, *words: str) -> tuple[list[str], list[str]]:
    """What bash offers after these words: its own list, and the names that it adds by itself.
    ``completion`` is the script of `monarch completion bash`."""
    script = """
eval "$COMPLETION"
compopt() { added=$2; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_monarch_completion monarch "${COMP_WORDS[COMP_CWORD]}"
[ ${#COMPREPLY[@]} -gt 0 ] && printf '%s\\n' "${COMPREPLY[@]}"
echo --
word=${COMP_WORDS[COMP_CWORD]}
case $added in dirnames) compgen -d -- "$word";; default) compgen -f -- "$word";; esac
[ "$added" = nospace ] && echo nospace
true
"""
    (directory / "bin").mkdir(exist_ok=True)
    command = directory / "bin" / "monarch"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m monarch "$@"\n')
    command.chmod(0o755)
    run = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", "monarch", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=directory,
        env={
            **os.environ,
            "COMPLETION": completion,
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(main.__file__).parents[2]),
            "MONARCH_STATE_ROOT": str(directory / "state"),
            "XDG_CONFIG_HOME": str(directory / "config"),
        },
    )
    assert (run.returncode, run.stderr) == (0, "")
    ours, _, added = run.stdout.partition("--\n")
    return ours.split(), added.split()


@pytest.mark.finding("B12")
@pytest.mark.promise(114)
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_files_mounts_names_and_settings(tmp_path: Path) -> None:
    for name in ("source", "mnt", "config/monarch"):
        (tmp_path / name).mkdir(parents=True)
    text = "mounts: {imagenet: {source: /pfs/i, mountpoint: /mnt/i}}\n"
    for name in ("monarch.yaml", "config/monarch/monarch.yaml"):
        (tmp_path / name).write_text(text)
    record = MountRecord("/mnt/data", "/pfs/i", 1, 1, "/s", "/st", "/log", 1)
    Registry(tmp_path / "state").add(record)
    completion = forked("completion", "bash").stdout
    for words, expected in (
        (("mount", "so"), ([], ["source"])),
        (("mount", "im"), (["imagenet"], [])),
        (("mount", "source", "mn"), ([], ["mnt"])),
        (("mount", "--tier", "so"), ([], ["source"])),
        (("mount", "--state", "so"), ([], ["source"])),
        (("mount", "--snapshot", "mona"), ([], ["monarch.yaml"])),
        (("mount", "-c", "mona"), ([], ["monarch.yaml"])),
        (("mount", "-c", "monarch.yaml", ""), (["imagenet"], [])),
        (("mount", "-o", "allow_o"), (["allow_other"], [])),
        (
            ("mount", "-o", "allow_other,limits.copy"),
            (["allow_other,limits.copy_workers="], NOSPACE),
        ),
        (("umount", "/"), (["/mnt/data"], [])),
        (("status", ""), (["/mnt/data"], [])),
        (("warm", "/mnt/d"), (["/mnt/data"], [])),
        (("ckpt", "ls", "/mnt/d"), (["/mnt/data"], [])),
        (("umount", "mn"), ([], ["mnt"])),
    ):
        assert completed(completion, tmp_path, *words) == expected, words


def test_standard_streams_that_are_closed_are_those_of_dev_null(tmp_path: Path) -> None:
    program = (
        "import os, sys; sys.argv[1:] = ['--version']; from monarch.cli.main import main;"
        "code = main(); file = open(os.environ['REPORT'], 'w');"
        "print(code, *(os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)),"
        " *map(os.get_inheritable, range(3)), file=file)"
    )
    report = tmp_path / "report"
    closed = 'exec "$0" -c "$1" <&- >&- 2>&-'
    environment = {**os.environ, "REPORT": str(report)}
    subprocess.run(["sh", "-c", closed, sys.executable, program], env=environment, timeout=100)
    assert report.read_text().split() == ["0", *["/dev/null"] * 3, *["True"] * 3]


def test_a_reader_that_leaves_early_hears_no_complaint() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        run = subprocess.run(
            [sys.executable, "-m", "monarch", "--help"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
    assert run.stderr == b""


def test_a_full_disk_under_the_output_is_reported() -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [sys.executable, "-m", "monarch", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
    assert run.returncode == 1
    assert run.stderr.startswith(b"monarch: ")
    assert run.stderr.endswith(b"No space left on device\n")
    assert run.stderr.count(b"\n") == 1


RAISED = {
    "MonarchError('a failed', hint='do b')": (1, "monarch: a failed; do b\n"),
    "ConfigError(['f:1: x', 'f:2: y'])": (2, "monarch: f:1: x\nmonarch: f:2: y\n"),
    "MountPointError('m')": (3, "monarch: m\n"),
    "BusyError('two files\\nare open')": (10, "monarch: two files\\nare open\n"),
    "KeyboardInterrupt()": (130, "\n"),
    "PermissionError(13, 'Permission denied', '/x')": (1, "monarch: /x: Permission denied\n"),
}


@pytest.mark.parametrize(("raised", "answer"), RAISED.items(), ids=RAISED.keys())
def test_an_error_of_a_verb_becomes_lines_and_an_exit_code(
    raised: str, answer: tuple[int, str], tmp_path: Path
) -> None:
    assert run_verb(f"raise {raised}", tmp_path) == answer


def test_a_verb_answers_with_its_exit_code(tmp_path: Path) -> None:
    assert run_verb("return 1", tmp_path) == (1, "")
    assert run_verb("return None", tmp_path) == (0, "")
    assert run_verb("click.get_current_context().exit(7)", tmp_path) == (7, "")


def run_verb(body: str, tmp_path: Path) -> tuple[int, str]:
    """Runs a verb of our own through the entry point: its exit code and its output."""
    (tmp_path / "ours.py").write_text(
        f"import click\nfrom monarch.errors import *\n@click.command()\ndef verb():\n    {body}\n"
    )
    code = """
import sys
from monarch.cli import main
main.VERBS["ours"] = main.Verb("ours:verb", "Ours.")
sys.argv = ["monarch", "ours"]
sys.exit(main.main())
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    return run.returncode, run.stderr


# --- What verbs print with ------------------------------------------------------------------------


def test_json_is_ascii_whatever_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"name": b"a\n\xff", "path": Path("/x"), "text": "grün", "n": [1, None]})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {
        "name": "a\\n\\xff",
        "path": "/x",
        "text": "grün",
        "n": [1, None],
    }


def test_json_of_an_unsupported_type_is_a_bug() -> None:
    with pytest.raises(TypeError, match="set has no form in JSON"):
        output.emit_json({1, 2})


def test_progress_without_a_terminal_is_a_line_now_and_then_and_the_last() -> None:
    now = 0.0
    stream = io.StringIO()
    lines = output.ProgressLines(stream, clock=lambda: now)
    for second in range(12):
        now = float(second)
        lines(second, 100 if second > 6 else None, "scanning\n")
    lines.finish()
    lines.finish()
    assert stream.getvalue().splitlines() == [
        "scanning\\n: 5, 1/s",
        "scanning\\n: 10 of 100, 1/s",
        "scanning\\n: 11 of 100, 1/s",
    ]


def test_progress_of_slow_steps_has_no_rate_of_none() -> None:
    now = 0.0
    stream = io.StringIO()
    lines = output.ProgressLines(stream, clock=lambda: now)
    for done in range(3):
        now = 4.0 * done
        lines(done, 2, "runs")
    lines.finish()
    assert stream.getvalue().splitlines() == ["runs: 2 of 2"]


def test_progress_tells_its_end_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with output.progress_bar() as progress:
        progress(1, 2, "copying")
        progress(2, 2, "copying")
    assert capsys.readouterr().err == "copying: 2 of 2\n"


def test_quiet_progress_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress_bar(quiet=True) as progress:
        progress(1, 2, "copying")
    assert capsys.readouterr().err == ""


@pytest.mark.finding("B10")
def test_nothing_is_shown_before_the_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for of_bytes in (False, True):
        with output.progress_bar(of_bytes=of_bytes):
            pass
    assert capsys.readouterr().err == ""


@pytest.mark.finding("F5")
def test_a_scan_that_was_interrupted_says_how_far_it_was(tmp_path: Path) -> None:
    reported: list[tuple[int, int | None, str]] = []
    scanning = output.Scanning(tmp_path / "a\nb")
    assert scanning.interrupted() == "nothing was scanned yet"
    scanning.bar = lambda *step: reported.append(step)
    scanning(12_345, None, "entries")
    assert reported == [(12_345, None, f"scanning {tmp_path}/a\\nb, entries")]
    assert scanning.interrupted() == (
        "the scan had read 12,345 entries, which are not kept: the next one starts again"
    )


def test_progress_on_a_terminal_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with output.progress_bar() as progress:
        progress(0, None, "scanning")
        progress(2, 2, "copying [red]\x1b[2J")
    assert "copying [red]\\x1b[2J" in capsys.readouterr().err
