"""The parts of a status report on the choice of the files that get copies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionReport:
    """How often what is recognised of the readers has decided whether copies leave for a file.
    ``replaced``: a file that is opened more often got their place; ``refused``: a file that is
    opened less often did not. ``spared``: no copy left for a file that was scanned."""

    replaced: int = 0
    refused: int = 0
    spared: int = 0


@dataclass(frozen=True, slots=True)
class PackReport:
    """The chunks of a pack: how often one was read as a whole since the mount, and the number of
    its files, chunks and large ones, of which bytes cannot be read now."""

    chunks: int
    chunk_bytes: int
    read: int
    damaged: int


@dataclass(frozen=True, slots=True)
class RuleReport:
    """A rule for the paths that ``match`` covers: ``action`` as in the configuration. Its files in
    the snapshot, and those with copies now. ``counted``: all of its files were found since the
    mount."""

    match: str
    action: str
    files: int
    bytes: int
    resident_files: int
    resident_bytes: int
    counted: bool
