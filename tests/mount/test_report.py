"""`monarch report` of a real mount, while it serves and after its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse
from tests.mount.observe import account, settled

pytestmark = [needs_fuse, pytest.mark.modes("relay", "no_open")]

FILES = 40


def read_all(mounted: Mounted, opens: int) -> None:
    """Reads each file once, and waits until ``opens`` are counted and no copy is under way."""
    for number in range(FILES):
        (mounted.path / f"{number}").read_bytes()
    wait_until(lambda: account(mounted)["opens"] >= opens, f"{opens} opens are counted")
    settled(mounted)


def figures_at(monarch: MonarchCommand, place: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(monarch("report", str(place), "--json").stdout)
    return found


@pytest.mark.promise(305)
def test_the_figures_of_a_mount_can_be_read_while_it_serves_and_after_its_end(
    monarch: MonarchCommand,
    tree: Tree,
    tmp_path: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    source = tree({str(number): contents(str(number), 3000) for number in range(FILES)})
    mounted = monarch.mount(source)
    for epoch in (1, 2):
        read_all(mounted, epoch * FILES)
    serving = figures_at(monarch, mounted.path)
    assert (serving["is_ended"], serving["job"]) == (False, "4711")
    assert sum(epoch["opens"] for epoch in serving["epochs"]) == serving["opens"] == 2 * FILES
    # Each file was opened at the source once, by whatever reads or copies it.
    assert serving["spared"]["source_opens"] == FILES == serving["spared"]["opens"]
    assert (serving["hit_ratio"] is None) == (mode == "no_open")
    assert monarch("report", "4711", "--json").stdout
    line = monarch("umount", str(mounted.path)).stderr
    assert line.endswith(f"; its figures: monarch report {mounted.state}\n")

    ended = figures_at(monarch, mounted.state)
    assert (ended["is_ended"], ended["health"], ended["opens"]) == (True, "ok", 2 * FILES)
    assert ended["spared"]["opens"] == FILES and ended["samples"]
    page = tmp_path / "report.html"
    assert "report.html" in monarch("report", str(mounted.state), "-o", str(page)).stderr
    text = page.read_text()
    assert "Slurm job 4711" in text and text.count("<svg") == 4
    assert ("unknown" in text) and ("Opens are not counted" not in text)
    again = monarch.mount(source)
    again.umount()
    assert figures_at(monarch, mounted.state)["opens"] == 0


@pytest.mark.modes("auto")
def test_a_mount_without_figures_says_what_to_do(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mounted = monarch.mount(tree({"a": 1}))
    mounted.kill()
    for place, words in (
        (str(mounted.path), "no mount has ended there in an orderly way"),
        (str(tmp_path / "nothing"), "is neither a Monarch mount nor a state directory"),
        ("4711", "no mount of Slurm job 4711 is known on this node"),
    ):
        refused = monarch("report", place, check=False)
        assert (refused.returncode, words in refused.stderr) == (9, True), refused.stderr
    bad = tmp_path / "profile.json"
    bad.write_text("{}")
    monarch("umount", str(mounted.path))
    again = monarch.mount(mounted.source)
    refused = monarch("report", str(again.path), "--profile", str(bad), check=False)
    assert (refused.returncode, "it is not a profile" in refused.stderr) == (2, True)
