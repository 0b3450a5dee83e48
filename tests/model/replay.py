"""``python -m tests.model.replay FILE``: plays a plan again and prints each operation."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.model.plan import Plan, generate
from tests.model.play import play
from tests.model.rig import Workers


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model.replay", description=__doc__)
    parser.add_argument("plan", help="a file with a plan, or a seed")
    parser.add_argument("--times", type=int, default=1, help="how often at most (default 1)")
    options = parser.parse_args(arguments)
    if options.plan.isdecimal():
        plan = generate(int(options.plan), may_have_disk=os.geteuid() == 0)
    else:
        plan = Plan.loads(Path(options.plan).read_text())
    with Workers() as workers, tempfile.TemporaryDirectory(prefix="model-") as directory:
        for _ in range(options.times):
            failure = play(plan, Path(directory) / "play", workers, print)
            if failure is not None:
                print(f"{failure.log}\n{failure}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
