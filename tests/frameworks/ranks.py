"""Ranks of a real job, over gloo: forks of one process that has imported PyTorch.

Each line of standard input is a job, JSON: ``work``, the name of a function here, and the arguments
of each rank. The reply is a line with the result of each rank, or with the way in which it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from monarch.frameworks import store as shelf
from monarch.frameworks.checkpoint import Checkpointer, CheckpointWarning
from monarch.frameworks.torch import TorchState, group
from monarch.order import ResumableSampler
from tests.frameworks.faulty import Faulty


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))


def train(
    directory: str, *, steps: int, every: int = 2, kill_at_call: int = 0, step: int | None = None
) -> dict[str, Any]:
    """Data parallel, one Checkpointer a rank. ``kill_at_call``: of its storage."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    sampler = ResumableSampler(1000, seed=1, rank=dist.get_rank(), world_size=dist.get_world_size())
    state = TorchState(model=net, optimizer=optimizer)
    with Checkpointer(directory, every=every, group=group(), order=sampler) as checkpointer:
        restored = checkpointer.restore(step)
        if restored:
            state.load(restored.state)
        begun = checkpointer.step
        if kill_at_call:
            shelf.os = Faulty(at=kill_at_call)  # type: ignore[assignment]
        while checkpointer.step < steps:
            update(net, optimizer, checkpointer.step)
            checkpointer.before_update()
            optimizer.step()
            sampler.consumed(2)
            checkpointer.after_update(state)
        checkpointer.save(state())
    return {"begun": begun, "step": checkpointer.step, "weights": weights(net)}


def update(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """An update's gradients, the same at each rank."""
    chance = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    net(torch.randn(8, 6, generator=chance)).square().mean().backward()


def weights(net: torch.nn.Module) -> list[float]:
    return [round(float(each.detach().sum()), 6) for each in net.parameters()]


def sharded(
    directory: str,
    *,
    steps: int,
    grouped: bool = True,
    full: bool = False,
    replicas: int = 1,
) -> dict[str, Any]:
    """As ``train``, with parameters that are sharded over the ranks (FSDP2), in ``replicas``."""
    net = model()
    if not full:
        sizes = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "parts"))
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh if replicas > 1 else mesh["parts"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    state = TorchState(model=net, optimizer=optimizer, scheduler=scheduler)
    ranks = group() if grouped else None
    with Checkpointer(directory, every=2, keep_last=9, group=ranks) as checkpointer:
        restored = checkpointer.restore()
        if restored:
            state.load(restored.state)
        begun, found = checkpointer.step, everything(net, optimizer)
        while checkpointer.step < steps:
            update(net, optimizer, checkpointer.step)
            checkpointer.before_update()
            optimizer.step()
            scheduler.step()
            checkpointer.after_update(state)
        if checkpointer.step > begun:
            checkpointer.save(state())
    drawn = torch.rand(1).item()
    return {"begun": begun, "found": found, "left": everything(net, optimizer), "drawn": drawn}


def everything(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """All numbers of the model and of the optimizer, from all ranks."""
    kept = {f"w.{name}": value for name, value in net.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        kept |= {f"o.{number}.{name}": value for name, value in values.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
        for name, value in kept.items()
    }


def tensor_parallel(directory: str) -> str:
    """The error for a placement that a checkpoint cannot hold, at the first update."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(directory, every=100, group=group()) as checkpointer:
        checkpointer.before_update()
        try:
            checkpointer.after_update(TorchState(model=net, optimizer=optimizer))
        except TypeError as error:
            return str(error)
    return ""


WORK: dict[str, Callable[..., Any]] = {
    "train": train,
    "sharded": sharded,
    "tensor_parallel": tensor_parallel,
}


def run(work: str, arguments: dict[str, Any], rank: int, size: int, meeting: Path) -> Any:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CheckpointWarning)
    store = dist.FileStore(str(meeting), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    return WORK[work](**arguments)


def job(work: str, arguments: list[dict[str, Any]]) -> list[Any]:
    pids, ends = [], []
    with tempfile.TemporaryDirectory() as directory:
        for rank, each in enumerate(arguments):
            end, mine = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    result = run(work, each, rank, len(arguments), Path(directory) / "meeting")
                    answer = {"result": result}
                except BaseException as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                    traceback.print_exc()
                finally:
                    os.write(mine, json.dumps(answer).encode())
                    os._exit(0)
            os.close(mine)
            pids.append(pid)
            ends.append(end)
        answers: list[Any] = []
        for pid, end in zip(pids, ends, strict=True):
            with open(end, "rb") as file:
                content = file.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            answers.append(
                json.loads(content) if content else {"error": signal.Signals(-code).name}
            )
    return answers


if __name__ == "__main__":
    # Their first use imports much.
    torch.optim.AdamW(model().parameters())
    for line in sys.stdin:
        print(json.dumps(job(**json.loads(line))), flush=True)
    os._exit(0)
