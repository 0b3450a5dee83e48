"""Lists of shards for TensorFlow and WebDataset are announced, and are otherwise the same."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from monarch.foresight.messages import SHARDS
from monarch.frameworks import announce
from tests.frameworks.announcing import FakeMount, fake_mount

__all__ = ["fake_mount"]

# WebDataset does not close the files of shards that were read.
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore:unclosed file")]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Tar files of two samples each."""
    paths = [tmp_path / f"{number:02}.tar" for number in range(12)]
    for path in paths:
        with tarfile.open(path, "w") as tar:
            for sample in "ab":
                info = tarfile.TarInfo(f"{path.stem}{sample}.txt")
                info.size = 1
                tar.addfile(info, io.BytesIO(sample.encode()))
    return paths


def test_tensorflow_reads_the_files_in_the_order_that_is_announced(
    fake_mount: FakeMount, shards: list[Path], tmp_path: Path
) -> None:
    pytest.importorskip("tensorflow")
    adapter = pytest.importorskip("monarch.frameworks.tensorflow")
    draw = random.Random(3)
    drawn: list[list[Path]] = []

    def shuffled() -> list[Path]:
        drawn.append(draw.sample(shards, len(shards)))
        return drawn[-1]

    dataset = adapter.announce(shuffled)
    for number in range(2):
        read = [Path(name.decode()) for name in dataset.as_numpy_iterator()]
        assert read == drawn[number] and len(drawn) == number + 1
        assert fake_mount.paths(number, tmp_path) == [path.name for path in read]
        assert fake_mount.orders[number].begin.unit == SHARDS
    assert [order.is_ended for order in fake_mount.orders] == [True, False]
    names = [str(path) for path in shards]
    fixed = adapter.announce(names)
    names.clear()
    assert [*fixed.as_numpy_iterator()] == [bytes(path) for path in shards]
    # Keras derives the steps of an epoch from it.
    assert (len(fixed), len(fixed.batch(5))) == (12, 3)
    with pytest.raises(TypeError, match="unknown"):
        len(dataset)


def test_tensorflow_announces_the_rest_of_a_long_list_while_it_is_read(
    fake_mount: FakeMount, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorflow")
    adapter = pytest.importorskip("monarch.frameworks.tensorflow")
    for module, name, value in (
        (announce, "FIRST_ENTRIES", 32),
        (announce, "_PIECE", 8),
        (adapter, "_STEP_ENTRIES", 16),
    ):
        monkeypatch.setattr(module, name, value)
    names = adapter.announce(20 * shards)
    read, sent = [], []
    for name in names.as_numpy_iterator():
        read.append(Path(name.decode()))
        sent.append(len(fake_mount.orders[0].inos))
    assert read == 20 * shards
    assert sent[0] <= 64, "the rest waits"
    assert all(count >= min(place + 16, 240) for place, count in enumerate(sent)), "it is ahead"
    assert fake_mount.orders[0].progress == []


def keys(dataset: Any) -> list[str]:
    return [sample["__key__"] for sample in dataset]


def test_webdataset_reads_the_shards_in_the_order_that_is_announced(
    fake_mount: FakeMount, shards: list[Path], tmp_path: Path
) -> None:
    wds = pytest.importorskip("webdataset")
    adapter = pytest.importorskip("monarch.frameworks.webdataset")
    urls = [f"file:{path}" if number % 2 else str(path) for number, path in enumerate(shards)]
    for number in range(2):
        plain = wds.WebDataset(urls, shardshuffle=12, seed=number)
        announced = adapter.announce(wds.WebDataset(urls, shardshuffle=12, seed=number))
        read = keys(announced)
        assert read == keys(plain) and len(read) == 24
        assert fake_mount.paths(number, tmp_path) == [f"{key[:2]}.tar" for key in read[::2]]
    assert fake_mount.orders[0].begin.unit == SHARDS
    del announced
    assert all(order.is_ended for order in fake_mount.orders)


def test_each_worker_of_webdataset_announces_its_own_shards(
    fake_mount: FakeMount, shards: list[Path], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch.utils.data")
    wds = pytest.importorskip("webdataset")
    adapter = pytest.importorskip("monarch.frameworks.webdataset")

    def sent(sample: dict[str, Any]) -> tuple[str, list[str]]:
        return sample["__key__"], fake_mount.paths(0, tmp_path)

    dataset = adapter.announce(wds.WebDataset([*map(str, shards)], shardshuffle=False)).map(sent)
    loader = torch.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    read = [*loader]
    assert sorted(key for key, _ in read) == sorted(
        f"{path.stem}{s}" for path in shards for s in "ab"
    )
    own = {tuple(names) for _, names in read}
    assert sorted(map(len, own)) == [6, 6]
    assert all(f"{key[:2]}.tar" in names for key, names in read)
    assert fake_mount.orders == []


def test_shards_without_an_end_are_announced_in_parts(
    fake_mount: FakeMount, shards: list[Path]
) -> None:
    wds = pytest.importorskip("webdataset")
    adapter = pytest.importorskip("monarch.frameworks.webdataset")

    def pipeline() -> Any:
        endless = wds.ResampledShards([*map(str, shards)], seed=1, deterministic=True)
        return wds.DataPipeline(endless, wds.tarfile_to_samples())

    plain, read = iter(pipeline()), iter(adapter.announce(pipeline()))
    assert [next(read)["__key__"] for _ in range(50)] == [next(plain)["__key__"] for _ in range(50)]
    assert len(fake_mount.orders[0].inos) == 1024
    with pytest.raises(TypeError, match="no stage that opens shards"):
        adapter.announce(wds.DataPipeline(wds.SimpleShardList(["x"])))


def test_shards_that_are_taken_from_a_directory_are_not_taken_in_advance(
    fake_mount: FakeMount, shards: list[Path]
) -> None:
    """Each is renamed for the process that takes it, and the list waits for further ones."""
    wds = pytest.importorskip("webdataset")
    shardlists = pytest.importorskip("webdataset.shardlists")
    adapter = pytest.importorskip("monarch.frameworks.webdataset")
    listed = shardlists.DirectoryShardList(f"{shards[0].parent}/", pattern="*.tar", poll=None)
    samples = iter(adapter.announce(wds.DataPipeline(listed, wds.tarfile_to_samples())))
    next(samples)
    assert sum(path.exists() for path in shards) == len(shards) - 1
    assert fake_mount.orders == []
