"""Programs that save as real ones do, each in processes that can be killed at any moment.

    python saving.py    then a line of JSON for each order: ``do`` (``work`` or ``check``),
                        ``program``, ``directory``, ``acks``

``work`` saves into the directory again and again, in a process group of its own, and replies with
the number of the group. After each acknowledged save it appends a line to the file ``acks``.
``check`` replies with the acknowledged data that is missing, or with an empty text. PyTorch is
imported once, and each job is a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# TensorBoard would import TensorFlow, where it is installed, to write a file.
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # noqa: E402
from tensorboard.compat.proto.event_pb2 import Event  # noqa: E402
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

Ack = Callable[[object], None]


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replaced(path: Path, text: str) -> None:
    """As ``latest`` files are written."""
    staged = path.with_name(path.name + ".tmp")
    staged.write_text(text)
    synced(staged)
    os.replace(staged, path)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), step, dtype=torch.float32), "n": torch.tensor(step)}


def is_of(found: dict[str, torch.Tensor], step: int) -> bool:
    return bool((found["w"] == step).all()) and int(found["n"]) == step


def last(acknowledged: list[str]) -> int:
    return max(map(int, acknowledged), default=0)


# A file that is written aside and renamed, ``last.ckpt`` a link to it, the oldest removed.


def lightning(directory: Path, ack: Ack, begun: int) -> None:
    for step in count(begun + 1):
        content = io.BytesIO()
        torch.save({"state_dict": tensors(step), "global_step": step}, content)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(content.getbuffer())
        os.replace(file.name, directory / f"step={step}.ckpt")
        link = directory / "last.tmp"
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(f"step={step}.ckpt")
        os.replace(link, directory / "last.ckpt")
        with contextlib.suppress(FileNotFoundError):
            (directory / f"step={step - 2}.ckpt").unlink()
        ack(step)


def check_lightning(directory: Path, acknowledged: list[str]) -> None:
    for name in {"last.ckpt", f"step={last(acknowledged)}.ckpt"}:
        if acknowledged:
            found = torch.load(directory / name)
            assert found["global_step"] >= last(acknowledged), (
                name,
                found["global_step"],
                last(acknowledged),
            )
            assert is_of(found["state_dict"], found["global_step"])


# A directory that is written aside and renamed, ``latest``, the oldest directory removed.


def huggingface(directory: Path, ack: Ack, begun: int) -> None:
    for left in directory.glob("tmp-*"):
        shutil.rmtree(left)
    for step in count(begun + 1):
        staged, final = directory / f"tmp-checkpoint-{step}", directory / f"checkpoint-{step}"
        if final.exists():
            # The life before was killed when it had not yet said so.
            shutil.rmtree(final)
        staged.mkdir()
        save_file(tensors(step), staged / "model.safetensors")
        torch.save({"step": step}, staged / "optimizer.pt")
        (staged / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for path in staged.iterdir():
            synced(path)
        os.rename(staged, final)
        synced(directory)
        replaced(directory / "latest", final.name)
        shutil.rmtree(directory / f"checkpoint-{step - 2}", ignore_errors=True)
        ack(step)


def check_huggingface(directory: Path, acknowledged: list[str]) -> None:
    if not acknowledged:
        return
    final = directory / (directory / "latest").read_text()
    step = int(final.name.rpartition("-")[2])
    assert step >= last(acknowledged), (step, last(acknowledged))
    assert is_of(load_file(final / "model.safetensors"), step)
    assert torch.load(final / "optimizer.pt") == {"step": step}
    assert json.loads((final / "trainer_state.json").read_text()) == {"global_step": step}


# Four ranks, a sharded model, torch.distributed.checkpoint, a rename and ``latest`` by rank 0.

RANKS = 4


def distributed(directory: Path, ack: Ack, begun: int) -> None:
    meeting = Path(tempfile.mkdtemp())
    for rank in range(RANKS):
        if not os.fork():
            try:
                _rank(directory, ack, begun, rank, meeting)
            finally:
                os._exit(1)
    for _ in range(RANKS):
        os.wait()


def _rank(directory: Path, ack: Ack, begun: int, rank: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting / "store"), RANKS)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    model = torch.nn.Linear(50, 70)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    for step in count(begun + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        staged, final = directory / f"tmp-{step}", directory / f"step-{step}"
        if not rank:
            for left in (staged, final):
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=staged)
        dist.barrier()
        if not rank:
            os.rename(staged, final)
            synced(directory)
            replaced(directory / "latest", final.name)
            ack(step)


def check_distributed(directory: Path, acknowledged: list[str]) -> None:
    if not acknowledged:
        return
    newest = int((directory / "latest").read_text().removeprefix("step-"))
    assert newest >= last(acknowledged), (newest, last(acknowledged))
    for step in {newest, last(acknowledged)}:
        found = {"model": torch.nn.Linear(50, 70).state_dict()}
        dcp.load(found, checkpoint_id=directory / f"step-{step}", no_dist=True)
        assert all(bool((each == step).all()) for each in found["model"].values()), step


def database(directory: Path, ack: Ack, begun: int, mode: str = "DELETE") -> None:
    connection = sqlite3.connect(directory / "runs.db", isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS runs (step INTEGER PRIMARY KEY, output BLOB)")
    for step in count(begun + 1):
        connection.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (step, b"x" * step * 7))
        ack(step)


def database_wal(directory: Path, ack: Ack, begun: int) -> None:
    database(directory, ack, begun, "WAL")


def check_database(directory: Path, acknowledged: list[str]) -> None:
    if not acknowledged:
        return
    connection = sqlite3.connect(directory / "runs.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    rows = connection.execute("SELECT step, output FROM runs ORDER BY step").fetchall()
    connection.close()
    assert len(rows) >= last(acknowledged), (len(rows), last(acknowledged))
    assert rows == [(n, b"x" * n * 7) for n in range(1, len(rows) + 1)]


def git(directory: Path, ack: Ack, begun: int) -> None:
    def run(*arguments: str) -> None:
        subprocess.run(["git", *_GIT, *arguments], cwd=directory, check=True, capture_output=True)

    try:
        run("fsck", "--full")
    except subprocess.CalledProcessError:
        # A repository that was not complete, or that others have taken parts of.
        left = directory / ".git"
        if left.is_symlink() or left.is_file():
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)
        run("init", "-q")
    for lock in (directory / ".git").rglob("*.lock"):
        lock.unlink()
    for step in count(begun + 1):
        (directory / f"file-{step % 5}").write_text(f"{step}\n" * step)
        run("add", "-A")
        run("commit", "-q", "--allow-empty", "-m", f"step {step}")
        ack(step)


_GIT = ("-c", "user.name=n", "-c", "user.email=e", "-c", "gc.auto=0", "-c", "safe.directory=*")


def check_git(directory: Path, acknowledged: list[str]) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *_GIT, *arguments], cwd=directory, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    if acknowledged:
        run("fsck", "--full")
        log = run("log", "--format=%s").split("\n")
        assert {f"step {n}" for n in range(1, last(acknowledged) + 1)} <= set(log), (
            log[:3],
            last(acknowledged),
        )
        assert run("show", f"HEAD:file-{last(acknowledged) % 5}")


def hdf5(directory: Path, ack: Ack, begun: int) -> None:
    """One file a life: what was killed while it had one open leaves it marked as open."""
    life = len(list(directory.glob("*.h5")))
    with h5py.File(directory / f"log-{life}.h5", "w", libver="latest") as file:
        values = file.create_dataset("values", (0, 100), maxshape=(None, 100), chunks=(4, 100))
        file.swmr_mode = True
        for step in count(1):
            values.resize(step, axis=0)
            values[step - 1] = step
            values.flush()
            ack(f"{life} {step}")


def check_hdf5(directory: Path, acknowledged: list[str]) -> None:
    most: dict[str, int] = {}
    for line in acknowledged:
        life, step = line.split()
        most[life] = int(step)
    for life, steps in most.items():
        with h5py.File(directory / f"log-{life}.h5", "r", libver="latest", swmr=True) as file:
            values = file["values"][:steps]
        expected = np.arange(1, steps + 1, dtype="f4")[:, None].repeat(100, axis=1)
        assert values.shape == expected.shape and (values == expected).all()


def tensorboard(directory: Path, ack: Ack, begun: int) -> None:
    writer = EventFileWriter(str(directory))
    for step in count(begun + 1):
        value = Summary.Value(tag="loss", simple_value=step)
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
        writer.flush()
        ack(step)


def check_tensorboard(directory: Path, acknowledged: list[str]) -> None:
    steps = set()
    for path in directory.glob("events*"):
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                assert value.simple_value == event.step
                steps.add(event.step)
    assert set(map(int, acknowledged)) <= steps, set(map(int, acknowledged)) - steps


WORK: dict[str, tuple[Callable[[Path, Ack, int], None], Callable[[Path, list[str]], None]]] = {
    "lightning": (lightning, check_lightning),
    "huggingface": (huggingface, check_huggingface),
    "distributed": (distributed, check_distributed),
    "sqlite": (database, check_database),
    "sqlite-wal": (database_wal, check_database),
    "git": (git, check_git),
    "hdf5": (hdf5, check_hdf5),
    "tensorboard": (tensorboard, check_tensorboard),
}


def work(program: str, directory: str, acks: str) -> int:
    """The process group."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        acknowledged = Path(acks).read_text().split("\n")[:-1]
        file = os.open(acks, os.O_WRONLY | os.O_APPEND)
        begun = last(acknowledged) if " " not in "".join(acknowledged) else 0
        Path(directory).mkdir(exist_ok=True)
        WORK[program][0](Path(directory), lambda what: _tell(file, what), begun)
    except BaseException:
        # The mount went first.
        traceback.print_exc()
    finally:
        os._exit(1)


def _tell(file: int, what: object) -> None:
    os.write(file, f"{what}\n".encode())


def check(program: str, directory: str, acks: str) -> str:
    """What is missing, from a process of its own."""
    end, mine = os.pipe()
    pid = os.fork()
    if not pid:
        answer = ""
        try:
            acknowledged = Path(acks).read_text().split("\n")[:-1]
            WORK[program][1](Path(directory), acknowledged)
        except BaseException:
            answer = traceback.format_exc()
        finally:
            os.write(mine, answer.encode()[-30_000:])
            os._exit(0)
    os.close(mine)
    with open(end, "rb") as file:
        answer = file.read().decode()
    code = os.waitpid(pid, 0)[1]
    return answer or (f"ended with {code}" if code else "")


def main() -> None:
    # Each rank would import it at its first save, which takes seconds.
    importlib.import_module("torch._dynamo")
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running = []
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        do = order.pop("do")
        if do == "work":
            acknowledged: object = work(**order)
            running.append(acknowledged)
        elif do == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(order["group"], signal.SIGKILL)
            os.waitpid(order["group"], 0)
            acknowledged = ""
        else:
            acknowledged = check(**order)
        answers.write(json.dumps(acknowledged) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
