"""A user finds no data that the source denies; links that the user plants are not followed."""

from __future__ import annotations

import os
import stat
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from monarch.config.settings import MountSettings
from monarch.config.values import Section
from monarch.posix.private_directory import open_directory
from tests.conftest import MonarchCommand, Mounted, Tree
from tests.equipment.mounts import mount_table
from tests.mount.command import needs_fuse, needs_root, not_mounted, one_line
from tests.mount.compare import wait_for_copies
from tests.mount.observe import copies
from tests.mount.test_permissions import USER, as_another_user

pytestmark = [needs_root, needs_fuse]

SECRET = b"what only its owner may read: 5f1c0a77"
KEY = "what-only-the-environment-holds-9d02b4"


# -- nothing of a file leaks -----------------------------------------------------------------------


@pytest.mark.fault("Security")
@pytest.mark.promise(19, 23)
def test_bytes_that_a_user_may_not_read_at_the_source_are_nowhere_readable_for_that_user(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    source = tree({"secret": SECRET, "large": SECRET + bytes(6_000_000), "open": b"for all"})
    for name in ("secret", "large"):
        (source / name).chmod(0o600)
    options = ["allow_other", "log.level=debug", "metrics.enabled", "metrics.address=localhost:0"]
    mounted = monarch.mount(source, options=options)
    for name in ("secret", "large", "open"):
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, 3)
    monarch("status", str(mounted.path))
    # All that there is of the mount, and of its daemon, whatever the directories above allow.
    for directory in (mounted.tiers["fast"], mounted.tiers["fast"].parent):
        directory.chmod(0o755)
    process = Path(f"/proc/{mounted.pid}")
    closed: dict[str, Callable[[], object]] = {
        "the mount": lambda: Path("mnt/secret").read_bytes(),
        "the large one": lambda: Path("mnt/large").read_bytes(),
        "the copies": lambda: os.listdir("tiers/fast/monarch"),
        "the state": lambda: os.listdir("state"),
        "the log": lambda: Path("state/daemon.log").read_bytes(),
        "the snapshot": lambda: Path("state/snapshot.lmdb").read_bytes(),
        "the daemon's memory": lambda: (process / "mem").read_bytes(),
        "its environment": lambda: (process / "environ").read_bytes(),
        "its descriptors": lambda: os.listdir(process / "fd"),
        "its directory": lambda: os.readlink(process / "cwd"),
    }
    outcomes = as_another_user(tmp_path, closed)
    assert set(outcomes.values()) == {"EACCES"}, outcomes
    copy = next(iter(copies(mounted)["fast"].values()))
    (mounted.tiers["fast"] / "monarch").chmod(0o711)  # opened by mistake
    inside = os.path.relpath(copy, tmp_path)
    assert as_another_user(tmp_path, {"a copy": lambda: Path(inside).read_bytes()}) == {
        "a copy": "EACCES"
    }
    (mounted.tiers["fast"] / "monarch").chmod(0o700)
    # Data that every user can read: the command line, and the page of metrics.
    assert KEY.encode() not in (process / "cmdline").read_bytes()
    page = _metrics(mounted)
    assert b"monarch_" in page and b"secret" not in page.lower() and KEY.encode() not in page
    mounted.umount()
    for path in mounted.state.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert SECRET not in content and KEY.encode() not in content, path


def _metrics(mounted: Mounted) -> bytes:
    listening = psutil.Process(mounted.pid).net_connections("inet")
    (port,) = {c.laddr.port for c in listening if not c.raddr}
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60) as page:
        content = page.read()
    assert isinstance(content, bytes)
    return content


@pytest.mark.fault("Security")
def test_no_setting_is_a_secret_so_none_is_on_a_command_line_or_in_a_log() -> None:
    sections: list[type[Section]] = [MountSettings, *Section.__subclasses__()]
    keys = {key for section in sections for key in section.model_fields}
    assert len(keys) > 20
    # A path may be on a command line: only the owner may read the file.
    secrets = keys - {"secret_file", "tls_key"}
    for word in ("password", "secret", "token", "credential", "key"):
        assert not [key for key in secrets if word in key]


# -- set-id bits and devices -----------------------------------------------------------------------


