"""SQLite: random rows of a database; the argument is the query of its URI."""

from __future__ import annotations

import random
import sqlite3
import sys
from pathlib import Path

from _protocol import digest, serve


def epoch(root: Path, number: int) -> dict[str, str]:
    (path,) = root.glob("*.sqlite")
    connection = sqlite3.connect(f"file:{path}?{sys.argv[1]}", uri=True)
    try:
        rows = [row for (row,) in connection.execute("SELECT id FROM samples")]
        random.Random(number).shuffle(rows)
        return {
            str(row): digest(image)
            for row in rows
            for (image,) in connection.execute("SELECT image FROM samples WHERE id = ?", (row,))
        }
    finally:
        connection.close()


if __name__ == "__main__":
    serve(epoch)
