"""PyTorch's side of a checkpoint: tensors as its arrays, and the state_dicts of a run."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch

from monarch.errors import CheckpointError
from monarch.frameworks.layout import Octets, Stored

KIND = "torch"


class Stateful(Protocol):
    """Whatever keeps its state as PyTorch does: a scheduler, an average of the weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Tensor:
    """A tensor as a checkpoint holds it (``layout.Leaf``).

    On a GPU what was begun on the stream current here is waited for before it is copied, on a
    stream of its own.
    """

    kind = KIND

    def __init__(self, tensor: torch.Tensor, *, deferred: bool) -> None:
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


def leaves(state: Any, *, deferred: bool = False) -> Any:
    """``state`` with its tensors ready for a checkpoint.

    ``deferred``: only the update of the weights changes them (``layout.Leaf``). Raises TypeError
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
    """A restored state with tensors, on the CPU, where ``leaves`` had some."""
    if isinstance(state, Stored) and state.kind == KIND:
        return torch.from_numpy(state.octets).view(getattr(torch, state.dtype)).view(state.shape)
    if isinstance(state, dict):
        return {key: tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(tensors(value) for value in state)
    return state


def pinned(size: int) -> Octets:
    """Host memory that a GPU copies into without a detour: ``Checkpointer(allocate=pinned)``."""
    buffer: Octets = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer


class TorchState:
    """The state of a run: calling it gives what ``Checkpointer.after_update`` asks for.

    Parameters and the optimizer's tensors change in the update alone, so they are copied behind
    the next iteration; buffers (the running means of a batch norm), the generators of random
    numbers (PyTorch's, of every GPU in use, numpy's and Python's) and ``others``, by name, at once.
    """

    def __init__(
        self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._others = others

    def __call__(self) -> dict[str, Any]:
        updated = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        optimizer = self._optimizer.state_dict()
        return {
            "model": {
                name: leaves(value, deferred=name in updated)
                for name, value in self._model.state_dict().items()
            },
            # A learning rate that is a tensor is its scheduler's to change.
            "optimizer": {
                name: leaves(value, deferred=name == "state") for name, value in optimizer.items()
            },
            "others": {name: leaves(other.state_dict()) for name, other in self._others.items()},
            "random": leaves(_random_state()),
        }

    def load(self, state: Any) -> None:
        """Put everything back, bit for bit. Raises CheckpointError if other things were saved, and
        what PyTorch raises for a model or an optimizer of another shape.
        """
        told = tensors(state)
        if not isinstance(told, dict) or set(told) != {"model", "optimizer", "others", "random"}:
            raise CheckpointError("the checkpoint is not one of a TorchState")
        if set(told["others"]) != set(self._others):
            raise CheckpointError(
                f"the checkpoint has {_names(told['others'])} beside model and optimizer, "
                f"the run {_names(self._others)}"
            )
        self._model.load_state_dict(told["model"])
        self._optimizer.load_state_dict(told["optimizer"])
        for name, other in self._others.items():
            other.load_state_dict(told["others"][name])
        _set_random_state(told["random"])


def _random_state() -> dict[str, Any]:
    gpus = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if gpus else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_random_state(told: dict[str, Any]) -> None:
    torch.set_rng_state(told["torch"])
    if told["cuda"]:
        torch.cuda.set_rng_state_all(told["cuda"])
    np.random.set_state(told["numpy"])
    random.setstate(told["python"])


def _names(things: dict[str, Any]) -> str:
    return " and ".join(sorted(things)) or "nothing"
