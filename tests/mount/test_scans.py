"""What a scan of a directory leaves in the tiers of a mount."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from monarch.frameworks.announce import announce
from tests.conftest import MonarchCommand, Tree, contents
from tests.mount.command import needs_fuse
from tests.mount.observe import epoch, resident, settled

SIZE = 500
JOB = {f"job/{number:03}": contents(f"job{number}", SIZE) for number in range(100)}
TREE = {f"tree/{number:04}": contents(f"tree{number}", SIZE) for number in range(600)}


# Programs that read all files of a directory once, by the name of the program.
PROGRAMS = {
    "cp": 'cp -r "$1" "$2"',
    "grep": 'grep -rq "no file has these bytes" "$1"; test $? = 1',
    "tar": 'tar -cf - "$1" | cat > "$2"',
}


@needs_fuse
@pytest.mark.promise(194)
@pytest.mark.modes("relay", "passthrough")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_program_that_reads_a_tree_leaves_the_copies_of_a_job_in_place(
    is_announced: bool,
    program: str,
    monarch: MonarchCommand,
    tree: Tree,
    source: Path,
    tmp_path: Path,
) -> None:
    """The job may have announced its order."""
    tree({**JOB, **TREE})
    mounted = monarch.mount(
        source,
        tiers={"ssd": str(500 * SIZE)},
        options=["placement.policy=lru", "foresight.ahead=false"],
    )
    read, out = str(mounted.path / "tree"), tmp_path / "read"
    command = ["sh", "-c", PROGRAMS[program], program, read, str(out)]
    order = random.Random(1).sample(sorted(JOB), len(JOB))
    announced = announce(mounted.path / name for name in order * 2) if is_announced else None
    epoch(mounted, JOB, order)
    # A copy that is being made is not replaced by any policy.
    settled(mounted)
    subprocess.run(command, check=True, start_new_session=True)
    report = settled(mounted)
    assert len(resident(mounted, JOB)) == len(JOB), "there was free space for most of the tree"
    assert report["admission"]["spared"] >= 600 - 400
    assert "files read, no copy removed" in monarch("status", str(mounted.path)).stdout
    if announced is not None:
        announced.close()
    shutil.rmtree(out, ignore_errors=True)
