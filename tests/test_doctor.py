"""`monarch doctor`: its findings on machines of many kinds, and on this one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.checks.doctor import (
    Machine,
    check_configuration,
    check_datapath,
    check_fuse_device,
    check_fusermount,
    check_health,
    check_kernel,
    check_memory,
    check_mounts,
    check_packages,
    check_request_timeouts,
    check_scheduler,
    check_state_root,
    check_user_allow_other,
    examine,
)
from monarch.checks.preflight import Check
from monarch.checks.preflight_writes import check_mappings
from monarch.cli import doctor as doctor_verb
from monarch.config.defaults import readable_name
from monarch.control.registry import MountRecord, Registry, SeenMount, process_started, seen_mounts
from monarch.fuse.datapath_mode import Abilities
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.posix.private_directory import Lock
from monarch.text import GiB
from tests.conftest import MonarchCommand, Tree
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.faults.limits import control_group
from tests.mount.conftest import slow

__all__ = ["slow"]

_NOSUID_NODEV, _DETACH = 2 | 4, 2


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine in a directory: /dev/fuse there, an ordinary user, a recent kernel."""
    for name in ("dev", "etc", "proc", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "dev/fuse").touch()
    (tmp_path / "etc/fuse.conf").write_text("# user_allow_other\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2097152 kB\n")
    program = tmp_path / "bin/fusermount3"
    program.write_text("#!/bin/sh\necho fusermount3 version: 3.14.0\n")
    program.chmod(0o4755)
    return Machine(
        Abilities(
            built=True, release="6.18.1-cluster", may_pass_through=False, memory_bytes=64 * GiB
        ),
        root=tmp_path,
        uid=1000,
        environ={"PATH": str(tmp_path / "bin")},
    )


def test_this_machine_is_examined_without_an_exception(tmp_path: Path) -> None:
    checks = list(examine(Machine.here(), tmp_path))
    assert {c.name for c in checks} >= {"fuse device", "kernel", "packages", "memory", "mounts"}
    assert all(c.advice for c in checks if c.status != "ok")
    assert not list(tmp_path.iterdir())


def test_a_machine_without_the_device_is_reported_with_the_remedy(machine: Machine) -> None:
    assert check_fuse_device(machine).status == "ok"
    (machine.root / "dev/fuse").unlink()
    check = check_fuse_device(machine)
    assert (check.status, "modprobe fuse" in check.advice) == ("fail", True)
    (machine.root / "dev/fuse").mkdir()
    assert "cannot be opened: Is a directory" in check_fuse_device(machine).detail


def able(machine: Machine, **abilities: Any) -> Machine:
    """The machine with other abilities."""
    return dataclasses.replace(
        machine, abilities=dataclasses.replace(machine.abilities, **abilities)
    )


def test_users_need_a_set_uid_fusermount3_and_root_does_not(machine: Machine) -> None:
    program = machine.root / "bin/fusermount3"
    assert check_fusermount(machine).detail.endswith("fusermount3 version: 3.14.0")
    program.chmod(0o755)
    check = check_fusermount(machine)
    assert (check.status, "chmod u+s" in check.advice) == ("fail", True)
    assert check_fusermount(dataclasses.replace(machine, uid=0)).status == "ok"
    program.write_text("#!/bin/sh\nexit 1\n")
    assert check_fusermount(machine).status == "fail"
    program.unlink()
    assert check_fusermount(machine).status == "fail"
    assert check_fusermount(dataclasses.replace(machine, uid=0)).status == "ok"


def test_user_allow_other_counts_only_when_it_is_no_comment(machine: Machine) -> None:
    conf = machine.root / "etc/fuse.conf"
    assert check_user_allow_other(machine).status == "warn"
    conf.write_text("mount_max = 10\n  user_allow_other\n")
    assert check_user_allow_other(machine).status == "ok"
    conf.unlink()
    assert check_user_allow_other(machine).status == "warn"
    assert check_user_allow_other(dataclasses.replace(machine, uid=0)).status == "ok"


@pytest.mark.parametrize(
    ("kernel", "status"),
    [
        ("4.18.0-553.el8", "warn"),
        ("5.14.0-427.el9", "ok"),
        ("6.8.12", "ok"),
        ("6.9.0", "warn"),
        ("6.12.1-1", "warn"),
        ("6.13.0", "ok"),
        ("what", "warn"),
    ],
)
def test_kernels_whose_directory_cache_never_expires_are_named(
    machine: Machine, kernel: str, status: str
) -> None:
    assert check_kernel(able(machine, release=kernel)).status == status


