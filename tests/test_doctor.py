"""`monarch doctor`: what it finds on machines of many kinds, and on this one."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from monarch.cli import doctor as doctor_verb
from monarch.doctor import (
    Check,
    Machine,
    SeenMount,
    check_configuration,
    check_datapath,
    check_fuse_device,
    check_fusermount,
    check_kernel,
    check_memory,
    check_mounts,
    check_packages,
    check_scheduler,
    check_state_root,
    check_user_allow_other,
    examine,
    seen_mounts,
)
from monarch.modes import Abilities
from monarch.places import MountedFileSystem, mount_table
from monarch.registry import MountRecord, Registry, process_started
from monarch.units import GiB

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


def test_a_machine_without_the_device_is_told_how_to_get_it(machine: Machine) -> None:
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


def test_the_way_of_reads_is_told_and_why_not_a_faster_one(machine: Machine) -> None:
    small = "relay without opens for small files that fit twice into 64 GiB of memory, "
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
    assert check_state_root(root, table).status == "ok"
    check = check_state_root(network / "deep/state", table)
    assert (check.status, "nfs4" in check.detail) == ("warn", True)
    table.append(MountedFileSystem(network.resolve(), "xfs"))
    assert check_state_root(network / "deep/state", table).status == "ok"


def test_a_state_directory_under_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_state_root(tmp_path / "file/state", mount_table()).status == "fail"


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


def test_served_stale_leftover_and_foreign_mounts_are_told_apart(tmp_path: Path) -> None:
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
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert {"name", "status", "detail", "advice"} == set(told["checks"][0])


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
        # Nobody answers the kernel's first question.
        began = time.monotonic()
        (seen,) = (s for s in seen_mounts(records) if s.mountpoint == str(mountpoint))
        assert seen.state == "foreign"
        assert time.monotonic() - began < 10
        os.close(device)
        device = -1
        (seen,) = (s for s in seen_mounts(records) if s.mountpoint == str(mountpoint))
        assert seen.state == "stale"
        assert "umount" in seen.advice
    finally:
        libc.umount2(bytes(mountpoint), _DETACH)
        if device >= 0:
            os.close(device)
