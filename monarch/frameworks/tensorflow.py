"""Lists of files for tf.data that are announced to a mount of Monarch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from monarch.foresight.messages import SHARDS
from monarch.frameworks.announce import AnyPath, LatestAnnouncement


def announce(
    files: Sequence[AnyPath] | Callable[[], Sequence[AnyPath]], *, unit: int = SHARDS
) -> tf.data.Dataset:
    """A data set of the names ``files``, in this order, as ``from_tensor_slices`` makes it. Each
    iteration announces all of them when it begins.

    A function is called for the files of each iteration, so that it can shuffle them. A data set
    that follows must not: ``shuffle`` of tf.data changes the order after it was announced. ``unit``
    is SAMPLES for files of one sample each.
    """
    latest = LatestAnnouncement(unit)

    def names() -> Iterator[bytes]:
        paths = [os.fsencode(path) for path in (files() if callable(files) else files)]
        latest.announce(paths)
        yield from paths

    return tf.data.Dataset.from_generator(
        names, output_signature=tf.TensorSpec(shape=(), dtype=tf.string)
    )
