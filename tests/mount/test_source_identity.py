"""A source that refuses root, as with root squash: files are opened with the reader's identity.

The daemon runs as root without the capabilities that let root read everything, so that files that
are closed to root are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted
from tests.mount.command import needs_fuse, needs_root, not_mounted, one_line, ordinary_user
from tests.mount.compare import wait_for_copies
from tests.mount.observe import account, settled

pytestmark = [needs_root, needs_fuse]

ALICE, BOB, TEAM = 1001, 1002, 2000
# As many as some directories of users have: the text of /proc/PID/status is longer than a page.
_MANY = 450
_SQUASHED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
_LARGE = 6_000_000


def _reads(mounted: Mounted, name: str, *, uid: int, groups: tuple[int, ...] = ()) -> bytes | str:
    """What a process of a user reads of a file, or the name of the error."""
    out, into = os.pipe()
    beneath = os.open(mounted.path, os.O_PATH)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            fd = os.open(name, os.O_RDONLY, dir_fd=beneath)
            content = b""
            while piece := os.read(fd, 1 << 20):
                content += piece
            os.write(into, b"+%d " % len(content) + content[:100])
        except OSError as error:
            os.write(into, f"-{os.strerror(error.errno or 0)}".encode())
        finally:
            os._exit(0)
    os.close(into)
    os.close(beneath)
    with open(out, "rb") as answers:
        raw = answers.read()
    os.waitpid(child, 0)
    return raw[1:].decode() if raw[:1] == b"-" else raw[1:]


@pytest.fixture
def squashed(monarch: MonarchCommand, source: Path, tmp_path: Path) -> MonarchCommand:
    """``monarch`` for a source whose snapshot an administrator has built where root reads all."""
    for name, uid, gid, mode, content in (
        ("small", ALICE, ALICE, 0o600, b"alice's own"),
        ("other", ALICE, ALICE, 0o600, b"alice's other"),
        ("large", ALICE, ALICE, 0o600, bytes(_LARGE)),
        ("team", BOB, TEAM + _MANY - 1, 0o640, b"the team's"),
        ("open", BOB, BOB, 0o644, b"for all"),
    ):
        (source / name).write_bytes(content)
        os.chown(source / name, uid, gid)
        (source / name).chmod(mode)
    closed = source / "closed"
    closed.mkdir()
    (closed / "inside").write_bytes(b"inside")
    for path in (closed / "inside", closed):
        os.chown(path, ALICE, ALICE)
        path.chmod(path.stat().st_mode & 0o700)
    monarch("snapshot", "build", str(source), "-o", str(tmp_path / "names.snapshot"))
    monarch.wrapper = _SQUASHED
    return monarch


def _mounted(monarch: MonarchCommand, source: Path, *options: str) -> Mounted:
    return monarch.mount(
        source,
        tiers={"fast": "100MiB"},
        snapshot=source.parent / "names.snapshot",
        options=["allow_other", "snapshot.freshness=never", *options],
    )


@pytest.mark.fault("U6")
@pytest.mark.promise(85, 86)
@pytest.mark.modes("python", "relay", "passthrough")
def test_a_file_that_is_closed_to_root_is_opened_with_the_rights_of_the_reader(
    squashed: MonarchCommand, source: Path
) -> None:
    mounted = _mounted(squashed, source, "source_identity=caller")
    groups = tuple(range(TEAM, TEAM + _MANY))
    for name in ("small", "closed/inside", "large"):
        assert _reads(mounted, name, uid=BOB) == "Permission denied"
    assert _reads(mounted, "large", uid=ALICE) == b"%d " % _LARGE + bytes(100)
    assert _reads(mounted, "small", uid=ALICE) == b"11 alice's own"
    assert _reads(mounted, "closed/inside", uid=ALICE) == b"6 inside"
    # The last of many groups, with which /proc tells more than fits into a page.
    assert _reads(mounted, "team", uid=ALICE) == "Permission denied"
    assert _reads(mounted, "team", uid=ALICE, groups=groups) == b"10 the team's"
    assert _reads(mounted, "open", uid=ALICE) == b"7 for all"
    wait_for_copies(mounted, 5)
    # Copies are served to users that the modes allow, to no others, and the source is not called.
    opens = account(mounted)["source_totals"]["reader"]["opens"]
    assert _reads(mounted, "small", uid=BOB) == "Permission denied"
    assert _reads(mounted, "small", uid=ALICE) == b"11 alice's own"
    assert account(mounted)["source_totals"]["reader"]["opens"] == opens
    # Root itself is refused by the source, as without Monarch.
    squashed.expects_log("source: 'other': Permission denied")
    with pytest.raises(PermissionError):
        (mounted.path / "other").read_bytes()
    assert _identities(mounted.pid) == {("0 0 0 0", "0 0 0 0", _own_groups())}
    assert "source-closed" not in _problems(mounted)


def _identities(pid: int) -> set[tuple[str, ...]]:
    """User, group and supplementary groups of all threads."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        lines = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
        found.add(tuple(" ".join(lines[key].split()) for key in ("Uid", "Gid", "Groups")))
    return found


def _own_groups() -> str:
    return " ".join(map(str, sorted(os.getgroups())))


def _problems(mounted: Mounted) -> dict[str, str]:
    return {p["kind"]: p["what"] for p in account(mounted)["health"]["problems"]}


@pytest.mark.fault("U6")
@pytest.mark.promise(85, 87)
@pytest.mark.modes("python", "relay")
def test_the_daemon_s_own_rights_are_the_default_and_files_closed_to_it_are_named(
    squashed: MonarchCommand, source: Path
) -> None:
    mounted = _mounted(squashed, source)
    squashed.expects_log("Permission denied")
    assert _reads(mounted, "small", uid=ALICE) == "Permission denied"
    assert _reads(mounted, "large", uid=ALICE) == "Permission denied"
    assert "the daemon read 2 files" in _problems(mounted)["source-closed"]


@pytest.mark.fault("U6")
@pytest.mark.promise(87)
@pytest.mark.modes("relay")
def test_warm_says_how_many_files_are_closed_to_the_daemon(
    squashed: MonarchCommand, source: Path
) -> None:
    mounted = _mounted(squashed, source, "source_identity=caller")
    squashed.expects_log("the source does not let the daemon open it")
    done = squashed("warm", str(mounted.path), "--wait", check=False)
    assert done.returncode == 1
    assert "5 files are closed to the daemon at the source" in done.stderr, done.stderr
    assert settled(mounted)["residency"]["files"] == 1
    assert _reads(mounted, "small", uid=ALICE) == b"11 alice's own"
    wait_for_copies(mounted, 2)


@pytest.mark.modes("auto")
@pytest.mark.promise(85)
def test_a_mount_that_cannot_act_as_its_callers_is_refused(
    monarch: MonarchCommand, source: Path, tmp_path: Path
) -> None:
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    mount = ["mount", str(source), str(mnt), "-o"]
    done = not_mounted(monarch, mnt, *mount, "source_identity=caller,open=none")
    assert done.returncode == 2
    assert "caller and open: none exclude each other" in one_line(done)
    with ordinary_user(monarch.case) as user:
        source, mnt = user.mkdir("source"), user.mkdir("mnt")
        done = user("mount", str(source), str(mnt), "-o", "source_identity=caller")
        assert done.returncode == 8, done.stderr
        assert "only root can act with the rights of other users" in done.stderr
