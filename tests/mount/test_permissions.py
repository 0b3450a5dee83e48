"""Another user sees through the mount only the files that the modes allow."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Tree, own_directory
from tests.mount.compare import wait_for_copies
from tests.mount.observe import account, copies, wait_until

USER = 65534
STATUS = "user.monarch.status"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

Attempts = Mapping[str, Callable[[], object]]


def as_another_user(directory: Path, attempts: Attempts, *, uid: int = USER) -> dict[str, str]:
    """The result of each attempt, made by ``uid`` in ``directory``: "done" or the error's name."""
    directory.chmod(0o711)
    here = os.open(directory, os.O_PATH)
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.fchdir(here)  # the directories above are closed to the user
            os.write(into, json.dumps(_outcomes(attempts)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    os.close(here)
    with open(out, "rb") as answers:
        raw = answers.read()
    assert os.waitpid(child, 0)[1] == 0
    outcomes: dict[str, str] = json.loads(raw)
    return outcomes


def _outcomes(attempts: Attempts) -> dict[str, str]:
    outcomes = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno or 0]
        else:
            outcomes[name] = "done"
    return outcomes


def reading(path: str) -> Callable[[], object]:
    return lambda: Path(path).read_bytes()


def guarded(tree: Tree) -> Path:
    source = tree({"mine": b"secret", "open": b"for all", "theirs": b"x", "closed/file": b"x"})
    for name, mode in (("mine", 0o600), ("open", 0o644), ("closed", 0o700), ("theirs", 0o400)):
        (source / name).chmod(mode)
    os.chown(source / "theirs", USER, USER)
    (source / "closed/file").chmod(0o644)
    (source / "entered").mkdir(0o711)
    (source / "entered/file").write_bytes(b"known by name")
    return source


@pytest.mark.promise(19)
@pytest.mark.fault("Security")
def test_with_allow_other_the_modes_of_the_source_decide(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mounted = monarch.mount(guarded(tree), options=["allow_other"])
    attempts = {
        "mine": reading("mnt/mine"),
        "open": reading("mnt/open"),
        "theirs": reading("mnt/theirs"),
        "list closed": lambda: os.listdir("mnt/closed"),
        "stat in closed": lambda: os.stat("mnt/closed/file"),
        "read in closed": reading("mnt/closed/file"),
        "list entered": lambda: os.listdir("mnt/entered"),
        "read in entered": reading("mnt/entered/file"),
        "list": lambda: os.listdir("mnt"),
        "stat mine": lambda: os.stat("mnt/mine"),
        "write open": lambda: os.open("mnt/open", os.O_WRONLY),
    }
    expected = {
        "mine": "EACCES",
        "open": "done",
        "theirs": "done",
        "list closed": "EACCES",
        "stat in closed": "EACCES",
        "read in closed": "EACCES",
        "list entered": "EACCES",
        "read in entered": "done",
        "list": "done",
        "stat mine": "done",
        "write open": "EROFS",
    }
    assert as_another_user(tmp_path, attempts) == expected
    for name in ("mine", "open", "theirs", "closed/file", "entered/file"):
        (mounted.path / name).read_bytes()  # by root: now there are copies and cached pages
    wait_for_copies(mounted, 5)
    assert as_another_user(tmp_path, attempts) == expected


@pytest.mark.fault("S4", "Security")
@pytest.mark.promise(26)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_closed_at_the_source_is_closed_at_its_first_open(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"small": 1000, "large": 5_000_000, "theirs": 10})
    mounted = monarch.mount(source, options=["allow_other"])
    attempts = {name: reading(f"mnt/{name}") for name in ("small", "large", "theirs")}
    for name in attempts:
        os.stat(mounted.path / name)
        (source / name).chmod(0o600)
    os.chown(source / "theirs", USER, USER)
    monarch.expects_log("changed at the source since the snapshot")
    for _ in range(2):
        assert as_another_user(tmp_path, attempts) == {
            "small": "EACCES",
            "large": "EACCES",
            "theirs": "done",
        }
    for name in attempts:
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.fault("S4", "Security")
@pytest.mark.promise(27)
def test_a_copy_of_a_file_closed_at_the_source_is_closed_after_the_next_mount(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"file": 1000})
    mounted = monarch.mount(source)
    (mounted.path / "file").read_bytes()
    wait_for_copies(mounted, 1)
    mounted.umount()
    (source / "file").chmod(0o600)
    again = monarch.mount(source, options=["allow_other"])
    monarch.expects_log("changed at the source since the snapshot")
    wait_until(lambda: account(again)["snapshot"]["stale"] is True, "the change is noticed")
    assert as_another_user(tmp_path, {"file": reading("mnt/file")}) == {"file": "EACCES"}


