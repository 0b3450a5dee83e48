"""``python -m tests.users [--lists] SEED [COUNT]``: plays histories again and prints all calls."""

from __future__ import annotations

import sys
import tempfile
import uuid
from pathlib import Path

from tests.conftest import MonarchCommand
from tests.users.history import generated
from tests.users.runner import play


def main() -> int:
    lists = "--lists" in sys.argv
    numbers = [int(each) for each in sys.argv[1:] if each != "--lists"]
    first, count = (*numbers, 1)[:2]
    found = 0
    for seed in range(first, first + count):
        lines: list[str] = []
        with tempfile.TemporaryDirectory() as directory:
            monarch = MonarchCommand(Path(directory), uuid.uuid4().hex, "relay")
            try:
                problems = play(
                    monarch, Path(directory), [generated(seed, lists=lists)], lines.append
                )
            except AssertionError as error:
                problems = [str(error)]
            finally:
                for mounted in monarch.mounted:
                    monarch("umount", str(mounted.path), "--abandon", check=False)
        if problems or count == 1:
            print(*lines, *problems, sep="\n")
            found += len(problems)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
