"""Mangled configurations and requests, the same for the same seed.

    python -m tests.faults.fuzzing DIRECTORY SECONDS [SEED]     the loader of configurations

Each configuration must load, or be refused with lines that name the file, within bounded time and
memory. A failure names the number that repeats it: ``... DIRECTORY 0 SEED:NUMBER``.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from monarch.config import document, load
from monarch.control.messages import MAX_LINE_BYTES
from monarch.errors import ConfigError

_SHIPPED = Path(__file__).parents[2] / "conf/monarch.yaml"
# The loader itself takes some 100 MB; PyYAML a second or two for the largest file there may be.
_MEMORY_BYTES = 1 << 30
_PATIENCE_S = 100

# -- configurations --------------------------------------------------------------------------------

_WORDS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**64, 10**400, float("nan"), float("inf")),
    *("", " ", "~", "null", "yes", "10GBB", "-1GiB", "99999P", "ttl:", "ttl:-1s", "ttl:1e999s"),
    *("/", "//", "/..", "/pfs/imagenet", "$", "${", "$HOME/x", "~nobody-there/x", "\0", "\ud800"),
    *("a\nb", "\x1b[2J", "é" * 300, "x" * 5000, "localhost:99999", "[::1]:1", ":", "/t:", ":1GB"),
    *([], {}, [[]], [{}], {"a": {}}, ["/t"] * 20, "2026-99-99", "1:2:3", "0o17", "0x", "1_000"),
)
_PIECES = (
    *(b"&a [*a, *a]", b"*a", b"<<: *a", b"? [x]\n: y", b"!!python/object:os.system x", b"!x y"),
    *(b"- ", b": ", b"{", b"[", b"'", b'"', b"|\n  x", b">", b"%YAML 9.9\n", b"---\n", b"...\n"),
    *(
        b"\t",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\0",
        b"\x85",
        b"#",
        b"\r\n",
    ),
    *(b"mounts:\n", b"defaults:\n", b"  tiers: [/t]\n", b"[" * 50, b"{a: " * 40, b"- " * 60),
    b"x: &x [a]\n" + b"".join(b"x%d: &x%d [*x, *x, *x]\n" % (n, n) for n in range(9)),
)


def configuration(dice: random.Random) -> bytes:
    """The shipped configuration after some accidents."""
    text = _SHIPPED.read_bytes()
    if dice.random() < 0.5:
        tree = yaml.safe_load(text)
        for _ in range(dice.randrange(1, 6)):
            _mangle_tree(tree, dice)
        text = yaml.safe_dump(tree, allow_unicode=dice.random() < 0.5).encode("utf-8", "replace")
    for _ in range(dice.choice((0, 1, 1, 2, 5, 50))):
        # A file that is too large is refused by its size.
        text = _mangle_bytes(text, dice)[: document.MAX_FILE_BYTES + 1]
    return text


def _mangle_tree(tree: Any, dice: random.Random) -> None:
    """Change, add, move or remove one value somewhere."""
    at = tree
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and dice.random() < 0.8:
            at = at[key]
            continue
        match dice.randrange(4):
            case 0:
                del at[key]
            case 1 if isinstance(at, dict):
                at[str(dice.choice(_WORDS))[:100]] = at.pop(key)
            case 2 if isinstance(at, dict):
                at[f"{key}{dice.choice('sx_-')}"] = dice.choice(_WORDS)
            case _:
                at[key] = dice.choice(_WORDS)
        return


def _mangle_bytes(text: bytes, dice: random.Random) -> bytes:
    at, end = sorted(dice.randrange(len(text) + 1) for _ in range(2))
    lines = text.split(b"\n")
    match dice.randrange(7):
        case 0:
            return text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :]
        case 1:
            return text[:at] + dice.choice(_PIECES) + text[at:]
        case 2:
            return text[:at] + text[min(end, at + dice.randrange(1, 40)) :]
        case 3:
            dice.shuffle(lines)
            return b"\n".join(lines)
        case 4:
            line = dice.randrange(len(lines))
            lines[line] = b" " * dice.randrange(8) + lines[line].lstrip()
            return b"\n".join(lines)
        case 5:
            return text[:at] + text[at:end] * dice.choice((2, 3, 20)) + text[end:]
        case _:
            return text[:end]


def _check(path: Path, text: bytes) -> None:
    """Raises AssertionError, or whatever the loader lets out."""
    path.write_bytes(text)
    before = sorted(os.listdir(path.parent))
    try:
        mounts, problems = len(load.load(path)), []
    except ConfigError as error:
        mounts, problems = 0, error.problems
    assert bool(mounts) != bool(problems)
    for problem in problems:
        place, _, words = problem.removeprefix(f"{path}:").partition(": ")
        assert problem.startswith(f"{path}:") and place.isdecimal() and words, problem
        # Lines may end in more ways than one.
        assert 1 <= int(place) <= len(text) + 1, problem
        assert "\n" not in problem and len(problem) < 10_000, problem
    assert sorted(os.listdir(path.parent)) == before


def _round(directory: Path, seed: str) -> None:
    signal.alarm(_PATIENCE_S)
    try:
        _check(directory / "monarch.yaml", configuration(random.Random(seed)))
    finally:
        signal.alarm(0)


def main(directory: Path, seconds: float, seed: str) -> str | None:
    def too_long(*_: object) -> None:
        raise TimeoutError("it takes too long")

    signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    seeds = [seed] if ":" in seed else (f"{seed}:{number}" for number in range(10**9))
    until = time.monotonic() + seconds
    for number, each in enumerate(seeds):
        try:
            _round(directory, each)
        except BaseException as error:
            traceback.print_exc()
            return f"seed {each}: {error!r}"
        if time.monotonic() > until:
            print(f"{number + 1} configurations", flush=True)
            break
    return None


# -- requests --------------------------------------------------------------------------------------

_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e300, "", "/", "..", ".", "a", "small", "small/0000", "small/0000/x"),
    *("\0", "\ud800", "\udcff", "x" * 300, "x/" * 3000, [], {}, [[]], [None], {"a": [1]}),
)
_KEYS = ("paths", "wait", "digests", "repair", "verb", "params", "")


def request(dice: random.Random) -> bytes:
    """What a client might send that is broken, hostile, or of another version."""
    verb = dice.choice(("ping", "status", "warm", "evict", "fsck", "none", "", "status\n", 5))
    params: Any = {
        dice.choice(_KEYS): dice.choice(_VALUES)
        if dice.random() < 0.5
        else [dice.choice(_VALUES) for _ in range(dice.randrange(4))]
        for _ in range(dice.randrange(3))
    }
    if dice.random() < 0.1:
        params = dice.choice(_VALUES)
    line = json.dumps({"verb": verb, "params": params}).encode() + b"\n"
    mangle: Callable[[], bytes] = dice.choice(
        (
            lambda: line,
            lambda: line,
            lambda: line[: dice.randrange(len(line))],
            lambda: line + line,
            lambda: dice.randbytes(dice.choice((1, 100, 10_000))),
            lambda: _flipped(line, dice),
            lambda: b"x" * dice.choice((100, MAX_LINE_BYTES, 2 * MAX_LINE_BYTES)),
            lambda: b"[" * dice.choice((10, 100_000)) + b"\n",
            lambda: b'{"verb": "warm", "params": {"paths": ["' + b"a" * 900_000 + b'"]}}\n',
        )
    )
    return mangle()


def _flipped(line: bytes, dice: random.Random) -> bytes:
    mangled = bytearray(line)
    for _ in range(dice.randrange(1, 4)):
        mangled[dice.randrange(len(mangled))] ^= 1 << dice.randrange(8)
    return bytes(mangled)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), (sys.argv[3:] or ["1"])[0]))
