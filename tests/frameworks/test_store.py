"""A directory of checkpoints after a crash or on a full disk has whole checkpoints only."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import xxhash

from monarch.errors import CheckpointError, LockedError
from monarch.frameworks import store
from monarch.frameworks.checkpoint import (
    Checkpointer,
    CheckpointWarning,
    list_checkpoints,
    prune,
    verify,
)
from monarch.frameworks.format import trailer
from monarch.frameworks.sampler import ResumableSampler
from monarch.text import MiB
from monarch.types import XATTR_DURABLE
from tests.frameworks.faulty import FAILS, NO_SPACE, Faulty, Recorder, weights

ROOT = Path(__file__).parents[2]


def save(directory: Path, *steps: int, keep_last: int = 100) -> None:
    with Checkpointer(directory, keep_last=keep_last) as checkpointer:
        for step in steps:
            checkpointer.step = step
            checkpointer.save(weights(step))


def steps(directory: Path) -> list[int]:
    return [listed.checkpoint.step for listed in list_checkpoints(directory)]


def restored_step(directory: Path) -> int:
    with Checkpointer(directory) as checkpointer:
        restored = checkpointer.restore()
    if restored is None:
        return 0
    assert (restored.state["w"] == restored.step).all()
    assert restored.state["step"] == restored.step
    return restored.step


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_trainer_killed_at_any_call_loses_no_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.crashing", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_a_power_cut_at_any_moment_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    acknowledged_steps = [0, 10, 20, 30, 40]
    with monkeypatch.context() as patch:
        patch.setattr(store, "os", recorder)
        with Checkpointer(tmp_path / "run", keep_last=2) as checkpointer:
            for step in acknowledged_steps[1:]:
                checkpointer.step = step
                checkpointer.save(weights(step))
                recorder.acknowledge()
    cuts = 0
    for n, (disk, acknowledged) in enumerate(recorder.disks()):
        for seed in range(4):
            directory = tmp_path / f"{n}-{seed}"
            directory.mkdir()
            disk.cut(directory, random.Random(1000 * n + seed))
            assert [0, *steps(directory)[:1]][-1] >= acknowledged_steps[acknowledged]
            # What was not yet acknowledged may be there, damaged, under its name.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                assert restored_step(directory) >= acknowledged_steps[acknowledged]
            cuts += 1
    assert cuts > 200


@pytest.mark.parametrize("error", [NO_SPACE, FAILS])
def test_storage_that_fails_at_any_call_harms_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    at, failed = 0, 0
    while True:
        at += 1
        directory = tmp_path / str(at)
        save(directory, 10, 20, keep_last=2)
        with Checkpointer(directory, keep_last=2) as checkpointer:
            checkpointer.step = 30
            faulty = Faulty(at=at, error=error)
            with monkeypatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                patch.setattr(store, "os", faulty)
                try:
                    checkpointer.save(weights(30))
                    newest = 30
                except OSError:
                    newest, failed = 20, failed + 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                found = checkpointer.restore()
                assert found is not None and found.step >= newest
                checkpointer.step = 40
                checkpointer.save(weights(40))
        # A start clears away what could not be removed then.
        assert restored_step(directory) == 40
        files = [path.name for path in directory.iterdir()]
        assert not [name for name in files if name.endswith(".part")]
        assert len([name for name in files if name.endswith(".ckpt")]) <= 3
        if faulty.calls < at:
            break
    assert failed > 8


def test_the_newest_whole_checkpoint_is_restored_and_damaged_ones_are_reported(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10, 20, 30)
    names = [listed.checkpoint.name for listed in list_checkpoints(tmp_path)]
    damage(tmp_path / names[0])
    (tmp_path / names[1]).unlink()
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(CheckpointWarning, match="the previous one is tried") as durable:
            restored = checkpointer.restore()
    assert restored is not None and restored.step == checkpointer.step == 10
    assert len(durable) == 2
    assert [each.state for each in verify(tmp_path)] == ["damaged", "missing", "whole"]
    assert [listed.complete for listed in list_checkpoints(tmp_path)] == [True, False, True]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_by_itself(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10)
    damage(next(tmp_path.glob("*.ckpt")))
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="is whole"):
            checkpointer.restore()


def test_without_a_manifest_the_checkpoints_are_found_by_themselves(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    before = list_checkpoints(tmp_path)
    (tmp_path / store.MANIFEST).unlink()
    damage(tmp_path / before[0].checkpoint.name)
    assert list_checkpoints(tmp_path) == []
    with pytest.warns(CheckpointWarning, match="it is ignored"):
        checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    assert list_checkpoints(tmp_path) == before[1:]
    assert (tmp_path / before[0].checkpoint.name).exists()


def test_a_damaged_line_of_the_manifest_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    before = list_checkpoints(tmp_path)
    manifest = tmp_path / store.MANIFEST
    whole = manifest.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        manifest.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            Checkpointer(tmp_path).close()
        assert list_checkpoints(tmp_path) == before


def test_a_manifest_of_a_newer_monarch_is_refused_and_kept(tmp_path: Path) -> None:
    save(tmp_path, 10)
    content = b'{"version": 2}'
    (tmp_path / store.MANIFEST).write_bytes(store._line(content.decode()))
    with pytest.raises(CheckpointError, match="version 2"):
        Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="version 2"):
        list_checkpoints(tmp_path)
    assert content in (tmp_path / store.MANIFEST).read_bytes()


@pytest.mark.fault("Security")
def test_a_manifest_takes_a_limited_amount_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    manifest = tmp_path / store.MANIFEST
    size = manifest.stat().st_size
    with manifest.open("ab") as file:
        file.write(b"\n" * 100_000)
    troubles = store._read_manifest(tmp_path).troubles
    assert len(troubles) == store._MOST_DAMAGED and "line 3 is damaged" in troubles[0]
    # It takes no room on the disk.
    os.truncate(manifest, 1 << 40)
    for read in (list_checkpoints, Checkpointer):
        with pytest.raises(CheckpointError, match="has more than 64 MiB"):
            read(tmp_path)
    os.truncate(manifest, size)
    monkeypatch.setattr(store, "_MOST_BYTES", size + 10)
    assert steps(tmp_path) == [10]
    with pytest.raises(CheckpointError, match="has more than"):
        save(tmp_path, 20)
    assert steps(tmp_path) == [10]


@pytest.mark.fault("Security")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", "1e999"),
        ("size", "1" + "0" * 400),
        ("saved_ns", "1" + "0" * 400),
        ("step", "-1"),
        ("digests", "[" * 100_000 + "]" * 100_000),
        ("digests", "[" + "{}," * 2_000_000 + "{}]"),
    ],
    ids=["infinite", "large", "late", "negative", "deep", "long"],
)
def test_a_line_of_the_manifest_with_impossible_values_is_damaged(
    tmp_path: Path, key: str, value: str
) -> None:
    save(tmp_path, 10, 20)
    manifest = tmp_path / store.MANIFEST
    first, line, last = manifest.read_text().splitlines()
    start = line[17:].index(f'"{key}":') + len(key) + 3 + 17
    end = min(line.find(c, start) for c in ",]}" if line.find(c, start) >= 0)
    if key == "digests":
        end = line.index("]", start) + 1
    text = line[17:start] + value + line[end:]
    manifest.write_bytes(b"".join(map(store._line, (first[17:], text, last[17:]))))
    tracemalloc.start()
    found = store._read_manifest(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [each.step for each in found.checkpoints] == [20]
    assert [each.rpartition(": ")[2] for each in found.troubles] == ["line 2 is damaged"]
    assert peak < store._MOST_BYTES + 5 * manifest.stat().st_size + MiB


@pytest.mark.fault("Security")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_valid", [True, False])
def test_a_checkpoint_with_a_large_header_is_adopted_with_little_memory(
    tmp_path: Path, version: int, is_valid: bool
) -> None:
    """Its objects need 25 times as much memory as their text."""
    large = [[], {}] * 2_000_000
    facts = {"step": 7, "epoch": 0, "consumed": 0, "saved_ns": 1, "serial": 3}
    state = {"state": large, "arrays": []} if is_valid else {"other": large}
    own = json.dumps({"version": version, **facts, **state}, separators=(",", ":"))
    if version == 1:
        content = b"MONARCHk" + len(own).to_bytes(8, "little") + own.encode()
        content += bytes(-len(content) % 4096)
    else:
        header = {"__metadata__": {"monarch": own}}
        text = json.dumps(header, separators=(",", ":")).encode()
        content = len(text).to_bytes(8, "little") + text
    del large, own, state
    content += trailer(xxhash.xxh3_64_intdigest(content))
    (tmp_path / "step-00000007-000003.ckpt").write_bytes(content)
    tracemalloc.start()
    opened = store.CheckpointStore(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    opened.release()
    assert [each.step for each in opened.checkpoints] == [7] * is_valid
    assert ["its header is not valid" in each for each in opened.troubles] == [True] * (
        not is_valid
    )
    assert peak < store.PIECE_BYTES + 4 * MiB


def test_a_name_in_the_manifest_leads_nowhere_else(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save(directory, 10, 20)
    outside = tmp_path / "outside.ckpt"
    outside.write_bytes(b"precious")
    manifest = directory / store.MANIFEST
    first, line, *rest = manifest.read_text().splitlines()
    name = list_checkpoints(directory)[-1].checkpoint.name
    lines = [first[17:], line[17:].replace(name, "../outside.ckpt"), *(r[17:] for r in rest)]
    manifest.write_bytes(b"".join(map(store._line, lines)))
    assert steps(directory) == [20]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        prune(directory, keep_last=1)
    assert outside.read_bytes() == b"precious"


@pytest.mark.fault("Security")
def test_files_of_another_user_in_the_directory_are_neither_followed_nor_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where root thins out the directory of a user."""
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(directory, 10, 20, 30)
    elsewhere.write_bytes(b"precious")
    confirm = store.Owner.confirm

    def planted(owner: store.Owner) -> None:
        os.link(elsewhere, directory / f".{store.MANIFEST}.part")
        confirm(owner)

    with monkeypatch.context() as patch:
        patch.setattr(store.Owner, "confirm", planted)
        assert [each.step for each in prune(directory, keep_last=2)] == [10]
    assert elsewhere.read_bytes() == b"precious" and steps(directory) == [30, 20]
    newest = directory / list_checkpoints(directory)[0].checkpoint.name
    newest.rename(tmp_path / "newest")
    newest.symlink_to(tmp_path / "newest")
    assert [each.state for each in verify(directory)] == ["unreadable", "whole"]
    (directory / store.MANIFEST).rename(tmp_path / "manifest")
    (directory / store.MANIFEST).symlink_to(tmp_path / "manifest")
    with pytest.raises(OSError) as refused:
        list_checkpoints(directory)
    assert refused.value.errno == errno.ELOOP