@pytest.mark.fault("Security")
@pytest.mark.promise(17, 22)
def test_set_id_bits_and_devices_of_the_source_have_no_effect(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"id": Path("/usr/bin/id").read_bytes()})
    (source / "id").chmod(0o6755)
    os.mknod(source / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    mounted = monarch.mount(source, options=["allow_other"])
    tmp_path.chmod(0o711)
    for _ in range(2):  # from the source, and from its copy
        with (mounted.path / "id").open("rb") as program:
            done = subprocess.run(
                [
                    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
                    f"/proc/self/fd/{program.fileno()}",
                ],
                pass_fds=[program.fileno()],
                capture_output=True,
                text=True,
            )
        assert done.stdout.startswith(f"uid={USER}") and "euid=" not in done.stdout, done.stderr
        wait_for_copies(mounted, 1)
    with pytest.raises(PermissionError):
        os.open(mounted.path / "null", os.O_RDONLY)
    (options,) = [m.options for m in mount_table() if m.path == str(mounted.path)]
    assert {"ro", "nosuid", "nodev"} <= options


# -- what others plant in a shared directory -------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory in which every user may create entries, like /tmp."""
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


def planted(link: Path, target: Path, *, uid: int = USER) -> None:
    link.symlink_to(target)
    os.lchown(link, uid, uid)


@pytest.mark.modes("auto")
@pytest.mark.fault("Security")
@pytest.mark.promise(23)
@pytest.mark.parametrize("what", ["tier", "above the tier", "inside the tier", "state", "log"])
def test_a_link_that_another_user_has_planted_leads_nowhere(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, scratch: Path, what: str
) -> None:
    source, mnt, victim = tree({"a": 1}), tmp_path / "mnt", tmp_path / "victim"
    mnt.mkdir()
    victim.mkdir()
    (victim / "kept").write_text("kept")
    tier, state, log = scratch / "tier", tmp_path / "state", scratch / "log"
    options: list[str] = []
    if what == "tier":
        planted(tier, victim)
    elif what == "above the tier":
        planted(scratch / "above", victim)
        tier = scratch / "above/tier"
    elif what == "inside the tier":
        tier.mkdir(mode=0o777)
        planted(tier / "monarch", victim)
    elif what == "state":
        planted(scratch / "state", victim)
        state = scratch / "state"
    else:
        planted(log, victim / "log")
        options = ["-o", f"log.file={log}"]
    command = ["mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", "--state", str(state)]
    done = not_mounted(monarch, mnt, *command, *options)
    assert done.returncode == 6, done.stderr
    assert str(scratch) in one_line(done)
    assert [path.name for path in victim.iterdir()] == ["kept"]
    assert (victim / "kept").read_text() == "kept"


@pytest.mark.modes("auto")
@pytest.mark.fault("Security")
def test_a_link_of_the_administrator_is_followed(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, scratch: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (scratch / "local").symlink_to("../disk")
    source, mnt = tree({"a": b"content"}), tmp_path / "mnt"
    mnt.mkdir()
    tier = scratch / "local/./x/../tier"
    disk.joinpath("x").mkdir()
    made = Mounted(monarch, mnt, source, tmp_path / "state", {"tier": disk / "tier"})
    monarch.mounted.append(made)
    monarch("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", "--state", str(made.state))
    made.pid = int(made.status()["pid"])
    assert (mnt / "a").read_bytes() == b"content"
    assert stat.S_IMODE((disk / "tier/monarch").stat().st_mode) == 0o700
    made.umount()


@pytest.mark.modes("auto")
@pytest.mark.fault("Security")
@pytest.mark.promise(23)
@pytest.mark.parametrize("what", ["tier", "state"])
def test_a_directory_that_another_user_has_made_in_our_place_is_refused(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, scratch: Path, what: str
) -> None:
    source, mnt = tree({"a": 1}), tmp_path / "mnt"
    mnt.mkdir()
    tier, state = scratch / "tier", scratch / "state"
    theirs = tier / "monarch" if what == "tier" else state
    theirs.mkdir(parents=True)
    os.chown(theirs, USER, USER)
    command = ["mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", "--state", str(state)]
    done = not_mounted(monarch, mnt, *command)
    assert (done.returncode, f"belongs to uid {USER}" in one_line(done)) == (6, True), done.stderr
    assert list(theirs.iterdir()) == []


def test_links_that_lead_in_circles_and_files_on_the_way_are_errors(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_directory(tmp_path / "one/below")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_directory(tmp_path / "file/below")
    before = len(os.listdir("/proc/self/fd"))
    os.close(open_directory(tmp_path / "a/b/c"))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700
