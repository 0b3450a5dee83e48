"""Trains a small model data parallel on several hosts, each with a data set at a place of its own.

Standard input is one job, JSON: ``ranks``, a list with the network namespace of each rank and its
``place``; ``epochs``, up to which epoch to train; ``latest``, the directory with checkpoints in
each place; and ``stop``: in the middle of this epoch the last rank makes the file ``stopped`` and
continues no more, until it is killed. The reply is a line for each rank: its weights, or its error.

Each epoch is saved with torch.distributed.checkpoint, and counts when all files of all ranks are at
the source. A job continues after the last epoch that counts. The batches of all ranks together are
the same for each number of ranks that divides ``BATCH``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

# Of all ranks together.
BATCH = 12
_CLONE_NEWNET = 0x40000000
_PORT = 29_500
_DURABLE_S = 60.0


class Samples(Dataset[torch.Tensor]):
    """One file for each sample: eight numbers of 8 bytes."""

    def __init__(self, root: Path) -> None:
        self._paths = sorted((root / "data").rglob("*.bin"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(self._paths[index].read_bytes()).copy())


def train(rank: int, job: dict[str, Any], place: Path) -> list[float]:
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    size, checkpoints = dist.get_world_size(), place / job["latest"]
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = restored(checkpoints, model, optimizer)
    samples = Samples(place)
    sampler = DistributedSampler(samples, seed=1)
    loader = DataLoader(samples, batch_size=BATCH // size, sampler=sampler)
    for epoch in range(done + 1, job["epochs"] + 1):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch == job.get("stop") and number == len(loader) // 2 and rank == size - 1:
                Path(job["stopped"]).write_text(str(os.getpid()))
                time.sleep(1000)
            loss = (model(batch[:, :7]) - batch[:, 7:]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(checkpoints, epoch, model, optimizer)
    return [float(each) for parameter in model.parameters() for each in parameter.flatten()]


def save(checkpoints: Path, epoch: int, model: torch.nn.Module, optimizer: Any) -> None:
    directory = checkpoints / f"epoch-{epoch}"
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    rank = dist.get_rank()
    own = [*directory.glob(f"__{rank}_*.distcp"), *([directory / ".metadata"] if not rank else [])]
    for path in own:
        wait_until_durable(path)
    dist.barrier()
    if not rank:
        staged = checkpoints / "latest.tmp"
        staged.write_text(str(epoch))
        os.replace(staged, checkpoints / "latest")
        wait_until_durable(checkpoints / "latest")
    dist.barrier()


def wait_until_durable(path: Path) -> None:
    """Waits until a file is at the source; returns at once outside of a mount."""
    until = time.monotonic() + _DURABLE_S
    while True:
        try:
            if os.getxattr(path, "user.monarch.durable") == b"source":
                return
        except OSError:
            return
        if time.monotonic() > until:
            raise TimeoutError(f"{path} is not at the source")
        time.sleep(0.02)


def restored(checkpoints: Path, model: torch.nn.Module, optimizer: Any) -> int:
    """The last epoch that counts, which is loaded; 0 if there is none."""
    if not (checkpoints / "latest").exists():
        return 0
    epoch = int((checkpoints / "latest").read_text())
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=checkpoints / f"epoch-{epoch}")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return epoch


def run(rank: int, job: dict[str, Any]) -> list[float]:
    own = job["ranks"][rank]
    fd = os.open(own["namespace"], os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job['meeting']}:{_PORT}",
        rank=rank,
        world_size=len(job["ranks"]),
        timeout=timedelta(seconds=100),
    )
    return train(rank, job, Path(own["place"]))


def main() -> None:
    # Its first use would import it in each rank.
    importlib.import_module("torch._dynamo")
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        job = json.loads(line)
        ends = []
        for rank in range(len(job["ranks"])):
            end, mine = os.pipe()
            if not os.fork():
                try:
                    answer: dict[str, Any] = {"weights": run(rank, job)}
                except BaseException as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                os.write(mine, json.dumps(answer).encode())
                os._exit(0)
            os.close(mine)
            ends.append(end)
        answers = []
        for end in ends:
            with open(end, "rb") as file:
                content = file.read()
            answers.append(json.loads(content) if content else {"error": "killed"})
        for _ in ends:
            os.wait()
        print(json.dumps(answers), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