def test_a_second_trainer_is_refused_and_a_forked_worker_blocks_no_trainer(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path)
    with pytest.raises(LockedError, match="another trainer"):
        Checkpointer(tmp_path)
    with pytest.raises(LockedError, match="another trainer"):
        prune(tmp_path, keep_last=1)
    program = (
        "import os, sys\n"
        "from monarch.frameworks.checkpoint import Checkpointer\n"
        "held = Checkpointer(sys.argv[1])\n"
        "end, mine = os.pipe()\n"
        "if os.fork(): os.read(end, 1); os.kill(os.getpid(), 9)\n"
        "os.write(mine, b'.'); os.read(0, 1)\n"
    )
    first.close()
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, cwd=ROOT
    )
    assert trainer.wait() == -9
    # Its worker still runs.
    Checkpointer(tmp_path).close()
    assert trainer.stdin is not None
    trainer.stdin.close()


def test_gc_keeps_the_newest_whole_ones_and_the_last_of_each_epoch(tmp_path: Path) -> None:
    sampler = ResumableSampler(10, seed=1)
    with Checkpointer(tmp_path, keep_last=100, order=sampler) as checkpointer:
        for epoch in sampler.epochs(3):
            for step in range(3):
                checkpointer.step = 10 * epoch + step
                sampler.consumed(3)
                checkpointer.save(weights(checkpointer.step))
    listed = list_checkpoints(tmp_path)
    assert [(c.checkpoint.epoch, c.checkpoint.consumed) for c in listed[:4]] == [
        *((2, 9), (2, 6), (2, 3), (1, 9)),
    ]
    gone = prune(tmp_path, keep_last=2, keep_every="epoch")
    assert [each.step for each in gone] == [0, 1, 10, 11, 20]
    assert steps(tmp_path) == [22, 21, 12, 2]
    assert len(list(tmp_path.glob("*.ckpt"))) == 4
    damage(tmp_path / listed[0].checkpoint.name)
    # Of the last two one is damaged, so that one more is kept.
    assert prune(tmp_path, keep_last=2) != []
    assert steps(tmp_path) == [22, 21, 12]


