"""Mounts that a configuration file describes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted
from tests.mount.command import assert_nothing_is_left, needs_fuse, one_line, registered

# How reads are served has nothing to do with it, but where a test says so.
pytestmark = [needs_fuse, pytest.mark.modes("auto")]

_SHIPPED = Path(__file__).parents[2] / "conf/monarch.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two mounts, ``one`` and ``two``, with a file ``a`` in each source that holds its name."""
    lines = ["defaults: {snapshot: {jobs: 2}, log: {level: debug}}", "mounts:"]
    for name in ("one", "two"):
        (tmp_path / name / "source").mkdir(parents=True)
        (tmp_path / name / "mnt").mkdir()
        (tmp_path / name / "source/a").write_text(name)
        lines += [
            f"  {name}:",
            f"    source: {tmp_path}/{name}/source",
            f"    mountpoint: {tmp_path}/{name}/mnt",
            f"    state: {tmp_path}/{name}/state",
            f"    tiers: [{{path: {tmp_path}/{name}/tier, capacity: 1MiB}}]",
        ]
    path = tmp_path / "monarch.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def mounted(monarch: MonarchCommand, file: Path, name: str, *arguments: str) -> Mounted:
    directory = file.parent / name
    made = registered(
        monarch,
        directory / "mnt",
        directory / "source",
        directory / "state",
        {"tier": directory / "tier"},
    )
    monarch("mount", "-c", str(file), name, *arguments)
    made.pid = int(made.status()["pid"])
    return made


def test_mounts_are_made_by_their_names_and_options_go_before_the_file(
    monarch: MonarchCommand, file: Path
) -> None:
    one = mounted(monarch, file, "one")
    two = mounted(monarch, file, "two", "-o", "log.level=warning,snapshot.freshness=never")
    assert (one.path / "a").read_text() + (two.path / "a").read_text() == "onetwo"
    assert one.status()["snapshot"]["freshness"] == "mount"
    assert two.status()["snapshot"]["freshness"] == "never"
    assert "info" in one.log_text and "info" not in two.log_text
    assert one.status()["tiers"][0]["capacity"] == 1 << 20


@pytest.mark.finding("R")
@pytest.mark.promise(115)
@pytest.mark.modes("auto")
def test_a_name_alone_is_looked_up_where_configurations_are(
    monarch: MonarchCommand, file: Path
) -> None:
    usual = Path(monarch.environment()["XDG_CONFIG_HOME"]) / "monarch" / "monarch.yaml"
    missing = monarch("mount", "one", check=False)
    assert (missing.returncode, "/etc/monarch/monarch.yaml" in one_line(missing)) == (2, True)
    usual.parent.mkdir(parents=True)
    file.rename(usual)
    made = registered(
        monarch, file.parent / "one/mnt", file.parent / "one/source", file.parent / "one/state"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(file.parent / "notify"))
        manager.settimeout(60)
        daemon = subprocess.Popen(
            [sys.executable, "-m", "monarch", "mount", "--foreground", "one"],
            env={**monarch.environment(), "NOTIFY_SOCKET": str(file.parent / "notify")},
            stderr=subprocess.PIPE,
        )
        try:
            # What systemd waits for, and then finds the mount.
            assert manager.recv(100) == b"READY=1"
            assert (made.path / "a").read_text() == "one"
        finally:
            daemon.terminate()
            _, output = daemon.communicate(timeout=60)
    assert daemon.returncode == 0
    assert b" info " in output and b"is at" in output
    assert "\u2501".encode() not in output
    unknown = monarch("mount", "tow", check=False)
    assert (unknown.returncode, f"no mount 'tow' in {usual}" in one_line(unknown)) == (2, True)
    with_path = monarch("mount", "./one", check=False)
    assert (with_path.returncode, "a mount point is missing" in one_line(with_path)) == (2, True)


@pytest.mark.fault("I1")
def test_an_unknown_name_is_reported_with_the_known_ones(
    monarch: MonarchCommand, file: Path
) -> None:
    done = monarch("mount", "-c", str(file), "tow", check=False)
    assert (done.returncode, "no mount 'tow'; there are one, two" in one_line(done)) == (2, True)
    assert_nothing_is_left(monarch)


@pytest.mark.fault("I1")
def test_all_mistakes_of_a_file_are_reported_with_their_lines_and_nothing_is_mounted(
    monarch: MonarchCommand, file: Path
) -> None:
    text = file.read_text().replace("capacity: 1MiB", "capacity: 10GBB", 1)
    file.write_text(text.replace("level: debug", "levle: debug") + "    verfy: open\n")
    done = monarch("mount", "-c", str(file), "one", check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert [line.split(": ")[1] for line in lines] == [f"{file}:{n}" for n in (1, 7, 13)]
    assert "did you mean 'level'?" in lines[0] and "did you mean 'verify'?" in lines[2]
    assert_nothing_is_left(monarch)


def test_the_shipped_configuration_mounts_with_its_paths_replaced(
    monarch: MonarchCommand, file: Path
) -> None:
    directory = file.parent / "one"
    text = _SHIPPED.read_text()
    for before, after in (
        ("/pfs/imagenet", directory / "source"),
        ("/mnt/imagenet", directory / "mnt"),
        ("/local/monarch/imagenet", directory / "tier"),
    ):
        assert text.count(f": {before}\n") == 1
        text = text.replace(f": {before}\n", f": {after}\n")
    file.write_text(text)
    made = registered(
        monarch,
        directory / "mnt",
        directory / "source",
        monarch.directory / "home/state/monarch",
        {"imagenet": directory / "tier"},
    )
    monarch("mount", "-c", str(file), "imagenet")
    made.pid = int(made.status()["pid"])
    assert (made.path / "a").read_text() == "one"
