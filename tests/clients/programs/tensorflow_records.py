"""TensorFlow: tf.data over a shuffled list of TFRecord shards, two of them read at a time."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf
from _protocol import digest, serve

FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/filename": tf.io.FixedLenFeature([], tf.string),
}


def parsed(record: tf.Tensor) -> dict[str, tf.Tensor]:
    example = tf.io.parse_single_example(record, FEATURES)
    example["pixels"] = tf.size(tf.io.decode_jpeg(example["image/encoded"], channels=3))
    return example


def epoch(root: Path, number: int) -> dict[str, str]:
    shards = sorted(str(path) for path in root.iterdir())
    records = (
        tf.data.Dataset.from_tensor_slices(shards)
        .shuffle(len(shards), seed=number)
        .interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2)
        .map(parsed, num_parallel_calls=2)
        .shuffle(32, seed=number)
        .prefetch(8)
    )
    seen: dict[str, str] = {}
    for example in records.as_numpy_iterator():
        name = example["image/filename"].decode()
        assert name not in seen
        assert example["pixels"] > 0
        label = int(example["image/class/label"])
        seen[name] = f"{label} {digest(example['image/encoded'])}"
    return seen


if __name__ == "__main__":
    serve(epoch)