def test_gc_by_steps_keeps_the_last_of_each_so_many(tmp_path: Path) -> None:
    save(tmp_path, 5, 95, 105, 195, 205, 215)
    prune(tmp_path, keep_last=1, keep_every=100)
    assert steps(tmp_path) == [215, 195, 95]
    for wrong in ({"keep_last": 0}, {"keep_last": 1, "keep_every": 0}):
        with pytest.raises(ValueError, match=r"at least one|number of"):
            prune(tmp_path, **wrong)  # type: ignore[arg-type]


def test_gc_removes_nothing_while_no_newer_one_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    for listed in list_checkpoints(tmp_path)[:2]:
        damage(tmp_path / listed.checkpoint.name)
    assert prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [30, 20, 10]


def test_a_checkpoint_that_reads_back_wrong_removes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def lying(old: Path, new: Path) -> None:
        real(old, new)
        if new.name.startswith("step-00000030"):
            damage(new)

    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in (10, 20, 30):
            monkeypatch.setattr(os, "replace", lying)
            checkpointer.step = step
            checkpointer.save(weights(step))
    assert steps(tmp_path) == [30, 20]


def durable_as(path: Path, durable: str) -> None:
    os.setxattr(path, XATTR_DURABLE, durable.encode())


@pytest.mark.parametrize(
    ("durable", "wanted", "removed"),
    [
        ("none", "local", False),
        ("local", "local", True),
        ("source", "local", True),
        ("none", "source", False),
        ("local", "source", False),
        ("source", "source", True),
    ],
)
def test_old_ones_stay_until_one_that_is_kept_is_durable_enough(
    tmp_path: Path, durable: str, wanted: str, removed: bool
) -> None:
    save(tmp_path, 10, 20)
    newest = tmp_path / list_checkpoints(tmp_path)[0].checkpoint.name
    try:
        durable_as(newest, durable)
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    assert list_checkpoints(tmp_path)[0].durable == durable
    assert bool(prune(tmp_path, keep_last=1, durable=wanted)) == removed  # type: ignore[arg-type]
    assert steps(tmp_path) == ([20] if removed else [20, 10])
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.durable(20) == durable
        with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
            checkpointer.durable(7)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOTCONN, errno.EACCES, errno.ENODATA])
def test_a_mount_that_cannot_say_how_durable_a_file_is_lets_no_old_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    save(tmp_path, 10, 20)

    def fails(*_: object) -> bytes:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "getxattr", fails)
    prune(tmp_path, keep_last=1)
    # A file system that knows of no such attribute is none of Monarch's.
    assert steps(tmp_path) == ([20] if error == errno.ENODATA else [20, 10])
    durable = list_checkpoints(tmp_path)[0].durable
    assert durable == (None if error == errno.ENODATA else "none")


def test_reading_back_before_old_ones_are_removed_does_not_use_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10, 20)
    calls: list[str] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            if name in ("posix_fadvise", "preadv"):
                calls.append(name)
            return getattr(os, name)

    monkeypatch.setattr(store, "os", Recording())
    assert [each.step for each in prune(tmp_path, keep_last=1)] == [10]
    assert calls[0] == "posix_fadvise" and "preadv" in calls


def test_an_empty_directory_has_nothing_and_says_so(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == [] == verify(tmp_path)
    with Checkpointer(tmp_path / "not" / "there") as checkpointer:
        assert checkpointer.restore() is None
        assert checkpointer.newest is None
