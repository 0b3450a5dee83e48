"""What write-back asks of a datapath that reads and writes objects without the interpreter."""

from __future__ import annotations

from typing import Protocol

from monarch.types import Ino

# An offset that no file has.
UNTOUCHED = 2**64 - 1


class FastWrites(Protocol):
    """What a datapath does for written files: it reads and writes a duplicate of ``fd``, and opens
    those that it knows the object of by itself, to read.

    ``written`` counts what has changed the bytes of one since it was bound, until it is released;
    ``lowest`` is the lowest offset at which it did so.
    """

    def bind(self, ino: Ino, fd: int, *, tier: int, size: int) -> bool: ...
    def bind_written(self, ino: Ino, fd: int, *, tier: int, create: bool) -> bool: ...
    def written(self, ino: Ino) -> int: ...
    def lowest(self, ino: Ino, *, forget: bool) -> int: ...
    def set_objects(self, directory: int, *, tier: int) -> None: ...
    def know_object(self, ino: Ino, number: int) -> bool: ...
    def forget_object(self, ino: Ino) -> None: ...
    def name_given(self, parent: Ino, name: bytes) -> None: ...
    def name_taken(self, parent: Ino, name: bytes) -> None: ...
    def forget_attributes(self, ino: Ino) -> None: ...
    def tell_missing(self, directory: Ino, *, valid_s: int, for_s: float) -> None: ...
    def is_open(self, ino: Ino) -> bool: ...
    def outdate(self, ino: Ino) -> bool: ...
    def release_written(self, ino: Ino) -> None: ...
    def unbind(self, ino: Ino) -> bool: ...
    def rebind(self, ino: Ino, fd: int, *, tier: int) -> bool: ...


class _NoFastWrites:
    """Where there is no datapath: Python does all."""

    def _no(self, *args: object, **options: object) -> bool:
        return False

    def _nothing(self, *args: object, **options: object) -> None: ...

    def written(self, ino: Ino) -> int:
        return 0

    def lowest(self, ino: Ino, *, forget: bool) -> int:
        return UNTOUCHED

    bind = bind_written = know_object = is_open = outdate = unbind = rebind = _no
    set_objects = forget_object = release_written = _nothing
    name_given = name_taken = forget_attributes = tell_missing = _nothing


NO_FAST_WRITES: FastWrites = _NoFastWrites()
