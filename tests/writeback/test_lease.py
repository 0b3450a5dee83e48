"""Leases at the source: how mounts notice each other, hostile lease files, and expired leases."""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.errors import LockedError
from monarch.tiers.source import Source
from monarch.writeback import lease as leases
from monarch.writeback.lease import Lease, begins_with, overlap

LEASES = ".monarch-leases.part"
Take = Callable[..., Lease]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Source]:
    (tmp_path / "source").mkdir()
    source = Source(os.fsencode(tmp_path / "source"))
    yield source
    source.close()


@pytest.fixture
def take(shared: Source) -> Take:
    def taking(token: str, *patterns: str, share: bool = False) -> Lease:
        return Lease.acquire(
            shared,
            token=token,
            patterns=patterns or ("**",),
            mountpoint=f"/mnt/{token}",
            shared=share,
        )

    return taking


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What follows is done on another node."""

    def at(node: str) -> None:
        monkeypatch.setattr(leases, "boot_now", lambda: node)

    return at


def file_of(source: Source, token: str) -> Path:
    return Path(os.fsdecode(source.path)) / LEASES / token


def grow_old(path: Path, seconds: float) -> None:
    now = path.stat()
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns - int(seconds * 1e9)))


@pytest.mark.parametrize(
    ("one", "other", "meets"),
    [
        ("**", "ckpt/**", True),
        ("ckpt/**", "logs/**", False),
        ("ckpt/**", "ckpt/run1/x", True),
        ("runs/*/logs", "runs/1/ckpt", False),
        ("runs/*/logs", "runs/1/logs/x", True),
        ("runs/*", "runs/[ab]", True),
        ("**/*.pt", "data", True),
        ("a", "b", False),
        ("a/", "a", True),
        # A part that takes long to compare may be anything.
        ("a", "b" * 300, True),
        ("a", "[" * 200, True),
        ("a/c", "[" * 200 + "/d", False),
    ],
)
def test_patterns_meet_unless_no_path_can_have_both(one: str, other: str, meets: bool) -> None:
    assert overlap([one], [other]) == overlap([other], [one]) == meets
    assert begins_with("runs/a/*/logs") == "runs/a" and begins_with("**") == ""


@pytest.mark.finding("W8")
@pytest.mark.promise(167)
@pytest.mark.fault("N1")
def test_a_second_writer_of_the_same_paths_is_refused_with_the_name_of_the_first(
    take: Take, shared: Source, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    first = take("aa", "ckpt/**")
    elsewhere("two")
    with pytest.raises(LockedError) as raised:
        take("bb", "**")
    assert "/mnt/aa on node" in str(raised.value) and "ckpt/**" in str(raised.value)
    assert "writeback.shared" in str(raised.value)
    assert sorted(os.listdir(file_of(shared, "aa").parent)) == ["aa"]
    take("cc", "logs/**").release()
    first.release()
    take("bb", "**").release()
    assert os.listdir(file_of(shared, "aa").parent) == []


@pytest.mark.promise(168)
@pytest.mark.fault("N1")
def test_two_mounts_with_shared_paths_are_both_warned(
    take: Take, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    first = take("aa")
    elsewhere("two")
    second = take("bb", share=True)
    assert [holder.token for holder in second.others] == ["aa"]
    first.renew()
    assert [holder.token for holder in first.others] == ["bb"]
    second.release()
    first.renew()
    assert (first.others, first.was_lost) == ((), False)


def test_of_two_that_came_at_once_the_later_one_is_refused(
    take: Take, shared: Source, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    take("aa")
    lease = json.loads(file_of(shared, "aa").read_bytes())
    elsewhere("two")
    # As if the other had begun later, and had not looked yet.
    file_of(shared, "aa").write_text(json.dumps({**lease, "since_ns": lease["since_ns"] + 10**9}))
    assert [holder.token for holder in take("bb").others] == ["aa"]


@pytest.mark.promise(167)
@pytest.mark.fault("N2")
def test_an_expired_lease_does_not_count(
    take: Take, shared: Source, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    first = take("aa")
    grow_old(file_of(shared, "aa"), leases.STALE_S - 10)
    elsewhere("two")
    with pytest.raises(LockedError):
        take("bb")
    grow_old(file_of(shared, "aa"), 20)
    second = take("bb")
    assert second.others == ()
    # A mount that was cut off for so long reports that another may have written.
    elsewhere("one")
    first.renew()
    assert first.was_lost and [holder.token for holder in first.others] == ["bb"]


@pytest.mark.promise(167)
@pytest.mark.fault("N2")
def test_a_killed_daemon_of_this_machine_blocks_no_mount(take: Take, shared: Source) -> None:
    child = os.fork()
    if not child:
        take("aa")
        os._exit(0)
    os.waitpid(child, 0)
    assert file_of(shared, "aa").exists()
    assert take("bb").others == ()


@pytest.mark.promise(167)
def test_the_next_mount_with_the_same_journal_takes_its_lease_over(
    take: Take, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("before the reboot")
    take("aa")
    elsewhere("after it")
    assert take("aa").others == ()


def test_undrained_files_of_an_ended_mount_are_reported_and_no_mount_is_refused(
    take: Take, elsewhere: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere("one")
    take("aa").release(undrained=True)
    elsewhere("two")
    with caplog.at_level(logging.WARNING):
        assert take("bb").others == ()
    assert "has ended with changes that are not at the source" in caplog.text


@pytest.mark.promise(169)
@pytest.mark.fault("N3")
def test_foreign_files_among_the_leases_do_no_harm(
    take: Take, shared: Source, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    first = take("aa")
    place = file_of(shared, "aa").parent
    (place / "link").symlink_to(secret)
    os.mkfifo(place / "fifo")
    (place / "garbage").write_bytes(b"\xff\0 {")
    (place / "deep").write_text("[" * 60000)
    (place / "list").write_text("[]")
    (place / "directory").mkdir()
    with (place / "large").open("wb") as file:
        file.truncate(1 << 40)
    lease = json.loads((place / "aa").read_bytes())
    padded = json.dumps({**lease, "node": "padded", "boot": "x"}) + " " * 100_000
    (place / "padded").write_text(padded)
    for key in ("pid", "started", "since_ns", "namespace"):
        (place / f"infinite-{key}").write_text(json.dumps({**lease, key: math.inf, "boot": "x"}))
    (place / "evil").write_text(
        json.dumps(
            {**lease, "node": "\x1b[2J\n", "boot": "x", "patterns": ["**", "\x1b" * 900] * 9}
        )
    )
    first.renew()
    assert [holder.node for holder in first.others] == ["?[2J?"]
    assert first.trouble == ""
    words = first.others[0].words()
    assert words.isprintable() and len(words) < 2000
    assert secret.read_text() == "{}"
    first.release()
    assert (place / "evil").exists() and not (place / "aa").exists()


@pytest.mark.promise(169)
@pytest.mark.fault("N3")
def test_thousands_of_large_leases_of_a_hostile_user_take_little_time_and_hide_no_mount(
    take: Take,
    shared: Source,
    elsewhere: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = take("aa", "ckpt/run")
    elsewhere("two")
    take("zz", "ckpt/**", share=True)
    elsewhere("one")
    place = file_of(shared, "aa").parent
    lease = json.loads((place / "aa").read_bytes())
    patterns = [f"[abc]*{number}" for number in range(3000)]
    for number in range(200):
        (place / f"b{number}").write_text(json.dumps({**lease, "boot": "x", "patterns": patterns}))
    read, compared = 0, 0
    read_file, compare = os.read, fnmatch.fnmatchcase

    def reading(fd: int, count: int) -> bytes:
        nonlocal read
        read += len(content := read_file(fd, count))
        return content

    def comparing(name: str, pattern: str) -> bool:
        nonlocal compared
        compared += 1
        return compare(name, pattern)

    monkeypatch.setattr(os, "read", reading)
    monkeypatch.setattr(fnmatch, "fnmatchcase", comparing)
    first.renew()
    assert read < 5 << 20 and compared < 70_000
    assert "zz" in {holder.token for holder in first.others}


@pytest.mark.promise(167, 331)
@pytest.mark.fault("N1")
def test_a_lease_of_another_version_counts_as_one_for_all_paths(
    take: Take, shared: Source, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    take("aa", "ckpt/**")
    path = file_of(shared, "aa")
    lease = json.loads(path.read_bytes())
    elsewhere("two")
    for missing in lease.keys() - {"monarch"}:
        fields = {key: value for key, value in lease.items() if key != missing}
        path.write_text(json.dumps({**fields, "format": [2]}))
        with pytest.raises(LockedError):
            take("bb", "ckpt/**")
    path.write_text(json.dumps({"monarch": 2}))
    with pytest.raises(LockedError):
        take("bb", "logs/**")
    keeper = take("bb", "logs/**", share=True)
    assert keeper.is_in_force("aa")
    assert keeper.others[0].words().isprintable()


@pytest.mark.promise(167)
def test_a_mount_from_before_the_clock_was_set_back_still_refuses_a_second_one(
    take: Take, shared: Source, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    take("aa")
    lease = json.loads(file_of(shared, "aa").read_bytes())
    elsewhere("two")
    hour_ns = 3600 * 10**9
    file_of(shared, "aa").write_text(json.dumps({**lease, "since_ns": lease["since_ns"] + hour_ns}))
    with pytest.raises(LockedError):
        take("bb")


@pytest.mark.promise(167)
def test_a_lease_from_before_the_clock_was_set_back_expires(
    take: Take, shared: Source, elsewhere: Callable[[str], None]
) -> None:
    elsewhere("one")
    first = take("aa")
    grow_old(file_of(shared, "aa"), -3600)
    elsewhere("two")
    assert take("bb", share=True).others == ()
    # Its next renewal is by the clock of now.
    elsewhere("one")
    first.renew()
    elsewhere("two")
    assert [holder.token for holder in take("cc", share=True).others] == ["aa", "bb"]


@pytest.mark.promise(167, 331)
@pytest.mark.fault("M5")
@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_lease_stays_in_force_while_it_is_renewed_when_the_clock_of_the_source_jumps(
    take: Take,
    elsewhere: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    jump_s: int,
) -> None:
    now, utime, write = 1000.0, os.utime, leases._write

    def jumped(path: str, **more: Any) -> None:
        times = time.time_ns() + jump_s * 10**9
        utime(path, ns=(times, times), **more)

    def written(directory: int, holder: leases.Holder) -> int:
        write(directory, holder)
        jumped(holder.token, dir_fd=directory)
        return os.stat(holder.token, dir_fd=directory).st_mtime_ns

    def others(lease: Lease) -> list[str]:
        lease.renew()
        assert lease.is_in_force("aa") == bool(lease.others)
        return [holder.token for holder in lease.others]

    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now))
    elsewhere("one")
    first = take("aa", share=True)
    elsewhere("two")
    second = take("bb", share=True)
    monkeypatch.setattr(os, "utime", jumped)
    monkeypatch.setattr(leases, "_write", written)
    now += 15
    assert others(second) == ["aa"]
    first.renew()
    now += leases.STALE_S - 1
    assert others(second) == ["aa"]
    # The node of the first has died.
    now += leases.STALE_S + 1
    assert others(second) == []
    first.renew()
    assert others(second) == ["aa"]


@pytest.mark.promise(169)
@pytest.mark.fault("N3")
@pytest.mark.parametrize("how", ["removed", "directory removed", "link", "another's"])
def test_a_lease_that_others_removed_is_made_again_and_reported(
    take: Take, shared: Source, tmp_path: Path, how: str
) -> None:
    first = take("aa")
    path = file_of(shared, "aa")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    before = secret.stat().st_mtime_ns
    lease = json.loads(path.read_bytes())
    path.unlink()
    if how == "directory removed":
        path.parent.rmdir()
    elif how == "link":
        path.symlink_to(secret)
    elif how == "another's":
        path.write_text(json.dumps({**lease, "pid": 1}))
    first.renew()
    assert first.was_lost and first.trouble == ""
    assert json.loads(path.read_bytes()) == lease and not path.is_symlink()
    assert (secret.read_text(), secret.stat().st_mtime_ns) == ("secret", before)


@pytest.mark.fault("N4")
def test_a_source_that_refuses_a_lease_is_reported_and_mounted(
    take: Take, shared: Source, caplog: pytest.LogCaptureFixture
) -> None:
    Path(os.fsdecode(shared.path), LEASES).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        lease = take("aa")
    assert lease.trouble and "no lease can be put there" in caplog.text
    lease.renew()
    lease.release()


@pytest.mark.promise(167)
def test_where_the_root_is_closed_a_lease_lies_where_the_patterns_begin(
    take: Take, shared: Source, elsewhere: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(os.fsdecode(shared.path))
    (root / "own").mkdir()
    opened = leases._open_leases

    def closed(root: int, path: bytes, make: bool) -> int:
        if make and not path:
            raise PermissionError(13, "closed")
        return opened(root, path, make)

    monkeypatch.setattr(leases, "_open_leases", closed)
    elsewhere("one")
    first = take("aa", "own/**")
    assert os.listdir(root / "own" / LEASES) == ["aa"] and os.listdir(root) == ["own"]
    elsewhere("two")
    with pytest.raises(LockedError):
        take("bb", "own/x")
    first.renew()
    assert first.others == () and not first.was_lost
    first.release()
    assert os.listdir(root / "own" / LEASES) == []


def test_the_directory_of_leases_is_as_open_as_the_one_above_it(take: Take, shared: Source) -> None:
    root = Path(os.fsdecode(shared.path))
    root.chmod(0o2770)
    take("aa")
    assert (root / LEASES).stat().st_mode & 0o7777 == 0o1770


def test_a_lease_is_found_by_its_name_also_behind_many_others(
    take: Take, elsewhere: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [f"owner{number}" for number in range(5)]
    elsewhere("one")
    for token in tokens:
        # The paths of a node that lives may differ.
        take(token, f"{token}/**", share=True)
    elsewhere("two")
    keeper = take("keeper", "ckpt/**", share=True)
    monkeypatch.setattr(leases, "_MOST", 1)
    assert all(keeper.is_in_force(token) for token in tokens)
    assert not keeper.is_in_force("gone")


@pytest.mark.promise(331)
def test_a_node_that_lives_is_known_to_a_mount_that_cannot_renew_its_lease(
    shared: Source,
    take: Take,
    elsewhere: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: now))
    elsewhere("one")
    take("owner", share=True)
    elsewhere("two")
    keeper = take("keeper", share=True)
    assert keeper.is_in_force("owner")
    # The owner renews its lease, and the keeper does not.
    grow_old(file_of(shared, "owner"), -100)
    now += 100
    assert keeper.is_in_force("owner")
    # Now the owner does not either.
    now += 100
    assert not keeper.is_in_force("owner")


@pytest.mark.parametrize("undrained", [False, True])
def test_a_lease_that_was_released_is_not_put_again(
    shared: Source, take: Take, undrained: bool
) -> None:
    lease = take("mine")
    lease.release(undrained=undrained)
    # The task that renews it may run until the mount has ended.
    lease.renew()
    path = file_of(shared, "mine")
    assert path.exists() == undrained
    assert not undrained or json.loads(path.read_text())["undrained"]


def test_a_mount_without_a_lease_does_not_know_whether_others_are_gone(
    shared: Source, take: Take
) -> None:
    (Path(os.fsdecode(shared.path)) / LEASES).write_bytes(b"no directory")
    keeper = take("keeper", share=True)
    assert keeper.trouble
    with pytest.raises(OSError, match="not known"):
        keeper.is_in_force("owner")


@pytest.mark.promise(167)
def test_a_holder_in_another_time_namespace_counts_as_alive(take: Take, shared: Source) -> None:
    """The start times of processes that it sees differ from those here."""
    script = (
        "import os, sys\n"
        "from monarch.tiers.source import Source\n"
        "from monarch.writeback.lease import Lease\n"
        "Lease.acquire(Source(os.fsencode(sys.argv[1])), token='aa', patterns=('**',),"
        " mountpoint='/mnt/aa', shared=False)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *as_root, "--fork", "--time", "--boottime", "100000"]
    command = [*unshare, sys.executable, "-c", script, shared.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        with pytest.raises(LockedError, match="/mnt/aa"):
            take("bb")
