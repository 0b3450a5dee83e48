"""A daemon of root writes for several users: each change is made with the rights of its user.

In each test one user tries to reach another user's files through the daemon. The kernel refuses the
same call on a plain directory, and the daemon must refuse it as well.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, let_others_in
from tests.mount.command import needs_fuse, needs_root
from tests.mount.observe import wait_until

pytestmark = [needs_fuse, needs_root, pytest.mark.modes(*OPENS_ARE_REPORTED)]

ALICE, MALLORY, GROUP = 1001, 1002, 2000
OPTIONS = ["write=absorb", "allow_other", "writeback.end_timeout=1s"]


def acts(uid: int, directory: Path, script: str, *, groups: tuple[int, ...] = ()) -> str:
    """What ``script``, a shell's, says in ``directory``, run by a user; its errors as well."""
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=directory,
        user=uid,
        group=uid,
        extra_groups=groups,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout + done.stderr


@pytest.fixture
def mounted(monarch: MonarchCommand, tree: Tree) -> Mounted:
    """A mount that all may enter, of a source with ``shared``, 1777."""
    source = tree({"shared/seed": 10, "team/seed": 10, "own/seed": 10})
    return prepared(monarch, source)


def prepared(monarch: MonarchCommand, source: Path) -> Mounted:
    source.chmod(0o755)
    (source / "shared").chmod(0o1777)
    os.chown(source / "team", 0, GROUP)
    (source / "team").chmod(0o2775)
    os.chown(source / "own", ALICE, ALICE)
    (source / "own").chmod(0o755)
    for path in source.rglob("seed"):
        path.chmod(0o644)
    let_others_in(monarch.directory)
    return monarch.mount(source, tiers={"fast": "64MiB"}, options=OPTIONS)


def drain(mounted: Mounted, *, timeout_s: float = 20) -> None:
    """Until the source has all, or refuses what it has not."""

    def rests() -> bool:
        message = mounted.cli("ckpt", "wait", str(mounted.path), "--timeout", "1", check=False)
        return message.returncode == 0 or "denied" in message.stdout + message.stderr

    wait_until(rests, "the drain rests", timeout_s=timeout_s)


def kinds(mounted: Mounted) -> set[str]:
    return {problem["kind"] for problem in mounted.status()["health"]["problems"]}


@pytest.mark.finding("D1")
@pytest.mark.promise(77, 78)
@pytest.mark.fault("U1")
def test_a_directory_of_another_is_not_taken_over(
    mounted: Mounted, monarch: MonarchCommand
) -> None:
    monarch.expects_log("source: conflict")
    there = mounted.source / "shared/alice-run"
    acts(ALICE, mounted.source / "shared", "umask 077; mkdir alice-run; echo key > alice-run/key")
    acts(MALLORY, mounted.path / "shared", "mkdir alice-run; chmod 755 alice-run")
    drain(mounted)
    status = there.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (ALICE, 0o700)
    assert "ermission denied" in acts(MALLORY, there.parent, "cat alice-run/key")


@pytest.mark.finding("D1")
@pytest.mark.promise(77, 79)
@pytest.mark.fault("U1")
def test_a_file_of_another_is_not_replaced(mounted: Mounted, monarch: MonarchCommand) -> None:
    monarch.expects_log("source: conflict")
    acts(ALICE, mounted.source / "shared", "echo alice > result.csv; ln -s result.csv link")
    acts(MALLORY, mounted.path / "shared", "echo mallory > result.csv; ln -s elsewhere link")
    acts(MALLORY, mounted.path / "shared", "echo x > gone; rm gone")
    drain(mounted)
    shared = mounted.source / "shared"
    assert (shared / "result.csv").read_text() == "alice\n"
    assert (shared / "result.csv").stat().st_uid == ALICE
    assert os.readlink(shared / "link") == "result.csv"
    # What Mallory wrote is kept, as Mallory's.
    [kept] = shared.glob("result.csv.monarch-conflict-*")
    assert (kept.read_text(), kept.stat().st_uid) == ("mallory\n", MALLORY)
    assert "drain-conflict" in kinds(mounted)
    # The alarm ends when a person acknowledges it.
    at = ["ckpt", "conflicts", str(mounted.path)]
    shown = monarch(*at, check=False)
    assert (shown.returncode, len(shown.stdout.splitlines())) == (1, 2)
    assert f"kept as shared/{kept.name}" in shown.stdout
    assert len(json.loads(monarch(*at, "--json", check=False).stdout)["conflicts"]) == 2
    assert monarch(*at, "--acknowledge").returncode == 0
    assert (monarch(*at).stdout, "drain-conflict" in kinds(mounted)) == ("no conflicts\n", False)


