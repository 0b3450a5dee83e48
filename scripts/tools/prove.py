"""Removes the protections against faults one at a time, and requires that their tests fail.

Each one is removed in a copy of the checkout; the checkout itself is not changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from scripts.tools.launch import ROOT
from tests.equipment.mounts import mounts_below
from tests.faults.protections import Protection, protections

# A test that ran and failed, in pytest's summary. The exit code is not enough: 1 is also that of a
# Python without pytest, and 2, an interrupted run, also that of a first failure with -x.
_FAILED = re.compile(r"^(FAILED|ERROR) tests/\S+::", re.MULTILINE)
_TAIL_LINES = 15
# Where a protection against hanging is removed, its test may hang.
_LIMIT_S = 300


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/prove",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  scripts/prove\n  scripts/prove --rows T3,T4 tiers",
    )
    parser.add_argument(
        "areas", nargs="*", metavar="AREA", help="names of files in tests/faults/protections (all)"
    )
    parser.add_argument(
        "--rows", default="", help="rows of docs/faults.md, separated by commas (all)"
    )
    parser.add_argument("--workers", default="2", help="concurrent tests (2)")
    options = parser.parse_args(arguments)
    rows = set(filter(None, options.rows.split(",")))
    chosen = [
        p
        for p in protections()
        if (not options.areas or p.area in options.areas) and (not rows or rows & set(p.rows))
    ]
    console = Console()
    unneeded = []
    for number, protection in enumerate(chosen, start=1):
        title = f"{number}/{len(chosen)} {','.join(protection.rows)}: {protection.what}"
        done = _run_without(protection, options.workers)
        if done is None:
            console.print(f"[green]its tests hang, so it is needed[/]  {title}", highlight=False)
            continue
        if done.returncode != 0 and _FAILED.search(done.stdout):
            console.print(f"[green]its tests fail, as they must[/]  {title}", highlight=False)
            continue
        unneeded.append(title)
        console.print(f"[red]exit code {done.returncode}[/]  {title}", highlight=False)
        console.print(*done.stdout.splitlines()[-_TAIL_LINES:], sep="\n", markup=False)
    console.print(f"{len(chosen) - len(unneeded)} of {len(chosen)} protections are needed")
    return 1 if unneeded or not chosen else 0


def _run_without(protection: Protection, workers: str) -> subprocess.CompletedProcess[str] | None:
    """Run the tests of a protection without it; None if they do not end."""
    with tempfile.TemporaryDirectory(prefix="prove-") as name:
        checkout = Path(name) / "c"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache"))
        file = checkout / protection.file
        text = file.read_text()
        if text.count(protection.text) != 1:
            sys.exit(f"{protection.file}: {protection.what}: its text is not there exactly once")
        file.write_text(text.replace(protection.text, protection.instead))
        if file.suffix in (".c", ".h"):
            _compile(checkout)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-n", workers),
            *("-p", "no:cacheprovider", "--basetemp", f"{name}/t", *protection.tests),
        ]
        running = subprocess.Popen(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            for path in mounts_below(Path(name)):
                subprocess.run(["umount", "-l", path], check=False)
            running.communicate()
            return None
        return subprocess.CompletedProcess(command, running.returncode, output)


def _compile(checkout: Path) -> None:
    """Compile the datapath of the copy, in place of the module that was copied with it."""
    target = checkout / "monarch/fuse" / f"_datapath{sysconfig.get_config_var('EXT_SUFFIX')}"
    target.unlink(missing_ok=True)
    sources = [str(path) for path in sorted((checkout / "monarch/fuse/native").glob("*.c"))]
    include = sysconfig.get_path("include")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", "-pthread"]
    subprocess.run(
        [os.environ.get("CC", "gcc"), *flags, f"-I{include}", *sources, "-o", str(target)],
        check=True,
    )
