"""Plans: the settings of a mount and plain operations, made from a seed, kept as lines of JSON.

Every operation can be carried out or skipped after any other operations, so that a plan without
some of its operations is a plan, too. An operation is a tuple, a name and its arguments:

    readers     ("read", reader, file)  ("open", reader, slot, file)  ("close", reader, slot)
                ("readall", reader, slot)  ("pread", reader, slot, offset, size)
                ("map", reader, slot)  ("touch", reader, slot, offset, size)
                ("forget", reader, slot)  ("stat", reader, file)  ("list", reader)
                ("ask", file): the extended attributes
    together    ("together", (operation, ...)): all at once, one of them no reader's
    mount       ("evict", file, ...)  ("warm", file, ...): without files all
                ("settle",): wait until nothing is copied  ("look",): two comparisons of a ttl
                ("idle",): no request until the mount has released what it had cached
                ("quiet", evict): close all, compare the accounts; with ``evict`` drop all copies
                ("end", "clean" or "kill")  ("mount", refresh)
    source      ("change", kind, file, size), kind one of CHANGES
    tiers       ("damage", kind, file, other), kind one of DAMAGES
                ("fill",): the disk of the first tier  ("drain",)
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Operation = tuple[Any, ...]

MODES = ("python", "relay", "passthrough", "no_open")
CHANGES = ("rewrite", "resize", "replace", "truncate", "append", "delete", "touch", "chmod")
DAMAGES = ("flip", "rot", "zeros", "truncate", "delete", "swap", "stranger")

NAMES = ("a", "b", "c", "d/e", "d/f", "g")
SLOTS = 3
_SIZES = (0, 1, 1000, 4096, 5000, 30_000, 131_072, 140_000, 300_000)
# More than two turns of a copy, and than the tokens a bandwidth begins with.
GIANT = "giant"
_GIANT_SIZES = (9_000_000, 10_500_000)


@dataclass(frozen=True, slots=True)
class Settings:
    """``tiers`` are names and capacities; ``disk`` is the size of the file system of the first, or
    0: then it has none of its own."""

    mode: str
    tiers: tuple[tuple[str, int], ...]
    disk: int
    freshness: str
    verify: str
    options: tuple[str, ...]
    readers: int
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    settings: Settings
    operations: tuple[Operation, ...]

    def dumps(self) -> str:
        """A line for the seed and the settings, then one for each operation."""
        slots = {name: getattr(self.settings, name) for name in Settings.__slots__}
        lines = [{"seed": self.seed, **slots}, *self.operations]
        return "".join(f"{json.dumps(line)}\n" for line in lines)

    @classmethod
    def loads(cls, text: str) -> Plan:
        head, *operations = [_frozen(json.loads(line)) for line in text.splitlines() if line]
        seed = head.pop("seed")
        return cls(seed, Settings(**head), tuple(operations))


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {name: _frozen(below) for name, below in value.items()}
    return value


def generate(seed: int, *, mode: str = "", may_have_disk: bool = False) -> Plan:
    """The plan of a seed. ``may_have_disk``: a tier may have a small file system of its own."""
    dice = random.Random(seed)
    settings = _settings(dice, mode or MODES[seed % len(MODES)], may_have_disk)
    return Plan(seed, settings, tuple(_Writer(dice, settings).operations()))


def _settings(dice: random.Random, mode: str, may_have_disk: bool) -> Settings:
    files = [(name, dice.choice(_SIZES)) for name in NAMES]
    options = [f"placement.policy={dice.choice(('no_evict', 'no_evict', 'first_come', 'lru'))}"]
    if dice.random() < 0.5:
        options.append("limits.inline_max=64KiB")
        if dice.random() < 0.3:
            options.append("limits.buffer_max=200KB")
    if dice.random() < 0.25:
        files.append((GIANT, dice.choice(_GIANT_SIZES)))
        options.append("limits.source_bandwidth=16MB")
    total = sum(size for _, size in files)
    disk = 0
    if may_have_disk and dice.random() < 0.15:
        disk = max(1 << 20, total // 2)
    roomy = dice.random() < 0.6
    capacities = [2 * total + (1 << 20) if roomy else max(total // dice.choice((2, 4)), 1)]
    if dice.random() < 0.4:
        capacities.append(dice.choice((total // 2 + 1, 2 * total + (1 << 20))))
    return Settings(
        mode=mode,
        tiers=tuple((f"t{number}", size) for number, size in enumerate(capacities, start=1)),
        disk=disk,
        freshness=dice.choice(("mount", "mount", "mount", "never", "never", "ttl:300ms")),
        # With `open: none` the kernel does not report the opens at which copies would be verified.
        verify=dice.choice(
            ("unclean", "unclean", "never", "unclean" if mode == "no_open" else "open")
        ),
        options=tuple(options),
        readers=dice.choice((2, 3, 3, 4)),
        files=tuple(files),
    )


class _Writer:
    """Draws operations. Some files and some orders of things are more interesting than others."""

    def __init__(self, dice: random.Random, settings: Settings) -> None:
        self._dice = dice
        self._settings = settings
        names = [name for name, _ in settings.files]
        # A few are met again and again.
        self._names = names + [dice.choice(names)] * 4 + [names[-1]]
        self._mounts = 0

    def operations(self) -> list[Operation]:
        made: list[Operation] = []
        most = self._dice.randrange(20, 50)
        while len(made) < most:
            made += self._some()
        return made

    def _some(self) -> list[Operation]:
        dice = self._dice
        kinds = {
            self._one_read: 30,
            self._slot: 25,
            self._look: 8,
            self._movement: 10,
            self._change: 12,
            self._change_and_read: 8,
            self._together: 8,
            self._damage: 5,
            self._quiet: 4,
            self._remount: 5,
            self._idle: 1 if self._settings.mode == "no_open" else 0,
            self._disk: 3 if self._settings.disk else 0,
        }
        (kind,) = dice.choices(list(kinds), list(kinds.values()))
        return kind()

    def _name(self) -> str:
        return self._dice.choice(self._names)

    def _reader(self) -> int:
        return self._dice.randrange(self._settings.readers)

    def _range(self) -> tuple[int, int]:
        at = self._dice.choice((0, 0, 1, 4096, 4090, 30_000, 131_000, 5_000_000, 8_400_000))
        return at, self._dice.choice((1, 100, 4096, 10_000, 200_000))

    def _one_read(self) -> list[Operation]:
        return [("read", self._reader(), self._name())]

    def _slot(self) -> list[Operation]:
        dice, reader, slot = self._dice, self._reader(), self._dice.randrange(SLOTS)
        kinds = ("open", "open", "readall", "pread", "pread", "map", "touch", "touch", "forget")
        kind = dice.choice((*kinds, "close"))
        if kind == "open":
            return [("open", reader, slot, self._name())]
        if kind in ("pread", "touch"):
            return [(kind, reader, slot, *self._range())]
        return [(kind, reader, slot)]

    def _look(self) -> list[Operation]:
        kind = self._dice.choice(("stat", "stat", "list", "ask"))
        if kind == "list":
            return [("list", self._reader())]
        if kind == "ask":
            return [("ask", self._name())]
        return [("stat", self._reader(), self._name())]

    def _movement(self) -> list[Operation]:
        kind = self._dice.choice(("evict", "evict", "warm", "settle"))
        if kind == "settle":
            return [("settle",)]
        return [(kind, *(self._name() for _ in range(self._dice.choice((0, 1, 1, 2)))))]

    def _a_change(self, name: str) -> Operation:
        dice = self._dice
        kind = dice.choice((*CHANGES, "rewrite", "replace"))
        size = dice.choice(_GIANT_SIZES if name == GIANT else _SIZES)
        return ("change", kind, name, size)

    def _change(self) -> list[Operation]:
        return [self._a_change(self._name())]

    def _change_and_read(self) -> list[Operation]:
        """One has a file open while it changes, another opens it, the first reads on."""
        dice, name, reader = self._dice, self._name(), self._reader()
        other, slot = self._reader(), dice.randrange(SLOTS)
        made: list[Operation] = [("open", reader, slot, name)]
        if dice.random() < 0.7:
            made.append(("pread", reader, slot, *self._range()))
        if dice.random() < 0.3:
            made.append(("settle",))
        made.append(self._a_change(name))
        if dice.random() < 0.3:
            made.append(("evict", name))
        made.append(("read", other, name))
        if dice.random() < 0.5:
            made.append(("forget", reader, slot))
        made.append(("readall", reader, slot))
        if dice.random() < 0.5:
            made += [("close", reader, slot), ("read", other, name)]
        return made

    def _together(self) -> list[Operation]:
        dice, name = self._dice, self._name()
        readers = list(range(self._settings.readers))
        made: list[Operation] = []
        for reader in readers:
            file = name if dice.random() < 0.7 else self._name()
            kind = dice.choice(("read", "read", "read", "open", "pread", "stat", "touch"))
            slot = dice.randrange(SLOTS)
            match kind:
                case "read" | "stat":
                    made.append((kind, reader, file))
                case "open":
                    made.append((kind, reader, slot, file))
                case _:
                    made.append((kind, reader, slot, *self._range()))
        if dice.random() < 0.8:
            other = dice.choice((self._a_change(name), ("evict", name), ("warm", name), ("evict",)))
            made.insert(dice.randrange(len(made) + 1), other)
        return [("together", tuple(made))]

    def _damage(self) -> list[Operation]:
        names = [self._name(), self._name()]
        if self._dice.random() < 0.6:
            warm = [("read", self._reader(), name) for name in names]
            return [*warm, ("settle",), ("damage", self._dice.choice(DAMAGES), *names), *warm]
        return [("damage", self._dice.choice(DAMAGES), *names)]

    def _quiet(self) -> list[Operation]:
        if self._settings.freshness.startswith("ttl") and self._dice.random() < 0.3:
            return [("look",)]
        return [("quiet", self._dice.random() < 0.5)]

    def _remount(self) -> list[Operation]:
        """An end, what happens to tiers and source meanwhile, the next mount and what it serves."""
        dice = self._dice
        if self._mounts >= 3:
            return self._one_read()
        self._mounts += 1
        made: list[Operation] = []
        if dice.random() < 0.7:
            made += [("warm",), ("settle",)]
        made.append(("end", dice.choice(("clean", "clean", "kill"))))
        for _ in range(dice.choice((0, 0, 1, 2))):
            made.append(self._a_change(self._name()))
        for _ in range(dice.choice((0, 0, 1, 2, 3))):
            made.append(("damage", dice.choice(DAMAGES), self._name(), self._name()))
        made.append(("mount", dice.random() < 0.2))
        names = [name for name, _ in self._settings.files]
        dice.shuffle(names)
        return made + [("read", self._reader(), name) for name in names]

    def _idle(self) -> list[Operation]:
        return [("idle",)]

    def _disk(self) -> list[Operation]:
        return [(self._dice.choice(("fill", "drain")),)]