@pytest.mark.finding("D1")
@pytest.mark.promise(77, 79)
@pytest.mark.fault("U1")
def test_no_special_bits_and_modes_land_on_what_was_put_there_meanwhile(
    mounted: Mounted, monarch: MonarchCommand
) -> None:
    monarch.expects_log("source: conflict")
    monarch.expects_log("the source refuses")
    team, source = mounted.path / "team", mounted.source / "team"
    # The drain waits: what Mallory does first is refused as long as the directory is away.
    os.rename(source.parent / "team", source.parent / "away")
    source.write_bytes(b"")
    acts(MALLORY, team, "mkfifo p; mkdir q; chmod 4775 p; chmod 777 q", groups=(GROUP,))
    wait_until(lambda: "drain-refused" in kinds(mounted), "it is refused")
    away = source.parent / "away"
    acts(
        ALICE,
        away,
        "echo tool > tool; chmod 775 tool; umask 077; mkdir q; echo k > q/key",
        groups=(GROUP,),
    )
    os.link(away / "tool", away / "p")
    source.unlink()
    away.rename(source)
    drain(mounted)
    assert stat.S_IMODE((source / "tool").stat().st_mode) == 0o775
    assert (source / "tool").stat().st_uid == ALICE
    assert stat.S_IMODE((source / "q").stat().st_mode) & 0o777 == 0o700
    assert (source / "q").stat().st_uid == ALICE


@pytest.mark.finding("D1")
@pytest.mark.promise(77)
@pytest.mark.fault("U1")
def test_changes_are_made_at_the_source_as_the_user_who_made_them(mounted: Mounted) -> None:
    team, own = mounted.source / "team", mounted.source / "own"
    acts(ALICE, mounted.path / "own", "umask 027; mkdir d; echo 1 > d/f; ln d/f d/g; ln -s f d/s")
    acts(ALICE, mounted.path / "own", "mv d e; mkfifo e/p; chmod 604 e/f; touch -d @5 e/f")
    acts(
        MALLORY,
        mounted.path / "team",
        "umask 002; echo 1 > f; mkdir d; echo 2 > d/g",
        groups=(GROUP,),
    )
    (mounted.path / "team/by-root").write_text("root")
    os.chown(mounted.path / "team/by-root", ALICE, ALICE)
    (mounted.path / "team/by-root").chmod(0o4711)
    os.chown(mounted.path / "team/f", ALICE, GROUP)
    drain(mounted)
    assert mounted.status()["health"]["problems"] == []
    for path in (own / "e", own / "e/f", own / "e/s", own / "e/p"):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (ALICE, ALICE)
    status = (own / "e/f").stat()
    assert (status.st_nlink, stat.S_IMODE(status.st_mode), status.st_mtime) == (2, 0o604, 5)
    assert stat.S_IMODE((own / "e").stat().st_mode) == 0o750
    for path in (team / "d", team / "d/g"):
        assert (path.stat().st_uid, path.stat().st_gid) == (MALLORY, GROUP)
    assert stat.S_IMODE((team / "d").stat().st_mode) == 0o2775
    assert (team / "f").stat().st_uid == ALICE
    status = (team / "by-root").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (ALICE, ALICE, 0o4711)


@pytest.mark.finding("D1")
@pytest.mark.promise(80)
@pytest.mark.fault("U2")
def test_a_file_that_may_be_written_where_no_other_may_be_made_keeps_what_it_has(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"shared/seed": 10, "team/seed": 10, "own/seed": 10, "own/log": b"a\n"})
    os.chown(source / "own/log", ALICE, GROUP)
    (source / "own/log").chmod(0o664)
    os.setxattr(source / "own/log", "user.kept", b"1")
    mounted = prepared(monarch, source)
    monarch.expects_log("the source refuses")
    monarch.expects_log("not drained at the end")
    output = acts(MALLORY, mounted.path / "own", "echo b >> log; echo c > new", groups=(GROUP,))
    assert "denied" in output
    # Meanwhile its owner takes the right to read away from others, and that stays so.
    (source / "own/log").chmod(0o660)
    drain(mounted)
    status = (source / "own/log").stat()
    assert (source / "own/log").read_text() == "a\nb\n"
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (ALICE, GROUP, 0o660)
    assert os.getxattr(source / "own/log", "user.kept") == b"1"
    # And who may not write it any more at the source does not do so by the mount.
    (source / "own/log").chmod(0o640)
    acts(MALLORY, mounted.path / "own", "echo d >> log", groups=(GROUP,))
    wait_until(lambda: "drain-refused" in kinds(mounted), "it is refused")
    assert (source / "own/log").read_text() == "a\nb\n"


