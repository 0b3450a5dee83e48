"""Mounts of packs when the source or a tier hangs, and those of an ordinary user."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import MODES, MonarchCommand
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import wait_until
from tests.mount.command import (
    needs_fuse,
    needs_root,
    not_mounted,
    one_line,
    ordinary_user,
)
from tests.mount.observe import account, accounts_agree, error_of, settled
from tests.packs.trees import chunks_of, contents, make_tree, pack

pytestmark = [needs_fuse, needs_root]

CHUNK = 8192
# Prints the digest of the contents of each file, in the order of the paths.
READ = """
import hashlib, pathlib, sys
top = pathlib.Path(sys.argv[1])
for path in sorted(each for each in top.rglob("*") if each.is_file()):
    print(hashlib.sha256(path.read_bytes()).hexdigest(), ascii(str(path.relative_to(top))))
"""


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A tree with all kinds of entries, in about eight chunks."""
    original = make_tree(tmp_path / "original")
    pack(original, tmp_path / "pack", chunk=CHUNK)
    return original


@pytest.fixture
def slow_tier(tmp_path: Path) -> Iterator[SlowSource]:
    """Where the tier ``fast`` will be. Name it before ``monarch``: it must outlive the mount."""
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="monarch-tier-", dir="/dev/shm") as disk:
        with SlowSource(Path(disk), tmp_path / "tiers" / "fast") as slowed:
            yield slowed


def digests(top: Path) -> str:
    """What another process reads: if that hangs, this one does not."""
    return subprocess.run(
        [sys.executable, "-c", READ, str(top)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def is_read(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


@pytest.mark.fault("T9")
@pytest.mark.promise(230)
@pytest.mark.modes("passthrough")
def test_a_tier_that_hangs_holds_up_no_reader_of_a_pack(
    slow_tier: SlowSource, monarch: MonarchCommand, original: Path, tmp_path: Path
) -> None:
    monarch.expects_log("tier fast is out of service")
    options = ["limits.tier_probe=200ms", "limits.tier_timeout=1s", "limits.scrub_bandwidth=0"]
    mounted = monarch.mount(tmp_path / "pack", options=options)
    slow_tier.rules("hang write .")
    expected = digests(original)
    assert digests(mounted.path) == expected

    def is_out() -> bool:
        return not account(mounted)["tiers"][0]["in_service"]

    wait_until(is_out, "the tier is out of service")
    assert digests(mounted.path) == expected
    slow_tier.rules()
    wait_until(lambda: not is_out(), "the tier is in service again")
    assert digests(mounted.path) == expected
    settled(mounted)
    accounts_agree(mounted)


@pytest.mark.fault("S1")
@pytest.mark.promise(230)
@pytest.mark.modes("relay")
def test_while_a_pack_hangs_copies_are_served_and_other_reads_fail_after_the_timeout(
    monarch: MonarchCommand, original: Path, tmp_path: Path
) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    monarch.expects_log("source: .* timed out")
    with SlowSource(tmp_path / "pack", tmp_path / "slow") as slow:
        mounted = monarch.mount(slow.path, options=["limits.source_timeout=3s"])
        first, *others = chunks_of(tmp_path / "pack")
        for name in first:
            (mounted.path / name).read_bytes()
        settled(mounted)
        slow.rules("hang * .*")
        cold = others[-1][-1]
        assert error_of(mounted.path / cold) == errno.ETIMEDOUT
        for name in first:
            assert (mounted.path / name).read_bytes() == (original / name).read_bytes()
        sizes = [(mounted.path / name).stat().st_size for name in chain.from_iterable(others)]
        assert sizes == [(original / name).stat().st_size for name in chain.from_iterable(others)]
        slow.rules()
        wait_until(lambda: is_read(mounted.path / cold), "the pack is read again")
        assert contents(mounted.path) == contents(original)
        settled(mounted)
        accounts_agree(mounted)
        mounted.umount()


@pytest.mark.promise(224)
@pytest.mark.promise(230)
@pytest.mark.modes("relay")
def test_an_ordinary_user_packs_mounts_and_unpacks_files_of_others(
    monarch: MonarchCommand,
) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, home = user.mkdir("source"), user.mkdir("mnt"), user.directory / "home"
        (source / "of another").write_bytes(b"another")
        os.chown(source / "of another", 4321, 4321)
        (source / "of root").write_bytes(b"root")
        (source / "of root").chmod(0o4755)
        (source / "secret").write_bytes(b"secret")
        (source / "secret").chmod(0o600)
        build = ("pack", "build", str(source), "-o", str(home / "pack"), "-q")
        refused = user(*build)
        assert refused.returncode == 4
        assert "/secret: it cannot be opened: Permission denied" in refused.stderr
        assert not (home / "pack/pack.json").exists()
        (source / "secret").unlink()
        done = user(*build)
        assert done.returncode == 0, done.stderr
        mode = ",".join(MODES[monarch.mode])
        done = user("mount", str(home / "pack"), str(mnt), "-o", mode)
        assert done.returncode == 0, done.stderr
        read = "import os, sys; print([(name, os.stat(name).st_uid, open(name).read())"
        read += " for name in sorted(os.listdir())])"
        seen = user.run("sh", "-c", 'cd "$0" && exec "$1" -c "$2"', str(mnt), user.python, read)
        assert seen.stdout == "[('of another', 4321, 'another'), ('of root', 0, 'root')]\n"
        assert user("umount", str(mnt)).returncode == 0
        done = user("pack", "unpack", str(home / "pack"), "-o", str(home / "again"), "--set-id")
        assert done.returncode == 0, done.stderr
        assert "set-ID bits are set only on your own files" in done.stderr
        again = home / "again"
        assert contents(again) == contents(source)
        assert {path.stat().st_uid for path in again.iterdir()} == {again.stat().st_uid} != {0}
        assert (again / "of root").stat().st_mode & 0o7777 == 0o755


@pytest.mark.promise(223)
@pytest.mark.modes("relay")
def test_a_pack_that_is_unfinished_or_lacks_its_description_is_not_mounted(
    monarch: MonarchCommand, original: Path, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    packed = tmp_path / "pack"
    mount = ("mount", str(packed), str(mountpoint), "--tier", f"{tmp_path}/tier:1MiB")
    (packed / "pack.json").rename(tmp_path / "pack.json")
    done = not_mounted(monarch, mountpoint, *mount)
    assert (done.returncode, "index --rebuild" in one_line(done)) == (14, True)
    (packed / "building").write_text('{"format": "monarch-pack"}\n')
    done = not_mounted(monarch, mountpoint, *mount)
    assert (done.returncode, "is not finished" in one_line(done)) == (14, True)
