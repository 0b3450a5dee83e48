"""TFRecord shards of ``tf.train.Example`` records, written without TensorFlow."""

from __future__ import annotations

import argparse
import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scripts.datasets.images import Sample, samples
from scripts.datasets.target import Meter, new_directory, shares

CRC32C_POLYNOMIAL = 0x82F63B78
# Bytes that each lane of the parallel checksum reads one after the other.
LANE = 128


@cache
def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ CRC32C_POLYNOMIAL, table >> 1)
    return table.astype(np.uint32)


def _crc_step(
    registers: NDArray[np.uint32], column: NDArray[np.uint8] | np.uint32
) -> NDArray[np.uint32]:
    stepped: NDArray[np.uint32] = _crc_table()[(registers ^ column) & 0xFF] ^ (registers >> 8)
    return stepped


@cache
def _crc_shift(length: int) -> NDArray[np.uint32]:
    """What each of the 32 bits of a register becomes after ``length`` zero bytes (a power of 2)."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if length == 1:
        return _crc_step(bits, np.uint32(0))
    half = _crc_shift(length // 2)
    return _crc_apply(half, half)


def _crc_apply(operator: NDArray[np.uint32], registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    result = np.zeros_like(registers)
    for bit in range(32):
        result ^= np.where((registers >> np.uint32(bit)) & 1, operator[bit], np.uint32(0))
    return result


def crc32c(message: bytes) -> int:
    """The Castagnoli checksum (RFC 3720). Needs four bytes or more.

    The register is linear in the message, so pieces are summed side by side as numpy vectors and
    then combined in pairs, which is 60 times faster than a loop in Python.
    """
    lanes = 1
    while lanes * LANE < len(message):
        lanes *= 2
    # Leading zeros leave a register of zeros as it is. To start from ones is the same as to invert
    # the first four bytes.
    padded = np.zeros(lanes * LANE, dtype=np.uint8)
    padded[-len(message) :] = np.frombuffer(message, dtype=np.uint8)
    start = len(padded) - len(message)
    padded[start : start + 4] ^= 0xFF
    columns = np.ascontiguousarray(padded.reshape(lanes, LANE).T)
    registers = np.zeros(lanes, dtype=np.uint32)
    for column in columns:
        registers = _crc_step(registers, column)
    length = LANE
    while len(registers) > 1:
        registers = _crc_apply(_crc_shift(length), registers[0::2]) ^ registers[1::2]
        length *= 2
    return int(registers[0]) ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """TFRecord masks a checksum, since it may lie in data that is summed again."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def framed(payload: bytes) -> bytes:
    """``payload`` as one record of a TFRecord file."""
    length = struct.pack("<Q", len(payload))
    return b"".join(
        (
            length,
            struct.pack("<I", _masked(crc32c(length))),
            payload,
            struct.pack("<I", _masked(crc32c(payload))),
        )
    )


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def example(sample: Sample) -> bytes:
    """``sample`` as a serialised ``tf.train.Example``, under the names of ImageNet's records."""

    def entry(name: str, feature: bytes) -> bytes:
        return _field(1, _field(1, name.encode()) + _field(2, feature))

    # Feature is a union: 1 is its list of bytes, 3 its list of integers.
    return _field(
        1,
        entry("image/encoded", _field(1, _field(1, sample.jpeg)))
        + entry("image/class/label", _field(3, _field(1, _varint(sample.label))))
        + entry("image/filename", _field(1, _field(1, sample.key.encode()))),
    )


def tfrecord(options: argparse.Namespace) -> None:
    root = new_directory(options.path, needs=int(options.records * options.mean * 1.1))
    meter = Meter("records", options.records)
    made = samples(options.records, classes=options.classes, mean=options.mean, seed=options.seed)
    for shard, count in enumerate(shares(options.records, options.shards)):
        name = f"train-{shard:05d}-of-{options.shards:05d}.tfrecord"
        with (root / name).open("wb") as stream:
            for _ in range(count):
                record = framed(example(next(made)))
                stream.write(record)
                meter.add(1, len(record))
    meter.finish(root)
