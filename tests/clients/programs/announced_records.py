"""TensorFlow: tf.data over TFRecord shards, with announcements or without.

The last name of the root is ``announced`` or ``plain``. The reply has the records in the order in
which tf.data yields them.
"""

from __future__ import annotations

import random
from pathlib import Path

import tensorflow as tf
from _protocol import digest, serve

from monarch.frameworks.tensorflow import announce


def epoch(root: Path, number: int) -> dict[str, str]:
    shards = sorted(map(str, root.iterdir()))
    random.Random(number).shuffle(shards)
    if root.name == "announced":
        names = announce(shards)
    else:
        names = tf.data.Dataset.from_tensor_slices(shards)
    records = names.interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=2)
    read = records.shuffle(16, seed=number).prefetch(8).as_numpy_iterator()
    return {str(place): digest(record) for place, record in enumerate(read)}


if __name__ == "__main__":
    serve(epoch)
