"""A DataLoader that announces yields the same, and draws the same, as one that does not."""

from __future__ import annotations

import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from monarch.order import ChunkwiseSampler, ResumableSampler
from monarch.types import Ino
from tests.conftest import MonarchCommand, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.frameworks.announcing import FakeMount, fake_mount
from tests.mount.command import needs_fuse
from tests.mount.observe import list_late, read_through, settled
from tests.placement.simulate import belady_hits

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("monarch.frameworks.torch")
torch_loader = pytest.importorskip("monarch.frameworks.torch_loader")
next_epoch = pytest.importorskip("monarch.frameworks.next_epoch")
data = pytest.importorskip("torch.utils.data")

__all__ = ["fake_mount"]

pytestmark = pytest.mark.frameworks

COUNT = 103


class Images:
    """A data set as torchvision's ImageFolder: the path and the class of each sample. A sample is
    its index and, with ``draws``, a random number of the process that reads it."""

    def __init__(self, directory: Path, *, draws: bool = True) -> None:
        self.samples = [(str(directory / f"{number:03}"), number % 3) for number in range(COUNT)]
        self._draws = draws

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, float]:
        assert self.samples[index]
        return index, float(torch.rand(())) if self._draws else 0.0


@pytest.fixture
def images(tmp_path: Path) -> Images:
    for number in range(COUNT):
        (tmp_path / f"{number:03}").touch()
    return Images(tmp_path)


class Lengthless:
    """A sampler without an end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(COUNT)


class OwnBatches:
    """A batch sampler of a program: batches of different sizes."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT).tolist()
        for size in range(1, 7):
            yield [order.pop() for _ in range(size)]


def generator() -> Any:
    return torch.Generator().manual_seed(9)


def weights() -> list[float]:
    return [float(1 + number % 7) for number in range(COUNT)]


Make = Callable[[Any], dict[str, Any]]
LOADERS: dict[str, Make] = {
    "sequential": lambda it: {"batch_size": 8},
    "shuffled": lambda it: {"batch_size": 8, "shuffle": True},
    "shuffled, generator": lambda it: {"batch_size": 8, "shuffle": True, "generator": generator()},
    "last batch dropped": lambda it: {"batch_size": 8, "shuffle": True, "drop_last": True},
    "no batches": lambda it: {"batch_size": None, "sampler": data.RandomSampler(it)},
    "no batches, generator": lambda it: {
        "batch_size": None,
        "sampler": data.RandomSampler(it, generator=generator()),
    },
    "with replacement": lambda it: {
        "batch_size": 8,
        "sampler": data.RandomSampler(it, replacement=True, num_samples=300),
    },
    "with replacement, generator": lambda it: {
        "batch_size": 8,
        "sampler": data.RandomSampler(it, replacement=True, num_samples=300, generator=generator()),
    },
    "several times, generator": lambda it: {
        "batch_size": 8,
        "sampler": data.RandomSampler(it, num_samples=250, generator=generator()),
    },
    "subset": lambda it: {
        "batch_size": 8,
        "sampler": data.SubsetRandomSampler(range(5, 90, 2), generator=generator()),
    },
    "weighted": lambda it: {
        "batch_size": 8,
        "sampler": data.WeightedRandomSampler(weights(), 120, generator=generator()),
    },
    "weighted, no generator": lambda it: {
        "batch_size": 8,
        "sampler": data.WeightedRandomSampler(weights(), 120),
    },
    "distributed": lambda it: {
        "batch_size": 8,
        "sampler": data.DistributedSampler(it, num_replicas=3, rank=1, seed=4),
    },
    "resumable": lambda it: {
        "batch_size": 8,
        "sampler": ResumableSampler(COUNT, seed=3, rank=1, world_size=2),
    },
    "chunk-wise": lambda it: {
        "batch_size": 8,
        "sampler": ChunkwiseSampler(np.arange(COUNT) // 5, group=4, seed=3, rank=1, world_size=2),
    },
    "own batches": lambda it: {"batch_sampler": OwnBatches()},
}
# The orders that are begun for three whole epochs, where the next epoch is known in advance. It is
# known of a sampler with ``set_epoch`` when that was called twice.
ORDERS = {
    "sequential": 1,
    "shuffled, generator": 1,
    "no batches, generator": 1,
    "with replacement, generator": 1,
    "several times, generator": 1,
    "distributed": 2,
    "resumable": 2,
    "chunk-wise": 2,
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent workers": {
        "num_workers": 2,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
        "prefetch_factor": 3,
    },
}


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def plain(batch: Any) -> Any:
    return [part.tolist() if hasattr(part, "tolist") else part for part in batch]