@pytest.mark.promise(21)
@pytest.mark.fault("Security")
def test_without_allow_other_another_user_does_not_get_in(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    monarch.mount(guarded(tree))
    attempts = {
        "list": lambda: os.listdir("mnt"),
        "read": reading("mnt/open"),
        "stat": lambda: os.stat("mnt/open"),
        "statvfs": lambda: os.statvfs("mnt"),
    }
    outcomes = as_another_user(tmp_path, attempts)
    assert {outcomes[name] for name in ("list", "read", "stat")} == {"EACCES"}


@pytest.mark.promise(23)
@pytest.mark.fault("Security")
def test_copies_state_log_and_socket_are_closed_to_others(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mounted = monarch.mount(guarded(tree), options=["allow_other"])
    for name in ("mine", "open"):
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, 2)
    mounted.tiers["fast"].chmod(0o755)  # as a scratch directory that all users share
    tiers = mounted.tiers["fast"]
    copied = list(copies(mounted)["fast"].values())
    private = [tiers / "monarch", own_directory(tiers), *copied, *mounted.state.iterdir()]
    for path in private:
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0 or path.parent == tiers
    for name in ("control.sock", "daemon.log", "snapshot.lmdb"):
        assert stat.S_IMODE((mounted.state / name).stat().st_mode) == 0o600, name
    assert stat.S_IMODE(mounted.state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(copy.stat().st_mode) for copy in copied} == {0o600}
    attempts = {str(path): reading(os.path.relpath(path, tmp_path)) for path in [*copied, *private]}
    assert set(as_another_user(tmp_path, attempts).values()) == {"EACCES"}


@pytest.mark.finding("B16", "F1")
@pytest.mark.promise(23)
@pytest.mark.fault("Security")
def test_another_user_of_a_shared_mount_sees_its_numbers_and_no_names(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mounted = monarch.mount(guarded(tree), options=["allow_other"])
    (mounted.path / "open").read_bytes()
    wait_for_copies(mounted, 1)
    attempts = {"numbers": lambda: os.getxattr("mnt", STATUS)}
    assert as_another_user(tmp_path, attempts) == {"numbers": "done"}
    numbers = json.loads(os.getxattr(mounted.path, STATUS))
    assert (numbers["health"], numbers["pid"]) == ("ok", mounted.pid)
    assert {"mine", "theirs", "closed"}.isdisjoint(json.dumps(numbers).split('"'))
    # With another state root, as another user has it, the daemon is not in the list of mounts.
    elsewhere = {**monarch.environment(), "MONARCH_STATE_ROOT": str(tmp_path / "elsewhere")}

    def status(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "monarch", "status", *arguments]
        return subprocess.run(command, env=elsewhere, capture_output=True, text=True, timeout=60)

    shown = status(str(mounted.path / "closed"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{mounted.path}: ok, serving, pid {mounted.pid}; a mount of")
    assert json.loads(status(str(mounted.path), "--json").stdout)["files"] == numbers["files"]
    assert status(str(mounted.path), "--check").returncode == 0
    assert "a mount of another user, or of another MONARCH_STATE_ROOT" in status().stdout
    nowhere = status(str(tmp_path))
    assert (nowhere.returncode, "is not in a Monarch mount" in nowhere.stderr) == (9, True)