def test_the_mode_of_reads_is_reported_and_why_it_is_not_a_faster_one(machine: Machine) -> None:
    small = "relay, open: none for small files if twice their size fits into 64 GiB of memory, "
    user = check_datapath(machine)
    assert user.detail == small + (
        "relay for others: passthrough needs root (the capability CAP_SYS_ADMIN)"
    )
    root = able(machine, may_pass_through=True)
    assert check_datapath(root).detail == small + "passthrough for others"
    assert check_datapath(able(root, release="5.14.0-el9")).detail == small + (
        "relay for others: Linux 5.14.0-el9 has no passthrough, it needs 6.9"
    )
    assert {check_datapath(m).status for m in (machine, root)} == {"ok"}


def test_a_datapath_that_is_not_built_is_a_warning_with_the_way_out(machine: Machine) -> None:
    check = check_datapath(able(machine, built=False, may_pass_through=True))
    assert (check.status, "is not built" in check.detail) == ("warn", True)
    assert "install gcc" in check.advice


def test_the_packages_are_named_with_their_versions() -> None:
    (check,) = check_packages()
    assert "pyfuse3 " in check.detail


def test_little_memory_is_a_warning(machine: Machine) -> None:
    assert check_memory(machine) == Check("memory", "ok", "2 GiB available")
    (machine.root / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    assert check_memory(machine).status == "warn"
    (machine.root / "proc/meminfo").unlink()
    assert check_memory(machine).status == "warn"


def test_a_state_directory_on_a_network_file_system_is_a_warning(tmp_path: Path) -> None:
    root, network = tmp_path / "state", tmp_path / "home"
    network.mkdir()
    table = [MountedFileSystem(Path("/"), "ext4"), MountedFileSystem(network.resolve(), "nfs4")]
    assert [c.status for c in check_state_root(root, table)] == ["ok"]
    (check,) = check_state_root(network / "deep/state", table)
    assert (check.status, "nfs4" in check.detail) == ("warn", True)
    table.append(MountedFileSystem(network.resolve(), "xfs"))
    assert [c.status for c in check_state_root(network / "deep/state", table)] == ["ok"]


def test_the_directory_with_the_states_of_all_mounts_is_no_mount_s(tmp_path: Path) -> None:
    root = tmp_path / "state"
    for name in ("mounts", "imagenet-1f2e3d4c"):
        (root / name).mkdir(parents=True)
    root.chmod(0o755)
    assert [c.status for c in check_state_root(root, mount_table())] == ["ok"]
    link = tmp_path / "link"
    link.symlink_to(root)
    assert [c.status for c in check_state_root(link, mount_table())] == ["ok"]
    os.lchown(link, 1234, 1234)
    (check,) = check_state_root(link, mount_table())
    assert (check.status, "a symbolic link of uid 1234" in check.detail) == ("fail", True)


def test_a_state_directory_under_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = check_state_root(tmp_path / "file/state", mount_table())
    assert (check.status, "is not a directory" in check.detail) == ("fail", True)


def a_record(mountpoint: str, *, alive: bool) -> MountRecord:
    started = process_started(os.getpid()) or 0
    return MountRecord(
        mountpoint=mountpoint,
        source="/pfs",
        pid=os.getpid(),
        pid_started=started if alive else started - 1,
        socket="/s",
        state="/s",
        log="/l",
        started_ns=1,
    )


def test_served_stale_leftover_and_foreign_mounts_are_distinguished(tmp_path: Path) -> None:
    records = Registry(tmp_path)
    records.add(a_record("/mnt/served", alive=True))
    records.add(a_record("/mnt/stale", alive=False))
    records.add(a_record("/mnt/leftover", alive=False))
    names = ("/mnt/served", "/mnt/stale", str(tmp_path))
    table = [MountedFileSystem(Path(name), "fuse.monarch") for name in names]
    table.append(MountedFileSystem(Path("/mnt/leftover"), "fuse.sshfs"))
    states = {seen.mountpoint: seen.state for seen in seen_mounts(records, table)}
    assert states == {
        "/mnt/served": "served",
        "/mnt/stale": "stale",
        "/mnt/leftover": "leftover",
        str(tmp_path): "foreign",
    }


def test_a_stale_mount_fails_and_a_leftover_record_warns() -> None:
    found = list(
        check_mounts([SeenMount("/mnt/a\n", "stale", None), SeenMount("/mnt/b", "leftover", None)])
    )
    assert [c.status for c in found] == ["fail", "warn"]
    assert "`monarch umount /mnt/a\\n`" in found[0].advice
    assert [c.status for c in check_mounts([SeenMount("/mnt/c", "served", None)])] == ["ok"]


def test_a_configuration_is_validated_and_its_tiers_are_measured(
    machine: Machine, tmp_path: Path
) -> None:
    file = tmp_path / "monarch.yaml"
    source, tier = tmp_path / "source", tmp_path / "tier"
    source.mkdir()
    (source / "file").touch()
    file.write_text(
        "mounts:\n"
        "  data:\n"
        f"    source: {source}\n"
        f"    mountpoint: {tmp_path}/mnt\n"
        "    datapath: passthrough\n"
        f"    tiers: [{{path: {tier}, name: fast, capacity: 1MiB, keep_free: 0}},"
        f" {{path: {tier}2, name: vast, capacity: 8000P}},"
        f" {{path: {file}/x, name: wrong}}]\n"
    )
    found = {c.name: c.status for c in check_configuration(file, machine.abilities)}
    assert found == {
        "configuration": "ok",
        "data: source": "ok",
        "data: mount point": "fail",
        "data: state": "ok",
        "data: snapshot": "ok",
        "data: datapath": "fail",
        "data: tier fast": "ok",
        "data: tier vast": "warn",
        "data: tier wrong": "fail",
    }
    assert not tier.exists()
    file.write_text("mounts: {data: {sorce: /x}}\n")
    assert {c.status for c in check_configuration(file, machine.abilities)} == {"fail"}


def test_inside_a_slurm_step_the_way_out_is_named(machine: Machine) -> None:
    assert list(check_scheduler(machine)) == []
    job = dataclasses.replace(machine, environ={"SLURM_JOB_ID": "7"})
    (check,) = check_scheduler(job)
    assert (check.status, "job 7" in check.detail) == ("ok", True)
    step = dataclasses.replace(machine, environ={"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    (check,) = check_scheduler(step)
    assert (check.status, "prolog" in check.advice) == ("warn", True)


def test_the_verb_prints_every_check_and_fails_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_verb, "state_root", lambda: tmp_path)
    missing = str(tmp_path / "none.yaml")
    verb = doctor_verb.doctor
    assert verb.main(["-c", missing], standalone_mode=False) == 1
    shown = capsys.readouterr().out
    assert "fuse device:" in shown
    assert "fail  configuration:" in shown
    assert verb.main(["-c", missing, "--json"], standalone_mode=False) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {"name", "status", "detail", "advice"} == set(report["checks"][0])


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
def test_a_mount_that_hangs_costs_a_short_wait_and_a_dead_one_is_stale(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    records = Registry(tmp_path / "state")
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    try:
        made = libc.mount(b"x", bytes(mountpoint), b"fuse.monarch", _NOSUID_NODEV, options)
        if made != 0:
            pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
        # The kernel's first request is not answered.
        (seen,) = (s for s in seen_mounts(records) if s.mountpoint == str(mountpoint))
        assert seen.state == "foreign"
        os.close(device)
        device = -1
        (seen,) = (s for s in seen_mounts(records) if s.mountpoint == str(mountpoint))
        assert seen.state == "stale"
        assert "umount" in seen.advice
    finally:
        libc.umount2(bytes(mountpoint), _DETACH)
        if device >= 0:
            os.close(device)


# -- the places of a configured mount, each broken as it breaks in life ----------------------------


@dataclasses.dataclass
class Site:
    """A configuration of one mount with one tier, and what the doctor says about it."""

    directory: Path
    abilities: Abilities
    extra: str = ""
    records: tuple[MountRecord, ...] = ()

    def __post_init__(self) -> None:
        for name in ("source", "mnt", "tier"):
            (self.directory / name).mkdir(exist_ok=True)
        (self.directory / "source/file").write_text("x")

    @property
    def snapshot(self) -> Path:
        return self.directory / "state/snapshot.lmdb"

    def found(self, what: str) -> Check:
        """The only check whose name ends so."""
        d = self.directory
        file = d / "monarch.yaml"
        file.write_text(
            f"mounts:\n  data:\n    source: {d}/source\n    mountpoint: {d}/mnt\n"
            f"    state: {d}/state\n"
            f"    tiers: [{{path: {d}/tier, name: fast, capacity: 1MiB, keep_free: 0}}]\n"
            f"    {self.extra}\n"
        )
        checks = list(check_configuration(file, self.abilities, self.records))
        assert all(c.advice for c in checks if c.status != "ok"), checks
        (check,) = [c for c in checks if c.name.endswith(what)]
        return check

    def expect(self, what: str, status: str, *words: str) -> None:
        check = self.found(what)
        assert check.status == status, check
        for word in words:
            assert word in f"{check.detail}; {check.advice}", check


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, Abilities(True, "6.18.1", True, 64 * GiB))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def on_disk(site: Site, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The tier's directory on a file system of its own: the arguments of its mkfs."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    image = site.directory / "image"
    image.write_bytes(b"")
    os.truncate(image, 8 << 20)
    if shutil.which(request.param[0]) is None:
        pytest.skip(f"{request.param[0]} is not installed")
    subprocess.run([*request.param, str(image)], check=True, capture_output=True)
    tier = site.directory / "tier"
    mount("-o", "loop", str(image), str(tier))
    yield tier
    subprocess.run(["umount", "-l", str(tier)], check=True)


def test_a_healthy_site_has_no_findings(site: Site) -> None:
    for what in ("source", "mount point", "state", "snapshot", "tier fast"):
        assert site.found(what).status == "ok", site.found(what)
    assert not (site.directory / "state").exists()
    assert list((site.directory / "tier").iterdir()) == []


def test_a_source_that_is_missing_a_file_or_empty_is_reported(site: Site) -> None:
    source = site.directory / "source"
    (source / "file").unlink()
    site.expect("source", "warn", "is empty", "is mounted")
    source.rmdir()
    site.expect("source", "fail", "does not exist", "mount its file system first")
    source.write_text("")
    site.expect("source", "fail", "is not a directory")


@pytest.mark.timeout(100)
def test_a_source_that_hangs_costs_a_short_wait(
    tmp_path_factory: pytest.TempPathFactory, site: Site
) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    source = site.directory / "source"
    root = tmp_path_factory.mktemp("hung")
    with SlowSource(root, source, attribute_s=0) as slow:
        slow.rules("hang readdir .", "hang getattr .")
        site.expect("source", "fail", "has not answered for 2 s", "umount -l")
        slow.rules("err getattr EIO .", "err readdir EIO .")
        site.expect("source", "fail", "Input/output error", "dmesg")


def test_a_mount_point_that_cannot_be_used_is_reported(site: Site) -> None:
    (site.directory / "mnt/file").write_text("")
    site.expect("mount point", "fail", "empty")


@pytest.mark.parametrize("on_disk", [["mkfs.ext4", "-q"]], indirect=True)
def test_a_tier_on_a_disk_that_became_read_only_is_reported(site: Site, on_disk: Path) -> None:
    assert site.found("tier fast").status == "ok"
    subprocess.run(["mount", "-o", "remount,ro", str(on_disk)], check=True)
    site.expect("tier fast", "fail", "is on a read-only file system", "remount,rw")


@pytest.mark.parametrize("on_disk", [["mkfs.ext4", "-q", "-I", "128"]], indirect=True)
def test_a_tier_with_coarse_times_is_reported(site: Site, on_disk: Path) -> None:
    before = sorted(on_disk.iterdir())
    site.expect("tier fast", "warn", "does not keep times exactly", "mkfs.ext4 -I 256")
    assert sorted(on_disk.iterdir()) == before


@pytest.mark.parametrize("on_disk", [["mkfs.ext4", "-q", "-m", "0"]], indirect=True)
def test_a_tier_that_is_full_or_has_no_inodes_is_reported(site: Site, on_disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(1 << 20):
            (on_disk / str(number)).touch()
    site.expect("tier fast", "warn", "no inode is free", "df -i")
    for path in on_disk.iterdir():
        if path.is_file():
            path.unlink()
    with (on_disk / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    site.expect("tier fast", "warn", "is full", "free space there")


@needs_root
def test_a_tier_on_overlay_is_reported_with_a_disk_that_allows_passthrough(site: Site) -> None:
    d, tier = site.directory, site.directory / "tier"
    for name in ("lower", "upper", "work"):
        (d / name).mkdir()
    layers = f"lowerdir={d}/lower,upperdir={d}/upper,workdir={d}/work"
    mount("-t", "overlay", "-o", layers, "overlay", str(tier))
    try:
        site.expect("tier fast", "warn", "is on overlay", "-v /local/nvme:/tier")
        site.extra = "datapath: relay"
        assert site.found("tier fast").status == "ok"
    finally:
        subprocess.run(["umount", "-l", str(tier)], check=True)


@needs_root
def test_a_tier_on_a_network_file_system_is_reported(
    tmp_path_factory: pytest.TempPathFactory, site: Site
) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    with SlowSource(tmp_path_factory.mktemp("net"), site.directory / "tier"):
        site.expect("tier fast", "warn", "fuse.slowfs, a network file system", "/dev/shm")


def test_planted_files_in_the_tier_or_the_state_are_reported(site: Site) -> None:
    elsewhere = site.directory / "elsewhere"
    elsewhere.mkdir()
    (site.directory / "tier/monarch").symlink_to(elsewhere)
    (site.directory / "state").symlink_to(elsewhere)
    site.expect("tier fast", "fail", "monarch is a symbolic link", "planted")
    # A link of one's own is followed; what it leads to is judged.
    site.expect(": state", "fail", "is open to other users", "--state")
    if os.geteuid() == 0:
        os.lchown(site.directory / "state", 12345, 12345)
        site.expect(": state", "fail", "is a symbolic link of uid 12345", "--state")
    (site.directory / "tier/monarch").unlink()
    (site.directory / "tier/monarch").write_text("")
    site.expect("tier fast", "fail", "is not a directory", "remove it")


@needs_root
def test_directories_of_other_users_are_reported(site: Site) -> None:
    private, state = site.directory / "tier/monarch", site.directory / "state"
    for path in (private, state):
        path.mkdir()
        (path / "lock").touch()
        os.chown(path, 12345, 12345)
    site.expect("tier fast", "fail", "belongs to uid 12345", "choose another directory")
    site.expect(": state", "fail", "belongs to uid 12345", "--state")


@needs_root
def test_directories_that_the_user_may_not_write_or_read_are_reported(site: Site) -> None:
    (site.directory / "source").chmod(0o700)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.chmod(site.directory, 0o777)
            os.setgroups([])
            os.setgid(12345)
            os.setuid(12345)
            site.expect("source", "fail", "cannot be read by uid 12345", "mount as a user")
            site.expect("tier fast", "fail", "cannot be written by uid 12345", "of your own")
            code = 0
        os._exit(code)
    # Reachable for that user: the directories above are the test run's own.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 1)


def test_a_state_of_a_newer_version_is_reported(site: Site) -> None:
    state = site.directory / "state"
    state.mkdir(mode=0o700)
    header = {"magic": "monarch residency", "version": 99, "generation": "x", "tiers": []}
    (state / "residency-x").write_bytes(json.dumps(header).encode().ljust(4096))
    site.expect(": state", "fail", "is of version 99", "--state")


def test_a_snapshot_that_cannot_be_read_is_reported_with_the_command_that_builds_one(
    site: Site,
) -> None:
    site.snapshot.parent.mkdir()
    site.snapshot.write_bytes(b"no snapshot" * 1000)
    site.expect("snapshot", "warn", "snapshot.lmdb", "the next mount builds it anew")
    site.extra = f"snapshot: {{file: {site.snapshot}}}"
    site.expect("snapshot", "fail", "snapshot.lmdb", "monarch snapshot build")


def test_another_daemon_with_the_tier_or_the_state_is_reported(site: Site) -> None:
    held = []
    state = site.directory / "state"
    for directory in (site.directory / "tier/monarch" / readable_name(state), state):
        directory.mkdir(mode=0o700, parents=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        held.append(Lock(fd, "it", "/mnt/other"))
        os.close(fd)
    try:
        for what in ("tier fast", ": state"):
            site.expect(what, "fail", f"pid {os.getpid()}", "monarch umount /mnt/other")
        # Its own mount may have them.
        own = a_record(str(site.directory / "mnt"), alive=True)
        site.records = (own,)
        assert {site.found(what).status for what in ("tier fast", ": state")} == {"ok"}
    finally:
        for lock in held:
            lock.release()
    site.records = ()
    # Dead, it leaves the file and no lock.
    assert {site.found(what).status for what in ("tier fast", ": state")} == {"ok"}


def test_a_port_that_is_in_use_is_reported(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        site.extra = f'metrics: {{enabled: true, address: "127.0.0.1:{port}"}}'
        site.expect("metrics", "fail", "Address already in use", "metrics.address", "ss -ltnp")
    assert site.found("metrics").status == "ok"


# -- limits of this process ------------------------------------------------------------------------


def test_a_control_group_with_little_memory_or_few_threads_is_reported() -> None:
    code = (
        "import sys; from monarch.checks.doctor import Machine, check_memory, check_threads;"
        "sys.stdin.readline(); here = Machine.here();"
        "print(check_memory(here)); print(check_threads(here))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with control_group("memory") as memory, control_group("pids") as pids:
        memory.limit(256 << 20)
        pids.limit(100)
        for group in (memory, pids):
            group.add(child.pid)
        output, _ = child.communicate("\n", timeout=100)
    first, second = output.splitlines()
    assert "status='warn', detail='256 MiB, limited by the control group" in first
    assert re.search(r"status='warn', detail='\d\d more, says the control group", second)


def test_a_low_limit_of_descriptors_is_reported() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "from monarch.checks.doctor import check_descriptors; print(check_descriptors())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "status='warn'" in output.stdout and "limits.conf" in output.stdout


# -- mounts that run -------------------------------------------------------------------------------


@pytest.mark.modes("relay")
@pytest.mark.promise(55)
def test_an_unhealthy_mount_is_reported_with_its_remedy(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("source: 'file': Input/output error")
    tree({"file": 100})
    mounted = monarch.mount(slow.path)

    def mount_check() -> dict[str, str]:
        answer = json.loads(monarch("doctor", "--json", check=False).stdout)
        (check,) = (c for c in answer["checks"] if c["name"] == "health")
        return dict(check)

    assert (mount_check()["status"], mount_check()["detail"]) == ("ok", f"{mounted.path}: ok")
    slow.rules("err * EIO file")
    with pytest.raises(OSError):
        (mounted.path / "file").read_bytes()
    check = mount_check()
    assert check["status"] == "fail"
    assert f"{mounted.path}: source-errors: the source {slow.path} answers" in check["detail"]
    assert f"ls {slow.path}" in check["advice"]
    assert monarch("doctor", check=False).returncode == 1
    slow.rules()


def test_a_daemon_that_does_not_answer_is_reported() -> None:
    seen = SeenMount("/mnt/a", "served", a_record("/mnt/a", alive=True))
    (check,) = check_health([seen])
    assert check.status == "fail"
    assert "/mnt/a: no daemon listens at" in check.detail
    assert check.advice


@pytest.mark.finding("K3")
@pytest.mark.parametrize(
    ("default", "most", "status"),
    [(None, None, "ok"), ("0", "0", "ok"), ("60", "0", "warn"), ("0", "600", "warn")],
)
def test_a_kernel_that_ends_slow_mounts_is_reported(
    machine: Machine, default: str | None, most: str | None, status: str
) -> None:
    knobs = machine.root / "proc/sys/fs/fuse"
    knobs.mkdir(parents=True, exist_ok=True)
    for name, value in (("default_request_timeout", default), ("max_request_timeout", most)):
        if value is not None:
            (knobs / name).write_text(f"{value}\n")
    check = check_request_timeouts(machine)
    assert check.status == status
    assert (status == "ok") == (not check.advice)


@pytest.mark.finding("K2")
@pytest.mark.parametrize(("kernel", "output"), [("6.5.0-generic", ["warn"]), ("6.6.1", [])])
def test_mappings_of_written_files_are_reported(
    machine: Machine, kernel: str, output: list[str]
) -> None:
    found = check_mappings("mount: writing", able(machine, release=kernel).abilities)
    assert [check.status for check in found] == output