def play(loader: Any, *, stop: int = 0) -> list[Any]:
    """Three epochs, with random numbers that the training draws in between. The second one ends
    after ``stop`` batches."""
    seen: list[Any] = []
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            seen.append((plain(batch), float(torch.rand(()))))
            if epoch == 1 and number + 1 == stop:
                break
        own = getattr(loader.sampler, "generator", None)
        seen.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        seen.append(own.get_state().tolist() if own is not None else None)
    return seen


def indices_of(seen: list[Any]) -> list[list[int]]:
    """The indices of each epoch."""
    epochs: list[list[int]] = [[]]
    for each in seen:
        if isinstance(each, tuple) and len(each) == 2:
            found = each[0][0]
            epochs[-1] += found if isinstance(found, list) else [found]
        elif each is None or isinstance(each, list):
            epochs.append([])
    return epochs[:-1]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_the_batches_and_all_random_numbers_are_those_without_it(
    fake_mount: FakeMount, images: Images, tmp_path: Path, kind: str, workers: str
) -> None:
    options, more = LOADERS[kind], WORKERS[workers]
    for stop in (0, 2):
        fake_mount.orders.clear()
        seed()
        expected = play(data.DataLoader(images, **options(images), **more), stop=stop)
        seed()
        loader = adapter.announce(data.DataLoader(images, **options(images), **more))
        assert play(loader, stop=stop) == expected
        # Each epoch was announced, in the order in which it was read.
        read = indices_of(expected)
        assert len(read) == 3
        number = at = 0
        for epoch, indices in enumerate(read):
            expected_names = [f"{index:03}" for index in indices]
            names = fake_mount.paths(number, tmp_path)[at:]
            if epoch and names[: len(indices)] != expected_names:
                number, at = number + 1, 0
                names = fake_mount.paths(number, tmp_path)
            assert names[: len(indices)] == expected_names
            at += len(read[0])
        assert stop or number + 1 == len(fake_mount.orders) == ORDERS.get(kind, 3)
        assert all(order.is_ended for order in fake_mount.orders[:-1])
        del loader
        assert fake_mount.orders[-1].is_ended


class Begun(Images):
    """A sample is the number of files that were announced when its worker was forked."""

    def __init__(self, directory: Path, mount: FakeMount) -> None:
        super().__init__(directory)
        self._mount = mount

    def __getitem__(self, index: int) -> Any:
        return sum(len(order.inos) for order in self._mount.orders)


