"""Checkpoints of PyTorch: tensors as arrays of a checkpoint, and the state_dicts of a run; and
``announce`` for its loaders (torch_loader.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from monarch.errors import CheckpointError
from monarch.frameworks.format import Octets, Parts, Shard, Stored
from monarch.frameworks.group import Group
from monarch.frameworks.torch_loader import announce as announce

KIND = "torch"


class Stateful(Protocol):
    """An object with a state_dict: a scheduler, an average of the weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Tensor:
    """A tensor as an array of a checkpoint (``format.Leaf``). On a GPU the copy waits for the work
    begun on the current stream, and runs on its own stream."""

    kind = KIND

    def __init__(self, tensor: torch.Tensor, *, deferred: bool) -> None:
        self.shard = shard_of(tensor)
        if self.shard is not None:
            tensor = cast(Any, tensor).to_local()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"a checkpoint cannot hold a tensor of layout {tensor.layout}")
        self._tensor = tensor.detach()
        self.deferred = deferred
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self.nbytes = tensor.numel() * tensor.element_size()
        self._ready: torch.cuda.Event | None = None
        if tensor.is_cuda:
            with torch.cuda.device(tensor.device):
                self._ready = torch.cuda.Event()
                self._ready.record()

    def copy_into(self, target: Octets) -> None:
        host = torch.from_numpy(target).view(self._tensor.dtype).view(self.shape)
        if self._ready is None:
            host.copy_(self._tensor)
            return
        with torch.cuda.device(self._tensor.device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                stream.wait_event(self._ready)
                host.copy_(self._tensor, non_blocking=True)
            stream.synchronize()


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """The part of ``tensor`` that this rank has; None for a tensor that is not distributed.

    Raises TypeError for one whose parts are not slices of consecutive rows, columns and so on.
    """
    kind = type(tensor)
    if not kind.__module__.startswith("torch.distributed"):
        return None
    if kind.__name__ != "DTensor":
        raise TypeError(
            f"a checkpoint cannot hold a {kind.__name__}; shard the model with fully_shard (FSDP2),"
            " or save a full state_dict"
        )
    start, size = [0] * tensor.dim(), list(tensor.shape)
    mesh = cast(Any, tensor).device_mesh
    place = mesh.get_coordinate()
    for n, placement in enumerate(cast(Any, tensor).placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard" or place is None:
            raise TypeError(
                f"a checkpoint cannot hold a DTensor that is placed as {type(placement).__name__};"
                " shard it in one way only (fully_shard alone), or save its full_tensor()"
            )
        # As torch.chunk, applied to the slice of the earlier dimensions of the mesh.
        dim = placement.dim
        share = -(-size[dim] // mesh.size(n))
        begin = min(size[dim], place[n] * share)
        start[dim] += begin
        size[dim] = min(share, size[dim] - begin)
    if tuple(size) != tuple(cast(Any, tensor).to_local().shape):
        raise TypeError(f"a checkpoint cannot hold a DTensor of uneven parts, {tensor.shape}")
    return Shard(tuple(tensor.shape), tuple(start))


def leaves(state: Any, *, deferred: bool = False) -> Any:
    """``state`` with its tensors ready for a checkpoint.

    ``deferred``: only the update of the weights changes them (``format.Leaf``). Raises TypeError
    for tensors that are sparse, quantized or without content.
    """
    if isinstance(state, torch.Tensor):
        return Tensor(state, deferred=deferred)
    if isinstance(state, dict):
        return {key: leaves(value, deferred=deferred) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(leaves(value, deferred=deferred) for value in state)
    return state


def tensors(state: Any) -> Any:
    """Converts a restored state: arrays that ``leaves`` made become tensors on the CPU."""
    if isinstance(state, Stored) and state.kind == KIND:
        return torch.from_numpy(state.octets).view(getattr(torch, state.dtype)).view(state.shape)
    if isinstance(state, dict):
        return {key: tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(tensors(value) for value in state)
    return state


def pinned(size: int) -> Octets:
    """Pinned host memory, for fast copies from a GPU: ``Checkpointer(allocate=pinned)``."""
    buffer: Octets = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer


def group(process_group: dist.ProcessGroup | None = None) -> Group:
    """The ranks of ``process_group``, or of the whole job, for ``Checkpointer(group=...)``.

    All ranks must call it. They exchange a few bytes by gloo, with any backend of the training.
    """
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    # Its own group, on the CPU: it waits for no communication of the training.
    own = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    size = dist.get_world_size(own)

    def gather(content: torch.Tensor) -> list[torch.Tensor]:
        answers = [torch.empty_like(content) for _ in range(size)]
        dist.all_gather(answers, content, group=own)
        return answers

    def all_gather(message: bytes) -> list[bytes]:
        lengths = [int(each) for each in gather(torch.tensor([len(message)]))]
        padded = bytearray(message.ljust(max(lengths)))
        answers = gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [
            each.numpy().tobytes()[:length] for each, length in zip(answers, lengths, strict=True)
        ]

    return Group(dist.get_rank(own), size, all_gather)


class TorchState:
    """The state of a run: a call returns the state for ``Checkpointer.after_update``.

    Parameters and tensors of the optimizer change only in the update, so they are copied during the
    next iteration. Copied at once are buffers (such as running means of a batch norm), the weights
    of an embedding with ``max_norm``, which the forward pass scales, the generators of random
    numbers (of PyTorch, of every GPU in use, of numpy and Python), and ``others``, by name.
    """

    def __init__(
        self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._others = others

    def __call__(self) -> dict[str, Any]:
        scaled = {
            each
            for module in self._model.modules()
            if getattr(module, "max_norm", None) is not None
            for each in module.parameters(recurse=False)
        }
        updated = {
            name
            for name, each in self._model.named_parameters(remove_duplicate=False)
            if each not in scaled
        }
        optimizer = self._optimizer.state_dict()
        return {
            "model": {
                name: leaves(value, deferred=name in updated)
                for name, value in self._model.state_dict().items()
            },
            # A learning rate that is a tensor is changed by its scheduler, not by the update.
            "optimizer": {
                name: leaves(value, deferred=name == "state") for name, value in optimizer.items()
            },
            "others": {name: leaves(other.state_dict()) for name, other in self._others.items()},
            "random": leaves(_random_state()),
        }

    def load(self, state: Any) -> None:
        """Restores everything, bit for bit. Raises CheckpointError if the saved objects differ, and
        PyTorch's errors for a model or an optimizer of another shape.
        """
        parts = state.states if isinstance(state, Parts) else (state,)
        for part in parts:
            if not isinstance(part, dict) or set(part) != _NAMES:
                raise CheckpointError("the checkpoint is not one of a TorchState")
            if set(part["others"]) != set(self._others):
                raise CheckpointError(
                    f"the checkpoint has {_names(part['others'])} beside model and optimizer, "
                    f"the run {_names(self._others)}"
                )
        model = _fitted([part["model"] for part in parts], self._model.state_dict(), "model")
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        like = {"state": dict(enumerate(map(_LikeParameter, parameters)))}
        optimizer = _fitted([part["optimizer"] for part in parts], like, "optimizer")
        others = {
            name: _fitted([part["others"][name] for part in parts], other.state_dict(), name)
            for name, other in self._others.items()
        }
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        for name, other in self._others.items():
            other.load_state_dict(others[name])
        rank = state.rank if isinstance(state, Parts) else 0
        _set_random_state(tensors(parts[rank % len(parts)]["random"]))
        if rank >= len(parts):
            # Two ranks must not draw the same numbers.
            _jump_random_state(rank)

    def check(self, *, together: bool) -> None:
        """Raises CheckpointError, TypeError for a model that cannot be saved by these ranks."""
        shards = [shard_of(each) for each in self._model.state_dict().values()]
        if any(shards) and not together:
            raise CheckpointError(
                "the model is sharded: each rank has a part of its parameters",
                hint="every rank needs a Checkpointer(..., group=monarch.frameworks.torch.group())",
            )

    @property
    def allocate(self) -> Callable[[int], Octets] | None:
        """The allocator for the copies: pinned memory if any parameter is on a GPU."""
        return pinned if any(map(_is_on_gpu, self._model.parameters())) else None


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda)


_NAMES = {"model", "optimizer", "others", "random"}


class _LikeParameter:
    """Gives the optimizer's state of a parameter the placement of the parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def get(self, _name: object) -> torch.Tensor:
        return self._parameter


def _fitted(saved: Sequence[Any], like: Any, where: str) -> Any:
    """The value that the parts ``saved`` form together, placed on the ranks as ``like`` is.

    Raises CheckpointError if the parts do not belong together, or differ where they must be equal.
    """
    first = saved[0]
    if isinstance(first, Stored) and first.kind == KIND:
        return _fitted_tensor(saved, like if isinstance(like, torch.Tensor) else None, where)
    if isinstance(first, dict):
        if any(not isinstance(each, dict) or each.keys() != first.keys() for each in saved):
            raise _differ(where)
        inner = like if isinstance(like, dict | _LikeParameter) else {}
        return {
            key: _fitted([each[key] for each in saved], inner.get(key), f"{where}[{key!r}]")
            for key in first
        }
    if type(first) in (list, tuple):
        if any(type(each) is not type(first) or len(each) != len(first) for each in saved):
            raise _differ(where)
        members = like if isinstance(like, list | tuple) and len(like) == len(first) else first
        return type(first)(
            _fitted([each[n] for each in saved], members[n], f"{where}[{n}]")
            for n in range(len(first))
        )
    if any(type(each) is not type(first) or not np.array_equal(each, first) for each in saved[1:]):
        raise _differ(where)
    return first


def _fitted_tensor(saved: Sequence[Any], like: torch.Tensor | None, where: str) -> torch.Tensor:
    first = saved[0]
    if any(not isinstance(each, Stored) or each.dtype != first.dtype for each in saved):
        raise _differ(where)
    whole = first.shard.whole if first.shard else first.shape
    wanted = shard_of(like) if like is not None and tuple(like.shape) == whole else None
    if wanted is None and first.shard is None:
        if any(each.octets.tobytes() != first.octets.tobytes() for each in saved[1:]):
            raise _differ(where)
        return cast(torch.Tensor, tensors(first))
    if wanted is None or like is None:
        return _assembled(saved, whole, (0,) * len(whole), whole, where)
    local = cast(Any, like).to_local()
    made = _assembled(saved, whole, wanted.start, tuple(local.shape), where)
    from torch.distributed.tensor import DTensor

    placed: torch.Tensor = DTensor.from_local(
        made.to(local.device),
        cast(Any, like).device_mesh,
        cast(Any, like).placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return placed


def _assembled(
    saved: Sequence[Stored],
    whole: tuple[int, ...],
    start: tuple[int, ...],
    shape: tuple[int, ...],
    where: str,
) -> torch.Tensor:
    """The slice of ``shape`` that begins at ``start``, assembled from the parts that overlap it."""
    made = torch.empty(shape, dtype=getattr(torch, saved[0].dtype))
    parts = {(each.shard.start if each.shard else (0,) * len(whole)): each for each in saved}
    copied = 0
    for begin, part in parts.items():
        if (part.shard.whole if part.shard else part.shape) != whole:
            raise _differ(where)
        spans = [
            (max(s, b), min(s + n, b + m))
            for s, n, b, m in zip(start, shape, begin, part.shape, strict=True)
        ]
        if any(low >= high for low, high in spans):
            continue
        here = tuple(slice(lo - s, hi - s) for (lo, hi), s in zip(spans, start, strict=True))
        there = tuple(slice(lo - b, hi - b) for (lo, hi), b in zip(spans, begin, strict=True))
        made[here] = tensors(part)[there]
        copied += made[here].numel()
    if copied != made.numel():
        raise CheckpointError(f"{where}: the parts in the checkpoint do not cover it")
    return made


def _differ(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} differs between the ranks that saved it",
        hint="resume with the number of ranks that saved it",
    )


def _jump_random_state(rank: int) -> None:
    """Derives a new random state from the current one and the rank."""
    seed = int(torch.randint(1 << 62, ())) ^ (rank * 0x9E3779B97F4A7C15 >> 2)
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _random_state() -> dict[str, Any]:
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if gpus else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_random_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["cuda"]:
        torch.cuda.set_rng_state_all(saved["cuda"])
    np.random.set_state(saved["numpy"])
    random.setstate(saved["python"])


def _names(things: dict[str, Any]) -> str:
    return " and ".join(sorted(things)) or "nothing"
