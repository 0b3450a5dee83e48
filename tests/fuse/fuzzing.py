"""``python -m tests.fuse.fuzzing DIRECTORY SECONDS [SEED]``: random messages from both sides.

The kernel sends requests of all kinds, whole and mangled. pyfuse3 answers some right, some wrong,
and some twice. Copies are made, removed and damaged. Each request must get exactly one answer, and
the next sane one the right answer. A failure names the seed that repeats it, as far as threads do.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import random
import sys
import threading
import time
from array import array
from pathlib import Path
from tempfile import TemporaryFile

from monarch.fuse.datapath import split_handle
from monarch.types import WRITTEN_INO, Ino
from tests.conftest import contents
from tests.fuse import wire
from tests.fuse.rig import NoMessage, Rig, rig
from tests.fuse.wire import Op

_ROUND_S = 1.0
_SIZE = 50_000
_OPCODES = [*Op, 0, 6, 8, 12, 21, 37, 40, 45, 47, 52, 4096, 2**32 - 1]
_USUAL = (Op.OPEN, Op.READ, Op.WRITE, Op.RELEASE)
_MANGLED = 1 << 60
# Whatever was in flight at a moment.
_BATCH = 24


class Fuzz:
    def __init__(self, made: Rig, dice: random.Random) -> None:
        self._rig = made
        self._dice = dice
        self._files = [made.place(f"f{n}", 1 + n % 2) for n in range(8)]
        self._nodes = [1, *self._files, made.ino("sub"), made.ino("not"), 0, 2**64 - 1, 2**40]
        self._nodes += [made.snapshot.entries, made.snapshot.entries + 1]
        self._written = [Ino(WRITTEN_INO + n) for n in range(4)] + self._files[:2]
        self._nodes += self._written
        self._objects = [TemporaryFile(), open("/dev/full", "r+b", buffering=0)]  # noqa: SIM115
        self._handles = [0, 1, wire.HANDLE_FAST, 2**64 - 1, wire.HANDLE_FAST | 1 << 31]
        self._stopping = False
        self.sent = 0

    def run(self, until: float) -> None:
        python = threading.Thread(target=self._python, args=(random.Random(self._dice.random()),))
        python.start()
        try:
            while time.monotonic() < until:
                self._batch()
                self._change()
                self._is_sane()
        finally:
            self._stopping = True
            python.join()

    # -- the kernel ------------------------------------------------------------------------------

    def _batch(self) -> None:
        wanted = set()
        for _ in range(self._dice.randrange(1, _BATCH)):
            opcode, node, body = self._request()
            unique = self._rig.send(opcode, node, body, pid=self._dice.choice((0, os.getpid())))
            if opcode not in wire.UNANSWERED:
                wanted.add(unique)
            if self._dice.random() < 0.1:
                self._rig.interrupt(self._dice.randrange(unique + 4))
            if self._dice.random() < 0.1:
                self._mangled()
        self.sent += len(wanted)
        self._collect(wanted)

    def _collect(self, wanted: set[int]) -> None:
        while wanted:
            try:
                found = self._rig.any_answer(20)
            except NoMessage:
                raise AssertionError(f"{len(wanted)} requests were not answered") from None
            if found.unique in (0, _MANGLED):
                continue  # a notification; what was mangled to something whole
            assert found.unique in wanted, f"an answer to nothing, or a second one: {found}"
            wanted.remove(found.unique)
            if len(found.body) in (wire.OPEN_OUT.size, wire.CREATED_SIZE):
                at = len(found.body) - wire.OPEN_OUT.size
                self._handles.append(wire.OPEN_OUT.unpack_from(found.body, at)[0])
                del self._handles[5:-40]

    def _mangled(self) -> None:
        """What no kernel sends: it says another length than it has."""
        length = self._dice.choice((0, 1, 39, 40, 41, 2**31, 2**32 - 1))
        message = wire.request(self._dice.choice(_OPCODES), _MANGLED, 1, b"x" * 5, length=length)
        self._rig.kernel.send(message[: self._dice.randrange(1, len(message) + 1)])

    def _request(self) -> tuple[int, int, bytes]:
        dice = self._dice
        opcode = dice.choice(_OPCODES if dice.random() < 0.3 else _USUAL)
        node = dice.choice(self._nodes)
        numbers = (0, 1, 4095, 4096, _SIZE - 1, _SIZE, 1 << 20, (1 << 20) + 1, 2**31, 2**32 - 1)
        far = (*numbers, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
        handle = dice.choice(self._handles)
        if opcode in (Op.READ, Op.READDIR, Op.READDIRPLUS):
            size, offset = dice.choice(numbers), dice.choice(far)
            body = wire.READ_IN.pack(handle, offset, size, 0, 0, 0, 0)
        elif opcode in (Op.OPEN, Op.OPENDIR):
            body = wire.OPEN_IN.pack(dice.choice((0, 0, 0, 1, 2, 0o1000, 0o1000000)), 0)
        elif opcode == Op.WRITE:
            size, offset = dice.choice((0, 1, 5000, 5000, 300_000)), dice.choice((0, 0, 5000, *far))
            stated_size = size if dice.random() < 0.9 else dice.choice(numbers)
            body = wire.WRITE_IN.pack(handle, offset, stated_size, dice.randrange(8), 0, 0, 0)
            body += bytes(size)
        elif opcode == Op.CREATE:
            body = wire.CREATE_IN.pack(0o101, 0o100600, 0o22, 0) + b"new\0"
        elif opcode == Op.FALLOCATE:
            # Not where a file system of this machine would have to reserve it all.
            offset, length = dice.choice((0, 4096, 2**63, 2**64 - 1)), dice.choice((0, 1, 10_000))
            body = wire.FALLOCATE_IN.pack(handle, offset, length, dice.randrange(64), 0)
        elif opcode == Op.LSEEK:
            body = wire.LSEEK_IN.pack(handle, dice.choice(far), dice.randrange(6), 0)
        elif opcode in (Op.FSYNC, Op.FSYNCDIR):
            body = wire.FSYNC_IN.pack(handle, 0, 0)
        elif opcode == Op.SETATTR:
            body = wire.SETATTR_IN.pack(dice.getrandbits(12), 0, handle, *[0] * 13)
        elif opcode in (Op.RELEASE, Op.RELEASEDIR):
            body = wire.RELEASE_IN.pack(handle, 0, 0, 0)
        elif opcode == Op.LOOKUP:
            name = dice.choice((b"f1", b"f", b"sub", b"", b".", b"..", b"x" * 255, b"x" * 300))
            body = name + b"\0"
        elif opcode in (Op.GETXATTR, Op.LISTXATTR):
            name = dice.choice((b"user.monarch.tier", b"user.x", b"", b"user.monarch."))
            body = wire.GETXATTR_IN.pack(dice.choice(numbers), 0) + name + b"\0"
        elif opcode == Op.INTERRUPT:
            body = wire.INTERRUPT_IN.pack(dice.choice(far))
        elif opcode == Op.INIT:
            flags = dice.choice((0, wire.INIT_EXT, wire.INIT_EXT | wire.INIT_NO_OPEN_SUPPORT))
            body = wire.INIT_IN.pack(7, 40, 1 << 20, flags, dice.getrandbits(32))
        else:
            body = dice.randbytes(dice.choice((0, 8, 16, 100, 5000)))
        if dice.random() < 0.15:
            body = body[: dice.randrange(len(body) + 1)]
        if dice.random() < 0.1 and body:
            at = dice.randrange(len(body))
            body = body[:at] + dice.randbytes(1) + body[at + 1 :]
        if dice.random() < 0.02:
            body += dice.randbytes(dice.choice((1, 1000, 100_000)))
        return opcode, node, body

    def _is_sane(self) -> None:
        name = f"f{self._dice.randrange(8)}"
        node, _ = wire.parse_entry(self._rig.lookup(1, name.encode()).body)
        assert node == self._rig.ino(name)

    # -- the tiers -------------------------------------------------------------------------------

    def _change(self) -> None:
        dice, made = self._dice, self._rig
        ino = dice.choice(self._files)
        name = os.fsdecode(made.snapshot.name(ino))
        resident = made.residency.tier_of(ino) != 0
        match dice.randrange(13):
            case 0 if resident:
                made.evict(ino)
            case 1 if resident:
                with contextlib.suppress(OSError):
                    os.truncate(made.copy(ino, made.residency.tier_of(ino)), dice.randrange(_SIZE))
            case 2:
                made.residency.mark_changed(ino)
            case 3:
                made.residency.unmark_changed(ino)
            case 4 | 5 if not resident:
                made.place(name, dice.choice((1, 2)))
            case 6:
                for ino, _, content, *_ in made.datapath.served():
                    if content is not None:
                        made.datapath.taken(ino)
                made.datapath.tallies()
            case 7:
                made.datapath.unbind(dice.choice(self._written))
            case 8:
                file = dice.choice(self._objects)
                made.datapath.rebind(dice.choice(self._written), file.fileno(), tier=2)
            case 9:
                ino = dice.choice(self._written)
                made.datapath.written(ino)
                made.datapath.release_written(ino)
            case 10:
                parent, valid_s = (
                    Ino(dice.choice((1, WRITTEN_INO))),
                    dice.choice((0, 10, 2**32 - 1)),
                )
                made.datapath.serve_missing(parent, valid_s=valid_s, for_s=dice.choice((0, 10)))
                call = dice.choice((made.datapath.name_given, made.datapath.name_taken))
                call(parent, bytes(dice.randrange(300)))
                made.datapath.forget_attributes(parent)
            case 11:
                node = dice.choice((ino, 0, 2**40, 2**64 - 1))
                begin, size = (dice.choice((0, 1, _SIZE, 2**63, 2**64 - 1)) for _ in range(2))
                made.datapath.keep(array("Q", [node, begin, size]), bytes(_SIZE))
                made.datapath.unkeep(dice.choice(self._files))
            case _:
                made.datapath.state()

    # -- pyfuse3 ---------------------------------------------------------------------------------

    def _python(self, dice: random.Random) -> None:
        waiting: list[wire.Request] = []
        while True:
            try:
                # Answers come in any order, and some time later.
                waiting.append(self._rig.passed(0.002))
                if len(waiting) < 8 and dice.random() < 0.6:
                    continue
            except NoMessage:
                if self._stopping and not waiting:
                    return
            if waiting:
                self._reply(waiting.pop(dice.randrange(len(waiting))), dice)

    def _reply(self, to: wire.Request, dice: random.Random) -> None:
        made = self._rig
        send = made.python.send
        if dice.random() < 0.1:
            send(wire.answer(dice.getrandbits(63) << 1, b"nobody asked"))
            send(wire.answer(to.unique, dice.randbytes(8))[: dice.randrange(1, 16)])
            made.datapath.answer(dice.randrange(2**20), b"nobody asked")
        if dice.random() < 0.05:
            made.datapath.store(dice.choice(self._files), b"pages")
        if to.opcode == Op.READ and dice.random() < 0.8:
            _, token = split_handle(wire.READ_IN.unpack_from(to.body)[0])
            made.datapath.answer(token, bytes(dice.randrange(5000)))
            if dice.random() < 0.5:
                made.datapath.answer(token, b"again")
        elif to.opcode == Op.OPEN and dice.random() < 0.5:
            self._bind(to.node, dice)
        made_now = dice.choice(self._written)
        if to.opcode == Op.CREATE and dice.random() < 0.7:
            self._bind_written(made_now, dice, create=True)
        elif to.opcode == Op.OPEN and dice.random() < 0.5 and to.node in self._written:
            self._bind_written(Ino(to.node), dice, create=False)
        kind = dice.randrange(12)
        if kind == 0:
            send(wire.answer(to.unique, error=dice.choice((errno.EIO, 511, 512, 4095, -5))))
        elif kind == 1:
            send(wire.answer(to.unique, b"short", length=dice.choice((0, 15, 16, 22, 2**32 - 1))))
        elif kind == 2:
            send(wire.answer(to.unique, dice.randbytes(dice.choice((0, 8, 64, 4096, 300_000)))))
        elif to.opcode == Op.OPEN:
            send(wire.answer(to.unique, wire.OPEN_OUT.pack(to.node & (2**40 - 1), 2, 0)))
        elif to.opcode == Op.CREATE:
            node = made_now if dice.random() < 0.9 else dice.choice((0, 1, 2**40, 2**64 - 1))
            handle = wire.OPEN_OUT.pack(made_now, dice.randrange(4), 0)
            send(wire.answer(to.unique, wire.entry(node) + handle))
        elif to.opcode == Op.INIT:
            send(wire.answer(to.unique, bytes(64)))
        else:
            send(wire.answer(to.unique, error=dice.choice((0, errno.ENOSYS))))
        if dice.random() < 0.1:
            send(wire.answer(to.unique, b"a second time"))

    def _bind(self, ino: int, dice: random.Random) -> None:
        fd = dice.choice((-1, 10**6, self._source))
        self._rig.datapath.bind(
            Ino(ino), fd, tier=dice.choice((0, 1, 2, 16)), size=dice.choice((0, _SIZE, 2**63))
        )
        if dice.random() < 0.2:
            self._rig.datapath.end_binding(Ino(ino))

    def _bind_written(self, ino: Ino, dice: random.Random, *, create: bool) -> None:
        fd = dice.choice((-1, self._objects[0].fileno(), *(f.fileno() for f in self._objects)))
        self._rig.datapath.bind_written(ino, fd, tier=dice.choice((0, 1, 16)), create=create)

    @property
    def _source(self) -> int:
        if not hasattr(self, "_fd"):
            self._fd = os.open(self._rig.source / "f0", os.O_RDONLY)
        return self._fd

    def close(self) -> None:
        os.close(self._source)
        for file in self._objects:
            file.close()


def main(directory: Path, seconds: float, seed: int) -> None:
    faulthandler.enable()
    source = directory / "fuzzed"
    (source / "sub").mkdir(parents=True)
    for name in (*(f"f{n}" for n in range(8)), "not", "sub/deeper"):
        (source / name).write_bytes(contents(name, _SIZE))
    end = time.monotonic() + seconds
    sent = rounds = 0
    while time.monotonic() < end:
        dice = random.Random(seed + rounds)
        sys.stdout.write(f"seed {seed + rounds}\n")
        sys.stdout.flush()
        place = directory / f"round-{rounds}"
        place.mkdir()
        no_open = dice.random() < 0.3
        with rig(
            source,
            place,
            fetch_max=dice.choice((0, _SIZE)),
            passthrough=dice.random() < 0.3 and not no_open,
            no_open=no_open,
            decide_opens=dice.random() < 0.1,
            cache_listings=dice.random() < 0.5,
            ask_names=dice.random() < 0.5,
            ask_xattrs=dice.random() < 0.5,
        ) as made:
            fuzz = Fuzz(made, dice)
            fuzz.run(min(end, time.monotonic() + _ROUND_S))
            fuzz.close()
            sent += fuzz.sent
            del fuzz
        rounds += 1
    sys.stdout.write(f"{sent} requests in {rounds} rounds\n")


if __name__ == "__main__":
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(10**9)
    main(Path(sys.argv[1]), float(sys.argv[2]), seed)
