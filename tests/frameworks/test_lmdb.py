"""A DataLoader over an LMDB file reads its batches together, with workers or without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from monarch.datasets.lmdb_index import Index, write_index
from monarch.datasets.lmdb_reader import LmdbReader
from monarch.order import ChunkwiseSampler
from tests.datasets.lmdb_files import Records, appended, written

data = pytest.importorskip("torch.utils.data")
adapter = pytest.importorskip("monarch.frameworks.lmdb")

pytestmark = pytest.mark.frameworks

COUNT = 203


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, Records]:
    path = tmp_path / "f.mdb"
    records = written(path, appended(COUNT, 6000))
    with LmdbReader(path) as reader:
        write_index(tmp_path / "f.mlx", Index(reader.version, reader.table))
    return path, records


def first_bytes(value: memoryview) -> bytes:
    return bytes(value[:8])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_index", [False, True])
def test_a_loader_yields_the_records_in_the_order_of_the_sampler(
    workers: int, with_index: bool, file: tuple[Path, Records], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, records = file
    index = path.with_suffix(".mlx") if with_index else None
    dataset = adapter.LmdbDataset(path, index=index, decode=first_bytes, whole_extents=True)
    assert isinstance(dataset, data.Dataset) and len(dataset) == COUNT
    assert dataset[7] == records[7][1][:8]
    calls = []
    get_many = LmdbReader.get_many

    def counting(self: LmdbReader, indices: np.ndarray) -> list[memoryview]:
        calls.append(len(indices))
        return get_many(self, indices)

    monkeypatch.setattr(LmdbReader, "get_many", counting)
    sampler = ChunkwiseSampler(dataset.extents(), group=2, seed=1)
    fork = {"multiprocessing_context": "fork"} if workers else {}
    loader = data.DataLoader(
        dataset, batch_size=50, sampler=sampler, num_workers=workers, collate_fn=list, **fork
    )
    seen = [sample for batch in loader for sample in batch]
    assert seen == [records[place][1][:8] for place in sampler]
    # A batch is one call; workers have theirs in their own memory.
    assert calls == ([] if workers else [50, 50, 50, 50, 3])


def test_chosen_keys_are_the_samples_in_their_order(file: tuple[Path, Records]) -> None:
    path, records = file
    keys = [key for key, _ in records][::-3]
    dataset = adapter.LmdbDataset(path, keys=keys)
    assert [dataset[place] for place in range(len(dataset))] == [v for _, v in records[::-3]]
    assert dataset.__getitems__([2, 0]) == [records[::-3][2][1], records[::-3][0][1]]
    extents = dataset.extents()
    assert len(extents) == len(keys) and set(extents.tolist()) == set(range(extents.max() + 1))
    with pytest.raises(IndexError):
        dataset[len(keys)]
    with pytest.raises(KeyError, match="missing"):
        adapter.LmdbDataset(path, keys=[b"missing"])
