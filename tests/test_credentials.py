"""The identity of one thread: it gets a user's rights and returns; other threads keep theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from monarch.posix import credentials
from monarch.posix.credentials import (
    NOBODY,
    ROOT,
    Credentials,
    acting_as,
    credentials_of,
    keep_quotas,
    least_of,
)
from tests.conftest import let_others_in

pytestmark = pytest.mark.finding("D1")
ALICE = Credentials(1001, 1001, (2000, 2001))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory of root that all may enter, in one that no other user could enter."""
    let_others_in(tmp_path)
    tmp_path.chmod(0o1777)
    return tmp_path


def status() -> dict[str, str]:
    text = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def test_the_source_s_kernel_decides_what_a_thread_may_do(shared: Path) -> None:
    before = status()
    (shared / "closed").write_bytes(b"root's")
    (shared / "closed").chmod(0o600)
    with acting_as(ALICE):
        now = status()
        assert now["Groups"].split() == ["2000", "2001"]
        assert int(now["CapEff"], 16) == 0
        with pytest.raises(PermissionError):
            (shared / "closed").read_bytes()
        with pytest.raises(PermissionError):
            (shared / "closed").unlink()
        (shared / "mine").write_bytes(b"")
    assert (shared / "mine").stat().st_uid == 1001
    after = status()
    for key in ("Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapInh"):
        assert after[key] == before[key]
    assert (shared / "closed").read_bytes() == b"root's"


def test_the_supplementary_groups_count(shared: Path) -> None:
    (shared / "groups").mkdir()
    os.chown(shared / "groups", 0, 2001)
    (shared / "groups").chmod(0o2770)
    with acting_as(ALICE):
        (shared / "groups/file").write_bytes(b"")
    assert (shared / "groups/file").stat().st_gid == 2001
    with acting_as(Credentials(1002, 1002)), pytest.raises(PermissionError):
        (shared / "groups/other").write_bytes(b"")


def test_the_other_threads_keep_theirs() -> None:
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with acting_as(ALICE):
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    try:
        assert status()["Uid"].split() == ["0"] * 4
        assert 2001 not in os.getgroups()
    finally:
        over.set()
        thread.join()


def test_an_error_inside_puts_it_back() -> None:
    with pytest.raises(KeyError), acting_as(ALICE):
        raise KeyError
    assert status()["Uid"].split() == ["0"] * 4


def test_acting_as_root_or_as_no_particular_user_changes_nothing() -> None:
    for user in (None, ROOT):
        with acting_as(user):
            assert int(status()["CapEff"], 16) != 0


@pytest.mark.promise(351)
def test_the_daemon_may_exceed_a_quota_only_while_it_acts_as_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, bool] = {}
    right = credentials._CAP_SYS_RESOURCE
    if not int(status()["CapPrm"], 16) & right:
        # This machine does not have it: another one, CAP_SYS_BOOT, shows the same.
        right = 1 << 22
        monkeypatch.setattr(credentials, "_CAP_SYS_RESOURCE", right)

    def may_exceed() -> bool:
        return bool(int(status()["CapEff"], 16) & right)

    def note(name: str) -> None:
        found[name] = may_exceed()

    def serve() -> None:
        keep_quotas()
        note("itself")
        for name, user in (("no user", None), ("alice", ALICE), ("root", ROOT)):
            with acting_as(user):
                note(name)
            note(f"after {name}")
        with pytest.raises(KeyError), acting_as(ROOT):
            raise KeyError
        note("after a failure")
        later = threading.Thread(target=note, args=["a later thread"])
        later.start()
        later.join()

    # The rights of a thread end with it.
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert len(found) == 9
    assert [name for name, may in found.items() if may] == ["root"]
    assert may_exceed()


def test_bytes_of_several_users_are_written_with_the_rights_of_a_user_other_than_root() -> None:
    assert least_of((ROOT, ALICE, NOBODY)) == ALICE
    assert least_of((None, NOBODY)) == NOBODY
    assert least_of((ROOT, None)) == ROOT
    assert least_of((None, ROOT)) is None
    assert least_of(()) is None


def test_the_groups_of_a_process_are_those_that_it_has_now() -> None:
    groups = tuple(range(3000, 3600))
    process = subprocess.Popen(["sleep", "60"], user=1001, group=1001, extra_groups=groups)
    try:
        found = credentials_of(process.pid, 1001, 1001)
        assert found == Credentials(1001, 1001, groups)
        # The number of another user's process says nothing, nor does one that cannot be seen.
        assert credentials_of(process.pid, 1002, 1002).groups == ()
        assert credentials_of(0, 1001, 1001).groups == ()
    finally:
        process.kill()
        process.wait()


@pytest.mark.fault("U8")
def test_an_identity_that_is_refused_is_an_error_and_the_process_lives_on(shared: Path) -> None:
    program = f"""
from monarch.posix.credentials import Credentials, acting_as
try:
    with acting_as(Credentials(1001, 1001, (2000,))):
        open({str(shared / "made")!r}, "w")
except PermissionError:
    print("refused")
open({str(shared / "own")!r}, "w")
"""
    for less in ("-setuid", "-setgid", "-setuid,-setgid"):
        done = subprocess.run(
            [
                *("setpriv", f"--bounding-set={less}", f"--inh-caps={less}"),
                *(sys.executable, "-c", program),
            ],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert not (shared / "made").exists()
    assert (shared / "own").stat().st_uid == 0
