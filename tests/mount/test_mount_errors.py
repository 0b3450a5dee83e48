"""Impossible mounts: one clear line, the documented exit code, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Tree
from tests.mount.command import (
    assert_nothing_is_left,
    needs_fuse,
    needs_root,
    not_mounted,
    one_line,
    ordinary_user,
    registered,
)

# How reads are served has nothing to do with it, but where a test says so.
pytestmark = [needs_fuse, pytest.mark.modes("auto")]


@pytest.fixture
def mnt(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def refused(
    monarch: MonarchCommand,
    source: Path,
    mountpoint: Path,
    *arguments: str,
    code: int,
    words: str,
) -> str:
    """Try to mount; the line that says why not. Nothing is left, and the mount point is
    unchanged."""
    tier = ("--tier", f"{monarch.directory}/tier:1MiB") if "--tier" not in arguments else ()
    state = ("--state", f"{monarch.directory}/state") if "--state" not in arguments else ()
    before = _looks(mountpoint)
    command = ("mount", str(source), str(mountpoint), *tier, *state, *arguments)
    done = not_mounted(monarch, mountpoint, *command)
    line = one_line(done)
    assert (done.returncode, words in line) == (code, True), line
    # An error without a message of its own.
    assert "the daemon died" not in line
    assert _looks(mountpoint) == before
    assert_nothing_is_left(monarch)
    return line


def _looks(path: Path) -> object:
    if not os.path.lexists(path):
        return None
    status = path.lstat()
    content = sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()
    return status.st_ino, status.st_mode, status.st_mtime_ns, content


# -- the mount point ---------------------------------------------------------------------------


@pytest.mark.fault("M1")
def test_a_missing_mount_point_is_reported_with_the_command_that_makes_it(
    monarch: MonarchCommand, source: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    line = refused(monarch, source, missing, code=3, words="does not exist")
    assert f"run: mkdir -p {missing}" in line
    assert not (tmp_path / "state").exists()


@pytest.mark.fault("M1")
def test_a_file_is_no_mount_point(monarch: MonarchCommand, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    refused(monarch, source, tmp_path / "file", code=3, words="is a file")


@pytest.mark.fault("M1")
def test_a_directory_with_entries_is_not_hidden(
    monarch: MonarchCommand, source: Path, mnt: Path
) -> None:
    (mnt / "kept").touch()
    refused(monarch, source, mnt, code=3, words="is not empty: 'kept'")


@pytest.mark.fault("M1")
def test_a_second_mount_at_the_same_place_is_refused_and_the_first_lives(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    made = monarch.mount(tree({"a": b"content"}))
    again = ["mount", str(made.source), str(made.path), "--state", str(tmp_path / "other")]
    done = monarch(*again, "--tier", f"{tmp_path}/other-tier:1MiB", check=False)
    assert (done.returncode, "is already a Monarch mount" in one_line(done)) == (3, True)
    assert f"monarch umount {made.path}" in done.stderr
    assert_nothing_is_left(monarch, made)
    assert (made.path / "a").read_bytes() == b"content"


@pytest.mark.fault("M1")
def test_a_mount_point_inside_the_source_is_refused(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a": 3, "inner": None})
    refused(monarch, source, source / "inner", code=2, words="is inside the source")


@needs_root
@pytest.mark.fault("M1")
def test_a_mount_point_in_another_place_of_the_source_is_refused(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source, other = tree({"a": 3, "inner": None}), tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", str(source), str(other)], check=True)
    try:
        refused(monarch, source, other / "inner", code=3, words="lies in the source")
    finally:
        subprocess.run(["umount", str(other)], check=True)


@pytest.mark.fault("M1")
def test_the_source_is_not_mounted_over_itself(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a": 3})
    refused(monarch, source, source, code=2, words="is also the source")


@pytest.mark.fault("M1")
def test_a_mount_point_that_would_hide_the_source_is_refused(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    below = tmp_path / "outer/source"
    below.mkdir(parents=True)
    refused(monarch, below, tmp_path / "outer", code=2, words="contains the source")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("outer/source", "is the source itself"),
        ("outer/source/inner", "lies in the source"),
        ("outer", "lies below the mount point"),
    ],
)
@pytest.mark.fault("M1")
def test_a_link_is_a_mount_point_where_it_leads(
    monarch: MonarchCommand, tmp_path: Path, target: str, words: str
) -> None:
    source = tmp_path / "outer/source"
    (source / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / target)
    refused(monarch, source, tmp_path / "link", code=3, words=words)


# -- the source --------------------------------------------------------------------------------


@pytest.mark.fault("M1")
def test_a_missing_source_is_reported(monarch: MonarchCommand, tmp_path: Path, mnt: Path) -> None:
    line = refused(monarch, tmp_path / "no", mnt, code=4, words="No such file or directory")
    assert "check the path" in line


@pytest.mark.fault("M1")
def test_a_file_is_no_source(monarch: MonarchCommand, tmp_path: Path, mnt: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    refused(monarch, tmp_path / "file", mnt, code=4, words="is not a directory")


def test_a_source_that_the_user_may_not_read_is_reported(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt = user.mkdir("source"), user.mkdir("mnt")
        os.chown(source, 0, 0)
        done = user("mount", str(source), str(mnt), "--tier", f"{user.directory}/home/t:1MiB")
        assert (done.returncode, "Permission denied" in one_line(done)) == (4, True)
        assert str(mnt) not in user.mounts()


# -- tiers and state ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("source/tier", "is inside the source"),
        ("outer", "contains the source"),
        ("mnt", "is also the mount point"),
    ],
)
@pytest.mark.fault("M1")
def test_a_tier_apart_from_source_and_mount_point_is_demanded(
    monarch: MonarchCommand, tmp_path: Path, mnt: Path, tier: str, words: str
) -> None:
    source = tmp_path / ("outer/source" if tier == "outer" else "source")
    source.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    refused(monarch, source, mnt, "--tier", f"{tmp_path / tier}:1MiB", code=2, words=words)
    assert [path for path in sorted(tmp_path.rglob("*")) if "home" not in str(path)] == before


def test_a_file_is_no_tier(
    monarch: MonarchCommand, source: Path, mnt: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    refused(monarch, source, mnt, "--tier", f"{tmp_path}/file:1MiB", code=6, words="tier")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_tier_that_the_user_may_not_write_is_reported(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, tier = user.mkdir("source"), user.mkdir("mnt"), user.mkdir("tier")
        os.chown(tier, 0, 0)
        tier.chmod(0o755)
        done = user("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB")
        assert (done.returncode, str(tier) in one_line(done)) == (6, True)
        assert "Permission denied" in done.stderr
        assert str(mnt) not in user.mounts()
        assert list(tier.iterdir()) == []


def test_a_tier_that_another_user_has_used_first_is_reported_with_that_user(
    monarch: MonarchCommand,
) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, tier = user.mkdir("source"), user.mkdir("mnt"), user.mkdir("tier")
        (tier / "monarch").mkdir(mode=0o700)
        done = user("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB")
        assert (done.returncode, "'monarch' belongs to uid 0" in one_line(done)) == (6, True)
        assert str(mnt) not in user.mounts()


def test_a_state_directory_that_the_user_may_not_write_is_reported(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, state = user.mkdir("source"), user.mkdir("mnt"), user.mkdir("state")
        state.chmod(0o555)
        mount = ["mount", str(source), str(mnt), "--tier", f"{user.directory}/home/t:1MiB"]
        done = user(*mount, "--state", f"{state}/below")
        assert (done.returncode, "state directory" in one_line(done)) == (6, True)
        assert "--state" in done.stderr
        os.chown(state, 0, 0)
        done = user(*mount, "--state", str(state))
        assert (done.returncode, "belongs to uid 0" in one_line(done)) == (6, True)
        assert str(mnt) not in user.mounts()


def test_the_error_for_a_state_directory_in_use_names_the_daemon(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    made = monarch.mount(tree({"a": 3}))
    (tmp_path / "second").mkdir()
    second = ["mount", str(made.source), str(tmp_path / "second")]
    done = monarch(*second, "--state", str(made.state), "--tier", f"{tmp_path}/t:1MiB", check=False)
    line = one_line(done)
    assert (done.returncode, f"in use by pid {made.pid} ({made.path})" in line) == (7, True), line
    assert "or give this mount another directory with --state DIR" in line
    assert_nothing_is_left(monarch, made)


@pytest.mark.finding("F7")
def test_settings_of_a_running_mount_stay_and_the_message_says_how_to_change_them(
    monarch: MonarchCommand, tree: Tree
) -> None:
    made = monarch.mount(tree({"a": 3}))
    where = ["mount", str(made.source), str(made.path), "--tier", f"{monarch.directory}/t:2MiB"]
    again = monarch(*where, check=False)
    line = one_line(again)
    way = f"to mount with other settings, run first: monarch umount {made.path}; the tiers keep"
    assert (again.returncode, way in line) == (3, True), line
    remount = monarch(*where, "-o", "remount,limits.copy_workers=8", check=False)
    line = one_line(remount)
    assert (remount.returncode, "a running mount keeps its settings: `monarch umount`" in line) == (
        *(2, True),
    )
    assert_nothing_is_left(monarch, made)


@pytest.mark.finding("B5")
@pytest.mark.fault("I6")
def test_an_empty_path_is_a_mistake_in_every_verb(
    monarch: MonarchCommand, source: Path, mnt: Path
) -> None:
    commands = [
        ["mount", "", str(mnt)],
        ["mount", str(source), ""],
        ["mount", str(source), str(mnt), "--tier", ""],
        ["mount", str(source), str(mnt), "--state", ""],
        ["mount", str(source), str(mnt), "--snapshot="],
        ["mount", "-c", "", "name"],
        *([verb, ""] for verb in ("umount", "status", "warm", "evict", "fsck")),
        ["warm", str(mnt), ""],
        ["ckpt", "list", ""],
        ["snapshot", "build", "", "-o", str(mnt)],
        ["doctor", "-c", ""],
    ]
    for command in commands:
        done = monarch(*command, check=False)
        line = one_line(done)
        assert (
            done.returncode,
            "the value is empty; check for a variable that is not set" in line,
        ) == (2, True)
    assert "--tier: the value is empty" in one_line(monarch(*commands[2], check=False))
    assert_nothing_is_left(monarch)


@pytest.mark.finding("D5")
@pytest.mark.promise(108)
@pytest.mark.fault("I5")
def test_a_state_directory_that_is_not_monarch_s_is_refused_and_stays_as_it_is(
    monarch: MonarchCommand, tree: Tree, mnt: Path, tmp_path: Path
) -> None:
    source, state = tree({"a": 1}), tmp_path / "shared"
    state.mkdir()
    for mode, held, words in (
        (0o700, ["foreign"], "holds 'foreign', which is not Monarch's"),
        (0o1777, [], "is open to other users (mode 1777)"),
        (0o755, [], "run: chmod 700"),
    ):
        for name in held:
            (state / name).write_text("theirs")
        state.chmod(mode)
        refused(monarch, source, mnt, "--state", str(state), code=6, words=words)
        assert stat.S_IMODE(state.stat().st_mode) == mode
        assert sorted(os.listdir(state)) == held
        for name in held:
            (state / name).unlink()
    # Even if it once was ours.
    mounted = monarch.mount(source, mnt)
    mounted.umount()
    mounted.state.chmod(0o1777)
    refused(monarch, source, mnt, "--state", str(mounted.state), code=6, words="open to other")
    assert stat.S_IMODE(mounted.state.stat().st_mode) == 0o1777


@pytest.mark.finding("B6", "B23")
@pytest.mark.promise(109)
@pytest.mark.fault("I7")
def test_directories_of_a_mount_are_refused_within_a_monarch_mount_or_one_another(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    made = monarch.mount(tree({"a": 1, "directory/b": 1}), options=["write=absorb"])
    source, mnt = tmp_path / "second", tmp_path / "mnt-b"
    source.mkdir()
    mnt.mkdir()
    before = sorted(os.listdir(made.path))
    tier = made.tiers["fast"]
    command = ["mount", str(source), str(mnt)]
    for code, words, arguments in (
        (6, "lies in the Monarch mount", ["--tier", f"{made.path}/t:1MiB"]),
        (6, "lies in the Monarch mount", ["--state", f"{made.path}/s"]),
        (6, "lies in the Monarch mount", ["--snapshot", f"{made.path}/names.lmdb"]),
        (6, "lies in the Monarch mount", ["-o", f"log.file={made.path}/log"]),
        (2, "lies in the tier", ["--tier", f"{tier}/sub:1MiB"]),
        (2, "has inside the tier", ["--tier", f"{tier.parent}:1MiB"]),
        (2, "lies in the tier", ["--state", f"{tier}/sub"]),
        (2, "lies in the source", ["--tier", f"{made.source}/t:1MiB"]),
    ):
        others = [] if "--tier" in arguments else ["--tier", f"{tmp_path}/t2:1MiB"]
        others += [] if "--state" in arguments else ["--state", f"{tmp_path}/s2"]
        done = not_mounted(monarch, mnt, *command, *arguments, *others)
        assert (done.returncode, words in one_line(done)) == (code, True), done.stderr
    assert sorted(os.listdir(made.path)) == before
    assert not (tmp_path / "t2").exists()
    assert not (tmp_path / "s2").exists()


@pytest.mark.fault("I1", "I2")
def test_every_mistake_of_the_command_line_is_reported_at_once(
    monarch: MonarchCommand, source: Path, mnt: Path
) -> None:
    wrong = ["--tier", "/tmp/t:10GBB", "-o", "limits.copy_wrokers=8,snapshot.freshness=daily"]
    done = monarch("mount", str(source), str(mnt), *wrong, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 3, done.stderr
    assert all(line.startswith("monarch: ") for line in lines)
    assert "did you mean 'limits.copy_workers'" in done.stderr
    assert_nothing_is_left(monarch)


# -- the kernel --------------------------------------------------------------------------------


def test_a_user_without_access_to_dev_fuse_gets_the_remedy(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case, device_mode=0o600) as user:
        source, mnt = user.mkdir("source"), user.mkdir("mnt")
        done = user("mount", str(source), str(mnt), "--tier", f"{user.directory}/home/t:1MiB")
        assert (done.returncode, "/dev/fuse: Permission denied" in one_line(done)) == (8, True)
        assert "ask the administrator" in done.stderr
        assert str(mnt) not in user.mounts()
        assert not list(user.directory.rglob("*.part"))


def test_allow_other_needs_the_administrator_s_word_in_fuse_conf(monarch: MonarchCommand) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt = user.mkdir("source"), user.mkdir("mnt")
        mount = ["mount", str(source), str(mnt), "--tier", f"{user.directory}/home/t:1MiB"]
        done = user(*mount, "-o", "allow_other")
        line = one_line(done)
        assert done.returncode == 8
        assert line.startswith(f"cannot mount at '{mnt}': fusermount3: option allow_other"), line
        assert "user_allow_other" in line
        assert str(mnt) not in user.mounts()


# -- a daemon that dies while it starts ----------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    path = tmp_path / "full"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(path)], check=True)
    try:
        yield path
    finally:
        # The process of a mount that has failed may end after the command.
        subprocess.run(["umount", "-l", str(path)], check=True)


@needs_root
def test_a_state_directory_without_room_is_the_error_of_the_mount(
    monarch: MonarchCommand, tree: Tree, mnt: Path, full: Path
) -> None:
    source = tree({f"d/{number}": 1 for number in range(500)})
    line = refused(monarch, source, mnt, "--state", str(full / "s"), code=5, words="snapshot")
    assert "No space left" in line or "room" in line


@needs_root
def test_a_state_directory_without_room_for_a_note_in_its_lock_is_the_error_of_the_snapshot(
    monarch: MonarchCommand, tree: Tree, mnt: Path, full: Path
) -> None:
    _fill(full)
    refused(monarch, tree({"a": 1}), mnt, "--state", str(full / "s"), code=5, words="No space left")


def test_a_metrics_port_in_use_is_the_error_of_the_mount(
    monarch: MonarchCommand, tree: Tree, mnt: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        registered(monarch, mnt, tree({"a": 1}), monarch.directory / "state")
        monarch.expects_log(r"cannot serve metrics at")
        line = refused(
            monarch,
            monarch.directory / "source",
            mnt,
            *("-o", f"metrics.enabled,metrics.address=127.0.0.1:{port}"),
            code=2,
            words=f"cannot serve metrics at 127.0.0.1:{port}: Address already in use",
        )
    assert "give each mount a metrics.address of its own" in line


def test_a_log_file_that_cannot_be_written_is_the_error_of_the_mount(
    monarch: MonarchCommand, source: Path, mnt: Path
) -> None:
    words = "log file '/nonexistent/log': No such file or directory"
    refused(monarch, source, mnt, "-o", "log.file=/nonexistent/log", code=6, words=words)


@needs_root
def test_a_tier_without_room_for_its_name_is_reported(
    monarch: MonarchCommand, tree: Tree, mnt: Path, full: Path
) -> None:
    _fill(full)
    registered(monarch, mnt, tree({"a": 1}), monarch.directory / "state")
    monarch.expects_log("No space left")
    words = f"tier '{full}/t': No space left on device"
    refused(monarch, tree({}), mnt, "--tier", f"{full}/t:1MiB", code=6, words=words)


def _fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(directory).f_bavail == 0


@pytest.mark.finding("B19")
@pytest.mark.fault("I9")
def test_a_source_that_the_user_may_not_read_is_reported_with_the_remedy(
    monarch: MonarchCommand,
) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt = user.mkdir("source"), user.mkdir("mnt")
        os.chown(source, 0, 0)
        done = user("mount", str(source), str(mnt), "--tier", f"{user.directory}/home/t:1MiB")
        line = one_line(done)
        assert (done.returncode, "Permission denied" in line) == (4, True)
        assert "mount as a user who may read it (this one is uid 65534)" in line
        assert "file system is mounted" not in line


# -- capabilities ------------------------------------------------------------------------------


@needs_root
@pytest.mark.fault("U8")
def test_root_without_its_capabilities_mounts_only_to_read(
    monarch: MonarchCommand, source: Path, mnt: Path, state: Path
) -> None:
    """As in a container that has dropped them."""

    def mount(*options: str) -> subprocess.CompletedProcess[str]:
        less = "-chown,-fowner,-setgid"
        return subprocess.run(
            [
                *("setpriv", f"--bounding-set={less}", f"--inh-caps={less}"),
                *(sys.executable, "-m", "monarch", "mount", str(source), str(mnt)),
                *("--state", str(state), "--tier", f"{monarch.directory}/tier:1MiB", *options),
            ],
            env=monarch.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    for option, words in (
        ("write=absorb", "draining is not possible: root lacks CAP_CHOWN, CAP_FOWNER,"),
        ("source_identity=caller", "caller is not possible: root lacks CAP_SETGID;"),
    ):
        done = mount("-o", option)
        assert (done.returncode, words in one_line(done)) == (8, True), done.stderr
        assert_nothing_is_left(monarch)
    assert mount().returncode == 0
    registered(monarch, mnt, source, state)
    assert sorted(os.listdir(mnt)) == sorted(os.listdir(source))