@pytest.mark.finding("D8", "W15")
@pytest.mark.promise(79)
@pytest.mark.fault("U3")
def test_a_change_of_others_is_not_overwritten(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree(dict.fromkeys(("own/append", "own/over", "own/gone"), b"v1\n"))
    (source / "shared").mkdir()
    (source / "team").mkdir()
    mounted = prepared(monarch, source)
    monarch.expects_log("source: conflict")
    here = mounted.path / "own"
    log = (here / "append").open("a")
    log.write("mount\n")
    for name in ("append", "over", "gone"):
        (source / "own" / f"{name}.new").write_text("theirs\n")
        (source / "own" / f"{name}.new").rename(source / "own" / name)
    log.close()
    (here / "over.tmp").write_text("ours\n")
    (here / "over.tmp").rename(here / "over")
    (here / "gone").unlink()
    drain(mounted)
    for name in ("append", "over", "gone"):
        assert (source / "own" / name).read_text() == "theirs\n"
    [kept] = source.glob("own/append.monarch-conflict-*")
    assert kept.read_text() == "v1\nmount\n"
    [kept] = source.glob("own/over.monarch-conflict-*")
    assert kept.read_text() == "ours\n"
    [problem] = mounted.status()["health"]["problems"]
    assert problem["kind"] == "drain-conflict" and "own/" in problem["what"]


@pytest.mark.fault("U7")
@pytest.mark.promise(88)
@pytest.mark.finding("D1")
def test_a_write_by_another_user_clears_the_set_id_bit_and_is_drained(mounted: Mounted) -> None:
    source = mounted.source
    acts(ALICE, mounted.path / "own", "echo alice > program; chmod 4777 program")
    drain(mounted)
    assert stat.S_IMODE((source / "own/program").stat().st_mode) == 0o4777
    assert acts(MALLORY, mounted.path / "own", "echo mallory >> program") == ""
    drain(mounted)
    assert (source / "own/program").read_text() == "alice\nmallory\n"
    assert stat.S_IMODE((source / "own/program").stat().st_mode) == 0o777
    # The owner's right is taken for the bit: the user who wrote may not change the mode.
    assert kinds(mounted) == set()


@pytest.mark.finding("D9")
@pytest.mark.promise(81)
@pytest.mark.fault("U4")
def test_a_change_that_is_refused_holds_up_no_other_user(
    mounted: Mounted, monarch: MonarchCommand
) -> None:
    monarch.expects_log("the source refuses")
    shared = mounted.source / "shared"
    acts(MALLORY, shared, "mkdir x; echo blocked > y")
    acts(MALLORY, mounted.path / "shared", "mkdir y; echo deep > y/file; echo later > z")
    output = acts(
        ALICE,
        mounted.path / "own",
        'python3 -c \'import os; f = open("ckpt", "w"); f.write("1"); f.flush();'
        " os.fsync(f.fileno())'; echo 2 > other",
    )
    assert output == ""
    for name in ("ckpt", "other"):
        path = mounted.path / "own" / name
        wait_until(lambda path=path: os.getxattr(path, "user.monarch.durable") == b"source", name)
    assert (mounted.source / "own/other").read_text() == "2\n"
    assert "drain-refused" in kinds(mounted)
    [problem] = mounted.status()["health"]["problems"]
    assert "shared/y" in problem["what"]
    done = mounted.cli("ckpt", "wait", str(mounted.path / "own"), "--timeout", "10", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Of the same user all stays in its order.
    assert not (shared / "z").exists()
    (shared / "y").unlink()
    drain(mounted)
    assert (shared / "y/file").read_text() == "deep\n"
    assert (shared / "z").read_text() == "later\n"
    assert mounted.status()["health"]["problems"] == []


@pytest.mark.finding("D9")
@pytest.mark.promise(81)
@pytest.mark.fault("U4")
def test_removing_the_refused_file_unblocks_its_user(
    mounted: Mounted, monarch: MonarchCommand
) -> None:
    monarch.expects_log("the source refuses")
    shared, here = mounted.source / "shared", mounted.path / "shared"
    # What others have there, and a right that is taken away meanwhile.
    acts(ALICE, shared, "echo alice > y")
    acts(MALLORY, here, "mkdir closed")
    drain(mounted)
    (shared / "closed").chmod(0o555)
    os.chown(shared / "closed", 0, 0)
    acts(MALLORY, here, "mkdir y; echo deep > y/file; chmod 750 y")
    acts(MALLORY, here, "cd closed; mkdir d; echo 1 > d/f; echo 2 > f; ln -s x s; echo 3 > keep")
    acts(MALLORY, here, "echo later > z")
    wait_until(lambda: "drain-refused" in kinds(mounted), "it is refused")
    # The bytes are on the mount, so they can be moved elsewhere before the rest is removed.
    output = acts(MALLORY, here, "cp closed/keep kept && cp y/file deep && rm -r y closed/*")
    assert output == ""
    done = mounted.cli("ckpt", "wait", str(mounted.path), "--timeout", "20", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drain-refused" not in kinds(mounted)
    found = {name: (shared / name).read_text() for name in ("y", "z", "kept", "deep")}
    assert found == {"y": "alice\n", "z": "later\n", "kept": "3\n", "deep": "deep\n"}
    assert list((shared / "closed").iterdir()) == []
