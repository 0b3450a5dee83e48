"""PyTorch's states go into a checkpoint and come back bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch.errors import CheckpointError
from monarch.frameworks.checkpoint import Checkpointer

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("monarch.frameworks.torch")

pytestmark = pytest.mark.frameworks


def restored(directory: Path, state: object) -> Any:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(state)
        found = checkpointer.restore()
    assert found is not None
    return found.state


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"],
)
def test_tensors_of_every_type_and_form_come_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    raw = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, 24 * 16, np.uint8)
    whole = torch.from_numpy(raw).view(kind)[:24]
    tensors = [
        *(whole, whole.reshape(2, 3, 4), whole.reshape(4, 6).t(), whole[::5], whole[3]),
        *(whole[:0], whole.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)),
    ]
    found = adapter.tensors(restored(tmp_path, adapter.leaves(tensors)))
    for one, other in zip(tensors, found, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        # As bytes: a NaN is no equal of itself.
        assert one.contiguous().flatten().view(torch.uint8).tolist() == (
            other.flatten().view(torch.uint8).tolist()
        )


def test_tensors_within_any_nest_come_back_where_they_were(tmp_path: Path) -> None:
    state = {"a": [torch.ones(2), (torch.zeros(1), 3)], 5: "x", "n": np.arange(2)}
    found = adapter.tensors(restored(tmp_path, adapter.leaves(state)))
    assert found["a"][0].tolist() == [1, 1]
    assert type(found["a"][1]) is tuple and found["a"][1][0].tolist() == [0]
    assert found[5] == "x" and found["n"].tolist() == [0, 1]


def test_a_tensor_that_was_not_prepared_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match=r"state\['w'\].*leaves\(\) prepares tensors"):
            checkpointer.save({"w": torch.ones(1)})
    with pytest.raises(TypeError, match="sparse"):
        adapter.leaves([torch.ones(2, 2).to_sparse()])


def run() -> tuple[Any, Any, Any]:
    """A model with all kinds of state, its optimizer and its scheduler, some steps on."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(model: Any, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 4) * random.random() + np.random.rand()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_run_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    model, optimizer, scheduler = run()
    train(model, optimizer, scheduler, 5)
    state = adapter.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    saved = restored(tmp_path, state())
    expected = train(model, optimizer, scheduler, 5)

    model, optimizer, scheduler = run()
    torch.manual_seed(9)
    adapter.TorchState(model=model, optimizer=optimizer, scheduler=scheduler).load(saved)
    assert train(model, optimizer, scheduler, 5) == expected


def test_only_what_the_update_changes_is_copied_behind_the_next_iteration() -> None:
    model, optimizer, scheduler = run()
    train(model, optimizer, scheduler, 1)
    state = adapter.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)()
    deferred = {name for name, leaf in state["model"].items() if leaf.deferred}
    # The running means change in the forward pass.
    assert deferred == {name for name, _ in model.named_parameters()} < state["model"].keys()
    assert all(leaf.deferred for leaf in state["optimizer"]["state"][0].values())
    assert not state["optimizer"]["param_groups"][0]["lr"].deferred
    assert not state["random"]["torch"].deferred


def test_weights_that_the_forward_pass_scales_are_copied_at_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, max_norm=1.0), torch.nn.Linear(2, 4))
    # Its weight has another name as well.
    model[1].weight = model[0].weight
    state = adapter.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters()))()
    assert {name for name, leaf in state["model"].items() if leaf.deferred} == {"1.bias"}


def test_a_state_of_another_run_is_refused() -> None:
    model, optimizer, scheduler = run()
    state = adapter.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    with pytest.raises(CheckpointError, match="not one of a TorchState"):
        state.load({"model": {}})
    saved = {"model": {}, "optimizer": {}, "others": {"average": {}}, "random": {}}
    with pytest.raises(CheckpointError, match=r"has average beside .* the run scheduler"):
        state.load(saved)


@pytest.mark.promise(164)
def test_others_read_the_tensors_of_a_run(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer, scheduler = run()
    train(model, optimizer, scheduler, 2)
    model.more = torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
    state = adapter.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    with Checkpointer(tmp_path) as checkpointer:
        saved = checkpointer.save(state())
    found = safetensors.load_file(tmp_path / saved.name)
    for name, value in model.state_dict().items():
        assert found[f"model.{name}"].dtype == value.dtype
        assert torch.equal(found[f"model.{name}"], value)
    exp_avg = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer.state.0.exp_avg"], exp_avg)


def test_the_copies_of_a_model_on_a_gpu_are_made_in_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, _ = run()
    state = adapter.TorchState(model=model, optimizer=optimizer)
    assert state.allocate is None
    asked = []

    def pinned(size: int) -> Any:
        asked.append(size)
        return np.empty(size, np.uint8)

    monkeypatch.setattr(adapter, "pinned", pinned)
    monkeypatch.setattr(adapter, "_is_on_gpu", lambda tensor: True)

    def update(**options: Any) -> None:
        with Checkpointer(tmp_path, every=1, **options) as checkpointer:
            checkpointer.before_update()
            checkpointer.after_update(state)

    update()
    assert len(asked) == 1
    # A caller that provides other memory gets that.
    update(allocate=lambda size: np.empty(size, np.uint8))
    assert len(asked) == 1
