"""``python -m tests.users SEED [COUNT]``: plays histories again and prints all calls."""

from __future__ import annotations

import sys
import tempfile
import uuid
from pathlib import Path

from tests.conftest import MonarchCommand
from tests.users.history import generated
from tests.users.runner import play


def main() -> int:
    first = int(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    found = 0
    for seed in range(first, first + count):
        lines: list[str] = []
        with tempfile.TemporaryDirectory() as directory:
            monarch = MonarchCommand(Path(directory), uuid.uuid4().hex, "relay")
            try:
                problems = play(monarch, Path(directory), [generated(seed)], lines.append)
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
