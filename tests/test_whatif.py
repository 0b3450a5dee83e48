"""`monarch analyze whatif`: its table, what it takes for granted, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click import BadParameter
from click.testing import CliRunner, Result

from monarch.analysis.profile import encode
from monarch.analysis.whatif import Change, changes
from monarch.cli.main import cli
from monarch.errors import MonarchError, UsageError
from tests.analysis.test_stalls import profile, run, runs


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """500 batches of 10,000 bytes in an epoch; 0.2 s for a batch from the tiers, 0.8 s without."""
    (tmp_path / "profile.json").write_text(encode(profile(runs(0.1, 0.2, 0.8))))
    return tmp_path / "profile.json"


def whatif(file: Path, *options: str) -> Result:
    return CliRunner().invoke(
        cli, ["analyze", "whatif", str(file), *options], standalone_mode=False
    )


def rows(file: Path, *options: str) -> list[dict[str, Any]]:
    done = whatif(file, *options, "--json")
    assert done.exception is None, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


def test_other_tiers_are_predicted_as_before(measured: Path) -> None:
    found = rows(measured, "--tier", "2500KB,5MB")
    assert [row["share"] for row in found] == [0.5, 1.0]
    assert [row["rate"] for row in found] == pytest.approx([2.0, 5.0])
    text = whatif(measured).output
    assert "model: serial, error 0.0% in the measured runs" in text and "no_evict" in text
    assert "nodes" not in text.splitlines()[0] and "unknown" not in text


def test_nodes_and_packs_are_predicted_and_what_is_not_known_is_said(measured: Path) -> None:
    (alone, four, packed) = (
        *rows(measured, "--tier", "1250KB", "--nodes", "1,4", "--network", "1GB/s"),
        *rows(measured, "--tier", "1MB", "--pack", "1MB/s")[1:],
    )
    assert alone["rate"] == pytest.approx(1 / (0.2 + 0.6 * 0.75))
    assert (four["share"], four["rate"]) == (1.0, pytest.approx(20.0))
    assert packed["pack"] and packed["rate"] > alone["rate"]
    done = whatif(measured, "--tier", "1250KB,0.5MB", "--nodes", "1,4", "--pack")
    assert "unknown: the bandwidth of the network of a node; name it with --network" in done.output
    assert "unknown: what the source gives several nodes together" in done.output
    assert "unknown: how fast the source gives large chunks" in done.output
    assert "several nodes: each trains" in done.output and "pack: the order" in done.output
    found = rows(measured, "--tier", "500KB", "--nodes", "4", "--pack")
    assert [(row["rate"], bool(row["unknown"])) for row in found] == [(None, True)] * 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--nodes", "99999"), "at most 16,384 nodes"),
        (("--tier", "9" * 400), "more bytes than"),
        (("--source", "9" * 400), "more bytes than"),
        (("--network", "9" * 400), "more bytes than"),
        (("--pack", "9" * 400), "more bytes than"),
        (
            ("--tier", ",".join(["1MB"] * 200), "--cores", ",".join(["1"] * 100)),
            "more than 10,000 predictions",
        ),
    ],
)
def test_too_much_is_refused(measured: Path, options: tuple[str, ...], complaint: str) -> None:
    error = whatif(measured, *options).exception
    assert isinstance(error, UsageError | BadParameter) and complaint in str(error)


def test_no_more_combinations_are_made_than_are_shown(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Change] = []

    def counted(*arguments: Any, **options: Any) -> Iterator[Change]:
        for change in changes(*arguments, **options):
            made.append(change)
            yield change

    monkeypatch.setattr("monarch.cli.whatif.changes", counted)
    many = ("--tier", ",".join(["1MB"] * 200), "--cores", ",".join(["1"] * 100))
    assert isinstance(whatif(measured, *many).exception, UsageError)
    assert len(made) == 10_001


@pytest.mark.parametrize("command", ["whatif", "sensitivity"])
def test_the_profile_of_a_mount_without_a_byte_is_predicted(
    measured: Path, tmp_path: Path, command: str
) -> None:
    raw = json.loads(measured.read_text())
    measured.write_text(json.dumps({**raw, "data_bytes": 0}))
    options = {
        "whatif": ["analyze", "whatif", str(measured), "--nodes", "1,2", "--network", "1GB/s"]
        + ["--source", "1MB/s"],
        "sensitivity": ["plan", "sensitivity", "a", "--profile", str(measured)]
        + ["-o", str(tmp_path / "a.json")],
    }
    done = CliRunner().invoke(cli, options[command], standalone_mode=False)
    assert done.exception is None, done.output


def test_a_profile_without_two_shares_predicts_nothing(tmp_path: Path) -> None:
    same = [run("synthetic", 1.0), run("cached", 2.0, hits=0.0), run("real", 2.0, share=0.0)]
    (tmp_path / "profile.json").write_text(encode(profile(same)))
    error = whatif(tmp_path / "profile.json").exception
    assert isinstance(error, MonarchError) and "nothing can be predicted" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["runs"][0]["report"].update(train_s=[0.0]),
        lambda raw: raw["runs"][0]["report"].update(train_s=[float("nan")] * 5),
        # The rates, or the quotients of two, would be infinite, which JSON has no number for.
        lambda raw: raw["runs"][1]["report"].update(train_s=[1e-320] * 5),
        lambda raw: raw["runs"][1]["report"].update(load_s=[1e308] * 5),
        lambda raw: raw["runs"][0]["report"].update(train_s=[1e-320, 1e308]),
        lambda raw: raw["runs"][0]["report"].update(window=10**400),
        lambda raw: raw["runs"][2]["report"].update(source_bytes=1 << 63),
        lambda raw: raw["runs"][2]["report"].update(epoch_batches=10**400),
        lambda raw: raw.update(tier_bytes=10**400),
        lambda raw: raw.update(cores=10**9),
        lambda raw: raw["runs"][0]["report"].update(window=0),
        lambda raw: raw["runs"][1]["report"].update(hits=-1),
        lambda raw: raw["runs"][1]["report"].update(workers=-1),
        lambda raw: raw["runs"][2].update(share=2.0),
        lambda raw: raw.update(cores=0),
        lambda raw: raw.update(runs=[]),
        lambda raw: raw.update(runs=raw["runs"][1:]),
        lambda raw: raw.update(monarch_profile=2),
    ],
)
def test_a_profile_with_an_impossible_number_is_refused(measured: Path, change: Any) -> None:
    raw = json.loads(measured.read_text())
    change(raw)
    measured.write_text(json.dumps(raw))
    for command in ("whatif", "report"):
        words = ["analyze", command, str(measured)]
        error = CliRunner().invoke(cli, words, standalone_mode=False).exception
        assert isinstance(error, UsageError) and "cannot be used" in str(error), error


def test_a_report_says_how_long_was_measured_and_why_not_longer(
    measured: Path, tmp_path: Path
) -> None:
    def lengths(change: Callable[[dict[str, Any]], None]) -> str:
        raw = json.loads(measured.read_text())
        change(raw)
        (tmp_path / "changed").write_text(json.dumps(raw))
        done = CliRunner().invoke(cli, ["analyze", "report", str(tmp_path / "changed")])
        (line,) = (line for line in done.output.splitlines() if line.startswith("measured: "))
        return line

    assert lengths(lambda raw: raw.update(most_iterations=400)).endswith(
        "1 round, runs of 100 batches, 5 min in all; until the windows agreed"
    )
    # An earlier version of Monarch measured a fixed number of batches.
    for key in ("most_iterations", "unused_runs"):
        assert lengths(lambda raw, key=key: raw.pop(key)).endswith(" in all")  # type: ignore[misc]
