"""Writes as training does, and times how long the job waits.

Each function writes below a directory and returns seconds. They include the fsync of files that
must be durable before the job continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")

PIECE_BYTES = 1 << 20
SMALL_BYTES = 10_000
APPEND_BYTES = 4096


def tensors(size_bytes: int) -> Any:
    """The state of a model, of about ``size_bytes``, in tensors of 64 MB at most."""
    import torch

    largest, left = 64 * 10**6, size_bytes
    state: dict[str, Any] = {}
    while left > 0:
        count = max(1, min(left, largest) // 4)
        state[f"layer{len(state)}.weight"] = torch.rand(count)
        left -= count * 4
    return state


def save_model(path: Path, state: Any) -> float:
    import torch

    begin = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def write_through(path: Path, size_bytes: int) -> float:
    """Write pieces of 1 MiB, then fsync. No piece equals another, so none can be deduplicated."""
    piece = bytearray(os.urandom(PIECE_BYTES))
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    left = size_bytes
    while left > 0:
        piece[:8] = left.to_bytes(8, "little")
        left -= os.write(fd, memoryview(piece)[: min(left, PIECE_BYTES)])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - begin


def create_files(directory: Path, count: int, *, sync: bool) -> float:
    """Make files of 10 KB, one after the other."""
    content = os.urandom(SMALL_BYTES)
    begin = time.perf_counter()
    for number in range(count):
        fd = os.open(directory / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        if sync:
            os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - begin


def make_and_close(name: str, content: bytes) -> None:
    """Make one new file, as ``open(name, "xb")`` does."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, content)
    os.close(fd)


def each_s(call: Callable[[T], object], items: Sequence[T], pause_s: float = 0.0) -> float:
    """The median time of a call; after each call there is a pause."""
    seconds = []
    for item in items:
        begin = time.perf_counter()
        call(item)
        seconds.append(time.perf_counter() - begin)
        if pause_s:
            time.sleep(pause_s)
    return median(seconds)


def replace_file(directory: Path, count: int) -> float:
    """Write a file under another name and rename it over ``target``, each time a longer one."""
    content = os.urandom(SMALL_BYTES + count)
    staged, target = directory / "staged", directory / "target"
    begin = time.perf_counter()
    for number in range(count):
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, memoryview(content)[: SMALL_BYTES + number])
        os.close(fd)
        os.rename(staged, target)
    return time.perf_counter() - begin


def append_and_sync(path: Path, count: int) -> list[float]:
    """Append 4 KiB and fsync, ``count`` times. The seconds of each fsync, sorted."""
    content = os.urandom(APPEND_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    seconds = []
    for _ in range(count):
        os.write(fd, content)
        begin = time.perf_counter()
        os.fsync(fd)
        seconds.append(time.perf_counter() - begin)
    os.close(fd)
    return sorted(seconds)
