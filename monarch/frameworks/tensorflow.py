"""Lists of files for tf.data that are announced to a mount of Monarch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from monarch.foresight.messages import SHARDS
from monarch.frameworks.announce import AnyPath, LatestAnnouncement

# Further entries are sent after so many.
_STEP_ENTRIES = 4096


def announce(
    files: Sequence[AnyPath] | Callable[[], Sequence[AnyPath]], *, unit: int = SHARDS
) -> tf.data.Dataset:
    """A data set of the names ``files``, in this order, as ``from_tensor_slices`` makes it. Each
    iteration announces all of them when it begins.

    A function is called for the files of each iteration, so that it can shuffle them. The length of
    the data set is then unknown to tf.data. A data set that follows must not shuffle: ``shuffle``
    of tf.data changes the order after it was announced. ``unit`` is SAMPLES for files of one sample
    each.
    """
    latest = LatestAnnouncement(unit)
    fixed = None if callable(files) else [os.fsencode(path) for path in files]

    def names() -> Iterator[bytes]:
        paths = [os.fsencode(path) for path in files()] if callable(files) else fixed or []
        latest.announce(paths)
        for place, path in enumerate(paths, 1):
            yield path
            if not place % _STEP_ENTRIES and latest.now is not None:
                # The rest of a long order. The reader is behind, at a place that is not known.
                latest.now.append(())

    made = tf.data.Dataset.from_generator(
        names, output_signature=tf.TensorSpec(shape=(), dtype=tf.string)
    )
    if fixed is None:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(len(fixed)))
