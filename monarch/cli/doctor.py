"""``monarch doctor``: checks whether this node can mount, and says what to do if not."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from monarch.checks.doctor import Machine, examine
from monarch.checks.preflight import Check
from monarch.cli.daemon_call import JSON
from monarch.cli.output import emit_json, stdout
from monarch.config.defaults import state_root
from monarch.text import escape_text

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command(
    epilog="""\b
Examples:
  monarch doctor
  monarch doctor -c monarch.yaml
  srun -N 8 monarch doctor --json
"""
)
@click.option(
    "-c",
    "--config",
    "configuration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Validate this configuration, too, and check its tiers.",
)
@JSON
def doctor(configuration: Path | None, as_json: bool) -> int:
    """Check whether this node can mount, and how well.

    Nothing is changed. The exit code is 0 unless a check fails.
    """
    checks = []
    for check in examine(Machine.here(), state_root(), configuration=configuration):
        checks.append(check)
        if not as_json:
            # Each line is printed at once, because some checks take seconds.
            stdout().print(_line(check), soft_wrap=True)
    failed = sum(check.status == "fail" for check in checks)
    if as_json:
        emit_json({"ok": not failed, "checks": checks})
    return 1 if failed else 0


def _line(check: Check) -> Text:
    line = Text.assemble(
        (f"{check.status:4}", _STYLES[check.status]),
        f"  {escape_text(check.name)}: {escape_text(check.detail)}",
    )
    if check.advice:
        line.append(f"\n      {escape_text(check.advice)}")
    return line
