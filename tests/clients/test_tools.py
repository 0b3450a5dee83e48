"""Tools that copy, archive and compare trees, over a mount."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import copied_files, digests, settle, three_epochs
from tests.conftest import MonarchCommand

Make = Callable[..., Path]


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LC_ALL": "C", **environment},
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def needs(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")


def test_tar_makes_of_the_mount_the_archive_that_it_makes_of_the_source(
    monarch: MonarchCommand, images: Path
) -> None:
    def archive(root: Path, number: int) -> dict[str, str]:
        command = ["tar", "--sort=name", "-cf", "-", "-C", str(root), "."]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stderr == b""
        return {"archive": hashlib.sha256(done.stdout).hexdigest()}

    three_epochs(monarch, images, archive, expected=archive(images, 0))


def stats(root: Path) -> dict[str, tuple[int, ...]]:
    """What a copy that preserves attributes must preserve, for each entry below ``root``."""
    found: dict[str, tuple[int, ...]] = {}
    for directory, directories, names in os.walk(root):
        for name in [".", *directories, *names]:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            size = 0 if os.path.isdir(path) else status.st_size
            found[os.path.relpath(path, root)] = (
                status.st_mode,
                status.st_uid,
                status.st_gid,
                size,
                status.st_mtime_ns,
            )
    return found


@pytest.mark.parametrize("tool", ["cp", "rsync"])
def test_a_copy_of_the_mount_is_a_copy_of_the_source(
    monarch: MonarchCommand, images: Path, tmp_path: Path, tool: str
) -> None:
    needs(tool)
    # By seconds alone rsync leaves a directory the time of its copy if that is the same second.
    exactly = ["--modify-window=-1"] if tool == "rsync" else []

    def copy(root: Path, number: int) -> dict[str, str]:
        target = tmp_path / f"copy{number}"
        run(tool, "-a", *exactly, f"{root}/", target)
        assert stats(target) == stats(images)
        return digests(target)

    three_epochs(monarch, images, copy, expected=digests(images))


@pytest.mark.promise(30)
def test_copying_a_file_does_not_copy_the_attributes_of_monarch(
    monarch: MonarchCommand, images: Path, tmp_path: Path
) -> None:
    mounted = monarch.mount(images, tiers={"fast": "100MiB"})
    run("cp", "-a", f"{mounted.path}/", tmp_path / "copy")
    settle(mounted, len(copied_files(mounted)))
    name = next(iter(digests(images)))
    assert mounted.xattr(name) == "fast"
    assert os.listxattr(mounted.path / name) == []
    assert os.listxattr(tmp_path / "copy" / name) == []


def test_rsync_finds_no_difference_between_mount_and_source(
    monarch: MonarchCommand, images: Path
) -> None:
    needs("rsync")
    mounted = monarch.mount(images, tiers={"fast": "100MiB"})
    differences = run(
        "rsync", "-aAXn", "--checksum", "--delete", "-i", f"{images}/", f"{mounted.path}/"
    )
    assert differences == ""


def test_git_finds_a_clean_work_tree_and_a_sound_history(
    monarch: MonarchCommand, make_dataset: Make
) -> None:
    needs("git")
    source = make_dataset("git", "--files", 120)

    def look(root: Path, number: int) -> dict[str, str]:
        # Without this, git would like to write down what it saw in .git/index.
        git = ("git", "-c", "safe.directory=*", "-C", root)
        quiet = {"GIT_OPTIONAL_LOCKS": "0"}
        return {
            "status": run(*git, "status", "--porcelain", **quiet),
            "log": run(*git, "log", "--format=%H %s", "--all", **quiet),
            "fsck": run(*git, "fsck", "--full", "--no-progress", "--no-dangling", **quiet),
            "archive": hashlib.sha256(
                run(*git, "log", "-p", "--all", **quiet).encode()
            ).hexdigest(),
        }

    expected = look(source, 0)
    assert expected["status"] == ""
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    for number in (1, 2):
        assert look(mounted.path, number) == expected
    # No reader opens hooks and the like, so the tree is also read once as a whole.
    assert digests(mounted.path) == digests(source)
    settle(mounted, len(copied_files(mounted)))
    assert look(mounted.path, 3) == expected


def test_find_grep_and_checksums_work_like_on_the_source(
    monarch: MonarchCommand, make_dataset: Make
) -> None:
    source = make_dataset("git", "--files", 120)
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    for command in (
        ("find", ".", "-printf", "%P %y %m %s %T@ %n\n"),
        ("grep", "-rc", "value_0", "part0"),
        ("sh", "-c", "find . -type f | sort | xargs sha256sum"),
        ("du", "-sb", "."),
    ):
        answers = [
            subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
            for root in (source, mounted.path)
        ]
        assert sorted(answers[0].stdout.splitlines()) == sorted(answers[1].stdout.splitlines())
        assert answers[1].stderr == ""
