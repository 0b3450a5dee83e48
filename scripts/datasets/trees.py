"""Trees of files whose contents do not matter: a git repository, and many empty files."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import stat
import subprocess
from concurrent.futures import ProcessPoolExecutor

from scripts.datasets.target import ARCHIVE_MTIME, DatasetError, Meter, new_directory, shares


def git(options: argparse.Namespace) -> None:
    if shutil.which("git") is None:
        raise DatasetError("git is not installed; install it: apt-get install git")
    root = new_directory(options.path, needs=options.files * 20_000)
    environment = {
        **os.environ,
        **{f"GIT_{role}_NAME": "Data Set" for role in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{role}_EMAIL": "data@set.invalid" for role in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{role}_DATE": f"{ARCHIVE_MTIME} +0000" for role in ("AUTHOR", "COMMITTER")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }

    def run(*arguments: str) -> None:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise DatasetError(f"git {arguments[0]} in {root} failed: {done.stderr.strip()}")

    meter = Meter("files", options.files)
    chance = random.Random(f"{options.seed} git")
    run("init", "-q", "-b", "main")
    for commit, count in enumerate(shares(options.files, 3)):
        for number in range(count):
            path = root / f"part{number % 7}" / f"module_{commit}_{number:04d}.py"
            path.parent.mkdir(exist_ok=True)
            lines = (f"value_{chance.getrandbits(32):08x} = {chance.random()}" for _ in range(60))
            text = "\n".join(lines) + "\n"
            path.write_text(text)
            meter.add(1, len(text))
        run("add", "-A")
        run("commit", "-q", "--allow-empty", "-m", f"part {commit + 1}")
        run("tag", f"v{commit + 1}")
    run("gc", "-q")
    meter.finish(root)


def empty(options: argparse.Namespace) -> None:
    root = new_directory(options.path, needs=options.files * 300)
    free = os.statvfs(root).f_favail
    if 0 < free < options.files + options.directories:
        raise DatasetError(f"{root} has only {free:,} inodes free; ask for fewer files")
    meter = Meter("files", options.files)
    jobs = [
        (str(root), number, count)
        for number, count in enumerate(shares(options.files, options.directories))
    ]
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for made in pool.map(_fill, jobs, chunksize=8):
            meter.add(made)
    meter.finish(root)


def _fill(job: tuple[str, int, int]) -> int:
    root, number, count = job
    directory = os.path.join(root, f"d{number:06d}")
    os.mkdir(directory)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for serial in range(count):
            # One call instead of an open and a close.
            os.mknod(f"f{serial:08d}.jpg", stat.S_IFREG | 0o644, dir_fd=handle)
    finally:
        os.close(handle)
    return count
