"""Training frameworks over a mount get the source's bytes and open each source file once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Client, digests, three_epochs
from tests.conftest import MonarchCommand

# The modes that users have. Each call by which frameworks read is tested in Python's mode as well,
# in test_system_calls.py.
pytestmark = [pytest.mark.frameworks, pytest.mark.modes("relay", "passthrough", "no_open")]

Start = Callable[..., Client]
Make = Callable[..., Path]


def needs(framework: str) -> None:
    """Skip where it is not installed; looked up only, for importing it here would load it here."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


def test_pytorch_with_four_forked_workers_reads_the_source_in_the_first_epoch_only(
    monarch: MonarchCommand, client: Start, images: Path
) -> None:
    needs("torch")
    loader = client("torch_loader")
    three_epochs(monarch, images, loader.epoch, expected=digests(images))


def test_tensorflow_reads_each_tfrecord_shard_of_the_source_once(
    monarch: MonarchCommand, client: Start, make_dataset: Make
) -> None:
    needs("tensorflow")
    source = make_dataset("tfrecord", "--shards", 8, "--records", 240)
    reader = client("tensorflow_records")
    expected = reader.epoch(source)
    assert len(expected) == 240
    three_epochs(monarch, source, reader.epoch, expected=expected)


def test_webdataset_reads_each_tar_shard_of_the_source_once(
    monarch: MonarchCommand, client: Start, make_dataset: Make
) -> None:
    needs("webdataset")
    source = make_dataset("webdataset", "--shards", 8, "--samples", 240)
    reader = client("webdataset_shards")
    expected = reader.epoch(source)
    assert len(expected) == 240
    three_epochs(monarch, source, reader.epoch, expected=expected)