@pytest.mark.parametrize(
    ("options", "whole"),
    [({"batch_size": 8}, 1), ({"batch_size": 8, "drop_last": True}, 8), ({"batch_size": None}, 1)],
)
def test_the_first_files_of_a_known_order_are_announced_before_the_workers_are_started(
    fake_mount: FakeMount, images: Images, tmp_path: Path, options: dict[str, Any], whole: int
) -> None:
    files = Begun(tmp_path, fake_mount)
    sampler = ChunkwiseSampler(np.arange(COUNT) // 5, group=1, seed=3)
    options = {**options, **WORKERS["workers"], "sampler": sampler}
    loader = adapter.announce(data.DataLoader(files, **options))
    counts = {count for batch in loader for count in np.ravel(batch).tolist()}
    assert counts == {16}
    # One order, with all samples once.
    (order,) = fake_mount.orders
    read = [f"{index:03}" for index in sampler][: COUNT // whole * whole]
    assert fake_mount.paths(0, tmp_path) == read
    assert order.begin.entries == len(read)


def test_an_order_that_changes_while_the_workers_are_started_is_announced_anew(
    fake_mount: FakeMount, images: Images, tmp_path: Path
) -> None:
    sampler = ResumableSampler(COUNT, seed=3)
    options = {"batch_size": 8, "sampler": sampler, **WORKERS["workers"]}
    loader = adapter.announce(data.DataLoader(images, **options))
    batches = iter(loader.batch_sampler)
    sampler.set_epoch(1)
    assert len(list(batches)) == -(-COUNT // 8)
    assert [order.is_ended for order in fake_mount.orders] == [True, False]
    assert fake_mount.paths(1, tmp_path) == [f"{index:03}" for index in sampler]


def test_progress_counts_what_was_read_and_not_what_is_in_flight(
    fake_mount: FakeMount, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.frameworks.announce._STEP_ENTRIES", 1)
    for workers, in_flight in (({}, 0), (WORKERS["workers"], 4)):
        loader = adapter.announce(data.DataLoader(images, batch_size=8, **workers))
        for read, _ in enumerate(loader):
            order = fake_mount.orders[-1]
            assert max(order.progress, default=0) <= 8 * (read + 1)
        order, batches = fake_mount.orders[-1], -(-COUNT // 8)
        assert max(order.progress) >= 8 * (batches - in_flight - 2)
        assert order.progress == sorted(set(order.progress))


def test_a_sampler_without_an_end_is_not_asked_in_advance(
    fake_mount: FakeMount, images: Images
) -> None:
    loader = adapter.announce(data.DataLoader(images, batch_size=8, sampler=Lengthless()))
    assert plain(next(iter(loader)))[0] == [*range(8)]
    assert fake_mount.orders == []


@pytest.mark.parametrize("workers", ["no workers", "workers"])
def test_an_iteration_that_is_given_up_late_leaves_the_order_of_the_next_one(
    fake_mount: FakeMount, images: Images, workers: str
) -> None:
    """As in ``batches = iter(loader)``, in mid-epoch."""
    options = {"batch_size": 8, "shuffle": True, **WORKERS[workers]}
    loader = adapter.announce(data.DataLoader(images, **options))
    batches = iter(loader)
    next(batches)
    following = iter(loader)
    next(following)
    del batches
    gc.collect()
    assert [order.is_ended for order in fake_mount.orders] == [True, False]
    del following
    gc.collect()
    assert fake_mount.orders[-1].is_ended


@pytest.mark.parametrize("kind", ["sequential", "shuffled, generator", "no batches", "own batches"])
def test_a_loader_that_is_announced_again_has_one_order(
    fake_mount: FakeMount, images: Images, kind: str
) -> None:
    """As by a program that announces its loader in each epoch."""
    seed()
    expected = play(data.DataLoader(images, **LOADERS[kind](images)))
    seed()
    loader = data.DataLoader(images, **LOADERS[kind](images))
    for _ in range(3):
        loader = adapter.announce(loader)
    assert play(loader) == expected
    assert len(fake_mount.orders) == ORDERS.get(kind, 3)


@pytest.mark.parametrize("is_subset", [False, True])
@pytest.mark.parametrize("kind", ["shuffled, generator", "no batches", "distributed"])
def test_an_announcing_loader_can_be_sent_to_another_process(
    fake_mount: FakeMount, images: Images, kind: str, is_subset: bool
) -> None:
    """As ``torch.multiprocessing.spawn`` does. What is there then announces for itself."""
    dataset = data.Subset(data.Subset(images, range(1, 90)), range(50)) if is_subset else images
    loader = adapter.announce(data.DataLoader(dataset, **LOADERS[kind](dataset)))
    seed()
    expected = [plain(batch) for batch in loader]
    there = pickle.loads(pickle.dumps(loader))
    seed()
    if kind == "shuffled, generator":
        there.sampler.generator.manual_seed(9)
    assert [plain(batch) for batch in there] == expected
    del there
    gc.collect()
    assert [order.is_ended for order in fake_mount.orders] == [False, True]
    del loader
    gc.collect()


def test_an_order_ends_before_an_epoch_that_cannot_be_announced(
    fake_mount: FakeMount, images: Images, tmp_path: Path
) -> None:
    sampler: list[Any] = [*range(COUNT)]
    loader = adapter.announce(data.DataLoader(AnyNumber(tmp_path), sampler=sampler))
    assert len(list(loader)) == COUNT and not fake_mount.orders[0].is_ended
    sampler[:] = [(number, "flip") for number in range(COUNT)]
    following = iter(loader)
    next(following)
    assert [order.is_ended for order in fake_mount.orders] == [True]
    del following


class Odd:
    """A sampler of a program that yields ``item`` of each number. It must not be asked for many."""

    def __init__(self, item: Callable[[int], Any], length: Callable[[], Any]) -> None:
        self._item, self._length = item, length

    def __len__(self) -> int:
        return cast(int, self._length())

    def __iter__(self) -> Iterator[Any]:
        for number in range(2000):
            yield self._item(number % COUNT)
        raise AssertionError("it was asked for too many")


class AnyNumber(Images):
    """It has a sample for any index, and for any pair of an index and something else."""

    def __getitem__(self, index: Any) -> tuple[int, float]:
        return super().__getitem__((index[0] if isinstance(index, tuple) else int(index)) % COUNT)


def unknown_length() -> int:
    raise NotImplementedError


def later_length() -> int:
    """As that of a sampler that makes its batches when an epoch begins."""
    raise AttributeError


def refilled(batch: Any) -> Callable[[int], Any]:
    """A sampler's batches: the same object each time, with other numbers."""

    def fill(number: int) -> Any:
        batch[0], batch[1] = number % COUNT, number * 7 % COUNT
        return batch

    return fill


# What a program may have as a sampler, and whether its files can be announced.
ODD: dict[str, tuple[Make, bool]] = {
    "no length": (lambda it: {"sampler": Odd(int, unknown_length)}, False),
    "a length that is known later": (lambda it: {"sampler": Odd(int, later_length)}, False),
    "the greatest length": (lambda it: {"sampler": Odd(int, lambda: sys.maxsize)}, True),
    "a length beyond numbers": (lambda it: {"sampler": Odd(int, lambda: 1 << 80)}, False),
    "a great length, generator": (
        lambda it: {"sampler": data.RandomSampler(it, True, 1 << 20, generator())},
        True,
    ),
    "numbers of no sample": (
        lambda it: {"sampler": Odd(lambda number: number + COUNT, lambda: COUNT)},
        False,
    ),
    "pairs": (lambda it: {"sampler": Odd(lambda number: (number, 640), lambda: COUNT)}, False),
    "words": (lambda it: {"sampler": Odd(lambda number: (number, "flip"), lambda: COUNT)}, False),
    "tensors": (
        lambda it: {"batch_sampler": Odd(lambda number: torch.arange(number % 4 + 1), lambda: 90)},
        True,
    ),
    "arrays": (
        lambda it: {"batch_sampler": Odd(lambda number: np.arange(number % 4 + 1), lambda: 90)},
        True,
    ),
    "one list": (lambda it: {"batch_sampler": Odd(refilled([0, 0]), lambda: 90)}, True),
    "one tensor": (
        lambda it: {"batch_sampler": Odd(refilled(torch.zeros(2, dtype=torch.int64)), lambda: 90)},
        True,
    ),
    "one array": (
        lambda it: {"batch_sampler": Odd(refilled(np.zeros(2, np.int64)), lambda: 90)},
        True,
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_the_batches_of_an_odd_sampler_are_those_without_it(
    fake_mount: FakeMount,
    images: Images,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(torch_loader, "_MOST_KNOWN", 256)
    monkeypatch.setattr(torch_loader, "_MOST_TIMES", 1)
    options, is_announced = ODD[kind]
    made = AnyNumber(tmp_path)

    def first(loader: Any) -> list[Any]:
        seed()
        return [plain(batch) for batch in islice(loader, 40)]

    expected = first(data.DataLoader(made, **options(made)))
    assert first(adapter.announce(data.DataLoader(made, **options(made)))) == expected
    assert len(expected) == 40 and bool(fake_mount.orders) == is_announced
    if is_announced:
        read = [f"{index:03}" for batch in expected for index in batch[0]]
        names = fake_mount.paths(0, tmp_path)
        assert names[: len(read)] == read and len(names) <= 260


@pytest.mark.parametrize("most", [999, 1000])
def test_a_next_epoch_that_is_much_longer_than_the_data_set_is_not_computed(most: int) -> None:
    samplers = data.SequentialSampler(range(1000)), data.RandomSampler(range(1000), False)
    samplers[1].generator = generator()
    for sampler in samplers:
        for made in (sampler, data.BatchSampler(sampler, 10, False)):
            items = next_epoch.NextEpoch(made, None, most).items()
            assert len(items) == (0 if most == 999 else 1000 if made is sampler else 100)


def test_a_sampler_that_saves_its_position_is_not_asked_in_advance(
    fake_mount: FakeMount, images: Images
) -> None:
    class Saved(data.SequentialSampler):  # type: ignore[misc, name-defined]
        position = 0

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def __iter__(self) -> Iterator[int]:
            for index in range(COUNT):
                self.position = index + 1
                yield index

    sampler = Saved(images)
    loader = adapter.announce(data.DataLoader(images, batch_size=8, sampler=sampler))
    next(iter(loader))
    assert sampler.state_dict() == {"position": 8}
    assert fake_mount.orders == []


def test_the_files_are_those_of_a_subset_or_are_given(
    fake_mount: FakeMount, images: Images, tmp_path: Path
) -> None:
    nested = data.Subset(data.Subset(images, range(10, 60)), [3, 1, 40])
    list(adapter.announce(data.DataLoader(nested)))
    assert fake_mount.paths(0, tmp_path) == ["013", "011", "050"] * 2, "and the next epoch"
    tensors = data.TensorDataset(torch.arange(3))
    paths = [path for path, _ in images.samples[:3]]
    list(adapter.announce(data.DataLoader(tensors), paths))
    list(adapter.announce(data.DataLoader(tensors), lambda index: paths[-index]))
    assert fake_mount.paths(1, tmp_path) == ["000", "001", "002"] * 2
    assert fake_mount.paths(2, tmp_path) == ["000", "002", "001"] * 2
    with pytest.raises(TypeError, match="give them as `paths`"):
        adapter.announce(data.DataLoader(tensors))
    iterable = type("Stream", (data.IterableDataset,), {"__iter__": lambda self: iter([1])})()
    with pytest.raises(TypeError, match="iterable"):
        adapter.announce(data.DataLoader(iterable))


def test_the_loader_keeps_its_attributes(images: Images) -> None:
    sampler = data.DistributedSampler(images, num_replicas=2, rank=0)
    loader = data.DataLoader(images, batch_size=8, sampler=sampler)
    announcing = adapter.announce(loader)
    assert type(announcing) is type(loader) and announcing.sampler is sampler
    assert isinstance(announcing.batch_sampler, data.BatchSampler)
    assert announcing.batch_sampler.batch_size == 8 and announcing.batch_sampler.sampler is sampler
    assert len(announcing) == len(loader)
    assert not hasattr(announcing.batch_sampler, "nothing")


def test_where_nothing_receives_hints_the_loader_is_the_same(images: Images) -> None:
    seed()
    expected = play(data.DataLoader(images, batch_size=8, shuffle=True))
    seed()
    assert play(adapter.announce(data.DataLoader(images, batch_size=8, shuffle=True))) == expected


@needs_fuse
@pytest.mark.modes("relay", "no_open")
def test_over_a_mount_each_epoch_is_announced_and_the_bytes_are_those_of_the_source(
    monarch: MonarchCommand, source: Path
) -> None:
    for number in range(COUNT):
        (source / f"{number:03}").write_bytes(b"%d" % number * 10)
    mounted = monarch.mount(source)

    class Bytes(Images):
        def __getitem__(self, index: int) -> tuple[int, Any]:
            return index, Path(self.samples[index][0]).read_bytes()

    def announced() -> dict[str, int]:
        found: dict[str, int] = mounted.status()["foresight"]["announced"]
        return found

    def loader(directory: Path) -> Any:
        sampler = data.RandomSampler(range(COUNT), generator=generator())
        more = WORKERS["persistent workers"]
        return data.DataLoader(Bytes(directory), batch_size=8, sampler=sampler, **more)

    plain, announcing = loader(source), adapter.announce(loader(mounted.path))
    for epoch in range(2):
        for expected, batch in zip(plain, announcing, strict=True):
            assert [expected[0].tolist(), expected[1]] == [batch[0].tolist(), batch[1]]
        assert (announced()["orders"], announced()["ended"]) == (1, 0), epoch
        assert (announced()["unknown"], announced()["refused"]) == (0, 0)
    del announcing
    gc.collect()
    assert (announced()["orders"], announced()["ended"]) == (0, 1)


class Epochs:
    """Three epochs of a sampler as one, so that the order of all is known."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return 3 * len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        for number in range(3):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(number)
            yield from self._sampler


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: data.RandomSampler(range(COUNT), generator=generator()),
    "weighted": lambda: data.WeightedRandomSampler(
        [1.0 + number % 9 for number in range(COUNT)], COUNT, generator=generator()
    ),
    "partial": lambda: data.SubsetRandomSampler(range(0, COUNT, 2), generator()),
    "distributed": lambda: data.DistributedSampler(range(COUNT), num_replicas=2, rank=1),
}


@needs_fuse
@pytest.mark.promise(188)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_hits_of_a_loader_are_those_of_belady(
    monarch: MonarchCommand,
    tree: Tree,
    source: Path,
    sampler: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tier holds half of the files that are read, and each copy is written before the next
    open. The mount knows the first files of the order before the others."""
    tree({f"{number:03}": contents(str(number), 500) for number in range(COUNT)})
    order = list(Epochs(SAMPLERS[sampler]()))
    capacity = len(set(order)) // 2
    best = sum(belady_hits([Ino(index) for index in order], capacity))
    mounted = monarch.mount(source, tiers={"fast": str(capacity * 500)})

    class Bytes(Images):
        def __getitem__(self, index: int) -> tuple[int, float]:
            read_through(Path(self.samples[index][0]))
            settled(mounted)
            return index, 0.0

    loader = data.DataLoader(Bytes(mounted.path), batch_size=8, sampler=Epochs(SAMPLERS[sampler]()))
    list_late(mounted, monkeypatch)
    with OpenCounter(source) as counter:
        announcing = adapter.announce(loader)
        assert [index for batch, _ in announcing for index in batch.tolist()] == order
        assert counter.count() == len(order) - best
