"""What is fetched ahead for whole jobs: epochs of a data set, without a mount."""

from __future__ import annotations

import random
import sys
import tracemalloc
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import pytest

from monarch.config.settings import ForesightSettings
from monarch.control.messages import MAX_LINE_BYTES, encode
from monarch.foresight import stream as module
from monarch.foresight.announced import Announcer
from monarch.foresight.foresight import Foresight
from monarch.foresight.messages import Piece
from monarch.foresight.recognition import LEAST_FILES
from monarch.namespace.build import build
from monarch.namespace.snapshot import Snapshot
from monarch.types import Ino
from tests.foresight.streams import SIZE, Tree, with_noise, workers

TRAIN, VAL = 0, 1
JOB, OTHER_JOB = 10, 20


@dataclass
class Job:
    """A tree with 4,000 files to train with and 800 to validate; ``open`` opens files, and fetches
    ``rate`` files ahead for each."""

    rate: int = 8
    is_ahead: bool = True
    is_filled: bool = True
    tree: Tree = field(default_factory=lambda: Tree((100, 40), (20, 40)))
    woken: int = 0
    given: list[int] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = ForesightSettings(ahead=self.is_ahead, fill=self.is_filled)
        self.foresight = Foresight(self.tree, settings, self.copies.__contains__)
        self.foresight.on_more(self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def open(self, inos: list[int], job: int = JOB) -> int:
        """Opens files; returns how many of them were fetched before they were opened."""
        hits = 0
        for ino in inos:
            hits += ino in self.given
            self.foresight.opened(Ino(ino), job)
            for found in self.foresight.next(self.rate):
                self.given.append(found)
                self.foresight.fetched(found, SIZE)
        return hits

    def files(self, directory: int) -> range:
        return self.tree.files[directory]

    @property
    def patterns(self) -> dict[str, str]:
        return {
            stream.directory: stream.pattern
            for stream in self.foresight.report(counts_opens=True).streams
        }


def shuffled(files: range, seed: int) -> list[int]:
    rng = random.Random(seed)
    return workers(rng.sample(files, len(files)), 4, 32, rng)


def test_the_first_epoch_of_a_shuffled_job_is_filled_behind_its_readers() -> None:
    job = Job()
    order = shuffled(job.files(TRAIN), 1)
    hits = job.open(order)
    # All but the fifth of the files that is read before the fill begins.
    assert hits >= 0.7 * len(order)
    assert len(set(job.given)) == len(job.given)
    assert job.patterns == {"2": "shuffled"}


@pytest.mark.promise(181)
def test_a_job_that_reads_a_tenth_at_random_wastes_little() -> None:
    for seed in range(20):
        job = Job(rate=1000)
        order = shuffled(job.files(TRAIN), seed)[:400]
        job.open(order)
        unread = len(set(job.given) - set(order))
        assert unread <= 0.15 * len(order)
        report = job.foresight.report(counts_opens=True)
        assert (report.unread_files, report.unread_bytes) == (unread, unread * SIZE)
        assert report.fetched_bytes == len(job.given) * SIZE


@pytest.mark.promise(181)
@pytest.mark.parametrize("readers", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("files_of_class", [40, 200])
def test_a_job_that_reads_a_random_tenth_in_the_order_of_the_names_wastes_little(
    readers: int, files_of_class: int
) -> None:
    """Such as the list of a subset, which is sorted."""
    for seed in range(5):
        job, rng = Job(rate=1000, tree=Tree((100, files_of_class))), random.Random(seed)
        files = job.files(TRAIN)
        order = workers(sorted(rng.sample(files, len(files) // 10)), readers, 32, rng)
        job.open(order)
        assert len(set(job.given) - set(order)) <= 0.15 * len(order)


def test_a_job_that_leaves_out_few_files_is_foreseen_also_after_others() -> None:
    job, rng = Job(rate=64, tree=Tree((100, 100))), random.Random(1)
    files = job.files(TRAIN)
    job.open(sorted(rng.sample(files[:2000], 200)))
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert (stream.pattern, stream.ahead) == ("sequential", 0)
    order = workers(sorted(rng.sample(files[2000:], 7200)), 4, 32, rng)
    assert job.open(order) >= 0.7 * len(order)


def test_a_fill_ends_with_its_readers_and_stays_in_their_subtree() -> None:
    job = Job(rate=0)
    order = shuffled(job.files(TRAIN), 2)
    job.open(order[:1000])
    found = [job.foresight.next(100) for _ in range(100)]
    given = [ino for inos in found for ino in inos]
    assert 0 < len(given) <= 2048
    assert not found[-1], "only further opens continue it"
    assert set(given) <= set(job.files(TRAIN))
    assert not set(given) & set(order[:1000]), "what was read is not fetched"


def test_files_in_the_order_of_the_snapshot_are_given_ahead_of_the_readers() -> None:
    job = Job(rate=64)
    rng = random.Random(3)
    order = workers(list(job.files(TRAIN)), 4, 16, rng)
    assert job.open(order) >= 0.9 * (len(order) - 200)
    assert job.patterns == {"2": "sequential"}
    assert set(job.given) <= set(job.files(TRAIN))


@pytest.mark.parametrize("batch", [4, 32])
@pytest.mark.parametrize("readers", [8, 16, 32])
def test_files_in_the_order_of_the_snapshot_are_given_ahead_of_many_readers(
    readers: int, batch: int
) -> None:
    """Each reader begins behind files that another one reads later: these are not left out."""
    job, rng = Job(rate=64, tree=Tree((100, 100))), random.Random(3)
    order = workers(list(job.files(TRAIN)), readers, batch, rng)
    assert job.open(order) >= 0.5 * len(order)
    assert job.patterns == {"2": "sequential"}


def test_the_distance_grows_with_success_and_collapses_when_the_order_ends() -> None:
    job = Job(rate=0)
    files = list(job.files(TRAIN))
    reach = []
    for start in range(0, 1024, 64):
        job.open(files[start : start + 64])
        reach.append(job.foresight.report(counts_opens=True).streams[0].ahead)
    assert reach[:8] == [0, 64, 128, 256, 512, 1024, 1024, 1024]
    # The order continues at another place.
    job.open(files[3000:3064])
    assert job.foresight.report(counts_opens=True).streams[0].ahead == 64
    job.open(files[3064:])
    assert job.foresight.report(counts_opens=True).streams[0].ahead < 64, "it ends"


def test_a_strided_order_leaves_the_files_of_other_nodes_alone() -> None:
    job = Job(rate=64)
    mine = list(job.files(TRAIN))[3::4]
    assert job.open(mine) >= 0.75 * len(mine)
    assert job.patterns == {"2": "strided"}
    assert set(job.given) <= set(mine)


def test_the_second_epoch_of_a_fixed_order_is_foreseen() -> None:
    job = Job(rate=0)
    order = random.Random(4).sample(job.files(TRAIN), 4000)
    job.open(order)
    job.open(order[:256])
    assert job.patterns == {"2": "same order"}
    job.copies |= set(order[::2])
    given = job.foresight.next(1000)
    assert set(given) <= set(order[257::2]), "files without a copy are given again"
    assert set(order[301:340:2]) <= set(given)
    assert job.foresight.next(1000) == [], "once an epoch"
    assert all(map(job.foresight.is_recognised, given))
    job.open(order[256:400])
    assert not any(map(job.foresight.is_recognised, order[256:400]))


def test_a_fixed_order_of_half_the_files_is_followed_into_the_new_ones() -> None:
    """Files that were not read in the last epoch are not in its order."""
    job = Job(rate=8, is_filled=False)
    order = random.Random(4).sample(job.files(TRAIN), 2000)
    job.open(order)
    job.open(order)
    assert job.patterns == {"2": "same order"}
    assert job.foresight.report(counts_opens=True).streams[0].epoch == 2


def test_training_and_validation_are_streams_of_their_own() -> None:
    job = Job(rate=0)
    val = list(job.files(VAL))
    for epoch in range(3):
        job.open(shuffled(job.files(TRAIN), epoch))
        job.open(val)
    assert job.patterns == {"2": "shuffled", "3": "same order"}
    assert [stream.epoch for stream in job.foresight.report(counts_opens=True).streams] == [3, 3]


def test_two_jobs_are_recognised_apart_though_their_opens_alternate() -> None:
    job = Job(rate=0)
    mine, others = list(job.files(TRAIN)), shuffled(job.files(TRAIN), 5)
    for ino, other in zip(mine[:600], others[:600], strict=True):
        job.open([ino], JOB)
        job.open([other], OTHER_JOB)
    assert [stream.pattern for stream in job.foresight.report(counts_opens=True).streams] == [
        "shuffled",
        "sequential",
    ]


def test_a_file_is_expected_again_by_another_job_that_has_not_opened_it() -> None:
    job = Job(is_filled=False)
    order, other = shuffled(job.files(TRAIN), 1), shuffled(job.files(TRAIN), 2)

    def expected(inos: list[int], by: int = JOB) -> list[bool]:
        return [job.foresight.is_expected_again(Ino(ino), by) for ino in inos]

    job.open(order[:1])
    assert not any(expected(order)), "there is no other job"
    job.open(other[:1], OTHER_JOB)
    assert all(expected(order)), "nothing else is known of a new job"
    job.open(order[1:500])
    job.open(other[1:500], OTHER_JOB)
    opened = set(other[:500])
    assert expected(order) == [ino not in opened for ino in order]
    assert expected(other[:500], by=OTHER_JOB) == [ino not in order[:500] for ino in other[:500]]
    assert not any(expected(list(job.files(VAL)))), "no job reads these"
    # The next epoch of the other job.
    job.open(other[500:], OTHER_JOB)
    assert all(expected(order))
    job.open(order[500:600])
    job.open(other[:10], OTHER_JOB)
    assert expected(other[:20]) == 10 * [False] + 10 * [True]
    job.open(4 * list(job.files(VAL)))
    assert sum(expected(order)) == len(order) - 10
    job.open(2 * list(job.files(VAL)))
    assert not any(expected(order)), "the other job has paused"
    job.foresight.end_jobs({OTHER_JOB})
    assert not any(expected(order))


def test_opens_by_workers_that_have_ended_belong_to_the_job_that_reads_the_directory() -> None:
    """A loader starts its workers for each epoch, and the last opens are counted after their end.
    With two jobs it is not known which one has opened the files."""
    for jobs in ([JOB], [JOB, OTHER_JOB]):
        job = Job(rate=0)
        for epoch in range(3):
            order = shuffled(job.files(TRAIN), epoch)
            for reader in jobs:
                job.open(order[:3800], reader)
            job.open(order[3800:], 0)
        streams = job.foresight.report(counts_opens=True).streams
        found = [(stream.epoch, round(stream.share or 0, 2)) for stream in streams]
        if len(jobs) == 1:
            assert found == [(3, 1.0)]
        else:
            assert len(found) == 3


def test_unknown_processes_end_without_the_jobs_that_are_known() -> None:
    job = Job(rate=0)
    for reader, directory in ((0, TRAIN), (JOB, VAL)):
        job.open(shuffled(job.files(directory), 1), reader)
    job.foresight.end_jobs(set())
    assert set(job.patterns) == {"2", "3"}
    for _ in range(2):
        job.foresight.end_jobs(set(), with_unknown=True)
    assert set(job.patterns) == {"3"}


def test_a_job_may_have_given_way_to_others_when_it_is_found_to_have_ended() -> None:
    job = Job(rate=0)
    job.open(shuffled(job.files(TRAIN), 1))
    known = list(job.foresight.jobs)
    for other in range(1000, 1100):
        job.open(job.files(VAL)[:1], other)
    job.foresight.end_jobs(known)
    assert known == [JOB] and job.patterns == {}


def test_a_job_that_has_ended_leaves_nothing_to_the_job_that_follows() -> None:
    """A job that is killed and starts again is another one, and its order is recognised."""
    job = Job(rate=0)
    order = random.Random(4).sample(job.files(TRAIN), 4000)
    for seed in range(2):
        # The second time a session of the same number has begun.
        job.open(shuffled(job.files(TRAIN), seed)[:3000])
        assert job.patterns == {"2": "shuffled"}
        job.foresight.end_jobs({JOB})
        assert job.patterns == {} and job.foresight.next(100) == []
    job.open(order, OTHER_JOB)
    job.open(order[:256], OTHER_JOB)
    assert job.patterns == {"2": "same order"}


def test_epochs_are_unknown_if_the_kernel_does_not_send_all_opens() -> None:
    job = Job(rate=0)
    job.open(shuffled(job.files(TRAIN), 1))
    (stream,) = job.foresight.report(counts_opens=False).streams
    assert (stream.pattern, stream.epoch, stream.share) == ("shuffled", None, None)


@pytest.mark.promise(182)
@pytest.mark.parametrize("share", [0.25, 0.34, 0.5, 0.8, 0.94, 0.98, 1.0])
@pytest.mark.parametrize("lot", [0, 700])
def test_the_number_of_an_epoch_is_right_or_unknown(share: float, lot: int) -> None:
    """Each epoch reads another share of the files, as of one of several nodes, or of a job that
    limits its batches."""
    job, numbers = Job(rate=0, is_filled=False), []
    for epoch in range(6):
        opens = shuffled(job.files(TRAIN), epoch)[: int(share * 4000)]
        if lot:
            for start in range(0, len(opens), lot):
                job.foresight.opened_all(array("I", opens[start : start + lot]))
        else:
            job.open(opens)
        (stream,) = job.foresight.report(counts_opens=True).streams
        assert stream.pattern == "shuffled"
        assert stream.epoch in (epoch + 1, None)
        assert stream.is_mixed == (stream.epoch is None) == (stream.share is None)
        numbers.append(stream.epoch)
    assert numbers[0] == 1
    if share == 1:
        assert None not in numbers
    elif share <= 0.5:
        assert numbers[1:] == [None] * 5


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("files", [300, 1000])
def test_each_epoch_of_a_small_directory_is_counted_whole(files: int, together: bool) -> None:
    """The last files of an epoch may be the first ones of the next."""
    for seed in range(5):
        job = Job(rate=0, tree=Tree((1, files)))
        for epoch in range(1, 5):
            order = random.Random(9 * seed + epoch).sample(job.files(0), files)
            if together:
                job.foresight.opened_all(array("I", order))
            else:
                job.open(order)
            (stream,) = job.foresight.report(counts_opens=True).streams
            assert (stream.epoch, stream.share) == (epoch, 1.0)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("files", "kinds"), [(300, 1 << 15), (300, 100), (1000, 1 << 15)])
def test_each_epoch_is_counted_whole_beside_subdirectories(
    monkeypatch: pytest.MonkeyPatch, files: int, kinds: int, together: bool
) -> None:
    """They are no files, and no epoch opens them. Their number is known before the epoch ends."""
    monkeypatch.setattr(module, "_KINDS", kinds)
    for seed in range(5):
        tree = Tree((1, files))
        tree.empty = frozenset(random.Random(seed).sample(tree.files[0], files // 20))
        there = sorted(tree.empty.symmetric_difference(tree.files[0]))
        job = Job(rate=0, tree=tree)
        for epoch in range(1, 5):
            order = random.Random(9 * seed + epoch).sample(there, len(there))
            if together:
                job.foresight.opened_all(array("I", order))
            else:
                job.open(order)
            (stream,) = job.foresight.report(counts_opens=True).streams
            assert (stream.epoch, stream.share, stream.files) == (epoch, 1.0, len(there))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("files", [300, 1000])
def test_files_that_are_gone_are_none_that_an_epoch_must_open(files: int, together: bool) -> None:
    """Files are removed, or written, while a job reads the others."""
    job, rng = Job(rate=0, tree=Tree((1, files))), random.Random(files)
    there = [*job.files(0)]

    def read(inos: list[int]) -> None:
        if together:
            job.foresight.opened_all(array("I", inos))
        else:
            job.open(inos)

    for epoch in range(1, 6):
        order = rng.sample(there, len(there))
        half = len(order) // 2
        read(order[:half])
        # Some of them were opened in this epoch, and some would have been.
        gone = set(rng.sample(order, len(order) // 5))
        for ino in gone:
            job.foresight.left(Ino(ino))
            job.foresight.left(Ino(ino))
        read([ino for ino in order[half:] if ino not in gone])
        there = [ino for ino in there if ino not in gone]
        (stream,) = job.foresight.report(counts_opens=True).streams
        assert (stream.epoch, stream.share, stream.files) == (epoch, 1.0, len(there))
    back = next(ino for ino in job.files(0) if ino not in there)
    read([back])
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert (stream.share, stream.files) == (1.0, len(there) + 1), "one of them is back"


def test_files_that_were_gone_before_the_job_was_known_are_none_of_those_that_it_has_opened() -> (
    None
):
    job = Job(rate=0, tree=Tree((1, 200)))
    order = shuffled(job.files(0), 1)
    job.open(order[:20])
    for ino in order[:10]:
        job.foresight.left(Ino(ino))
    job.open(order[20:])
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert (stream.epoch, stream.share, stream.files) == (1, 1.0, 190)


def test_files_that_are_gone_are_not_given_out() -> None:
    job = Job(rate=0)
    order = shuffled(job.files(TRAIN), 1)
    job.open(order[:1000])
    gone = set(order[1000::2])
    for ino in gone:
        job.foresight.left(Ino(ino))
    while given := job.foresight.next(100):
        assert not gone & set(given)
        job.open(order[:1])


def test_a_file_that_is_gone_is_no_file_that_was_fetched_and_not_read() -> None:
    job = Job(rate=0)
    job.open(shuffled(job.files(TRAIN), 1)[:400])
    there, under_way = given = job.foresight.next(2)
    job.foresight.fetched(there, SIZE)
    assert unread(job) == (1, SIZE)
    for ino in given:
        job.foresight.left(ino)
    job.foresight.fetched(under_way, SIZE)
    assert unread(job) == (0, 0)
    allowed = len(job.foresight.next(1000))
    assert allowed == 40, "others are fetched in their place: a tenth of the files that were read"
    job.open([there])
    assert unread(job) == (0, 0)


def test_a_job_whose_files_are_all_gone_is_not_shown() -> None:
    for together in (False, True):
        job = Job(rate=0, tree=Tree((1, 100), (1, 100)))
        job.open([*job.files(0)])
        for ino in job.files(0):
            job.foresight.left(Ino(ino))
        assert job.foresight.report(counts_opens=True).streams == []
        # Opens before that may be reported late.
        for count in range(1, 100):
            opens = [*job.files(0)][:count]
            if together:
                job.foresight.opened_all(array("I", opens))
            else:
                job.open(opens)
            (stream,) = job.foresight.report(counts_opens=True).streams
            assert stream.files == count
            assert stream.share is None or stream.share <= 1.0


def test_directories_that_are_removed_and_files_of_no_snapshot_are_no_files_that_are_gone() -> None:
    tree = Tree((1, 100))
    tree.empty = frozenset(tree.files[0][90:])
    job = Job(rate=0, tree=tree)
    job.open([*tree.files[0][:90]])
    for ino in (*tree.empty, 1, 2, 10_000):
        job.foresight.left(Ino(ino))
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert (stream.share, stream.files) == (1.0, 90)


def test_files_that_were_gone_before_are_recorded_at_once(source: Path, tmp_path: Path) -> None:
    """An earlier mount may have removed millions that the source still has."""
    for number in range(1000):
        (source / f"{number:04}").touch()
        (source / f"{number:04}.d").mkdir()
    build(source, tmp_path / "snapshot")
    with Snapshot.open(tmp_path / "snapshot") as snapshot:
        inos = [Ino(ino) for ino in range(1, snapshot.entries + 1) if ino % 3]
        together, single = (Foresight(snapshot, ForesightSettings()) for _ in range(2))
        steps = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal steps
            steps += event == "call"

        sys.setprofile(count)
        try:
            together.left_before(inos)
        finally:
            sys.setprofile(None)
        for ino in inos:
            single.left(ino)
        assert together._marks.of == single._marks.of
        assert steps < len(inos)


def test_few_files_beside_many_subdirectories_have_no_stream() -> None:
    tree = Tree((1, 200))
    tree.empty = frozenset(tree.files[0][LEAST_FILES - 1 :])
    job = Job(rate=0, tree=tree)
    for _ in range(3):
        job.open([*tree.files[0][: LEAST_FILES - 1]])
    assert job.foresight.report(counts_opens=True).streams == []


@pytest.mark.parametrize("epochs", [1, 3])
def test_at_the_end_of_an_epoch_no_file_is_said_to_be_fetched_ahead(epochs: int) -> None:
    """The last window of the epoch is not complete."""
    job = Job(rate=0, tree=Tree((1, 190)))
    for _ in range(epochs):
        job.open([*job.files(0)])
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert stream.pattern in ("sequential", "same order")
    assert (stream.share, stream.ahead) == (1.0, 0)


def test_a_directory_of_which_all_files_have_copies_is_not_said_to_be_fetched_ahead() -> None:
    tree = Tree((1, 1000))
    for has_copies in (False, True):
        foresight = Foresight(
            tree, ForesightSettings(), have_copies=lambda files, all_of=has_copies: all_of
        )
        for ino in tree.files[0][:500]:
            foresight.opened(Ino(ino), JOB)
        (stream,) = foresight.report(counts_opens=True).streams
        assert (stream.pattern, stream.ahead > 0) == ("sequential", not has_copies)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_an_epoch_is_known_as_long_as_each_file_comes_once(noise: float) -> None:
    """The other files become unknown within the second epoch, and stay so."""
    rng, job = random.Random(1), Job(rate=0, is_filled=False)
    files = job.files(TRAIN)
    job.open(with_noise(shuffled(files, 0)[:2000], noise, files, rng))
    assert [each.epoch for each in job.foresight.report(counts_opens=True).streams] == [1]
    job.open(with_noise(shuffled(files, 7)[:1400], noise, files, rng))
    assert [each.epoch for each in job.foresight.report(counts_opens=True).streams] == [None]
    for epoch in range(3):
        job.open(shuffled(files, epoch))
        assert [each.epoch for each in job.foresight.report(counts_opens=True).streams] == [None]


def test_draws_with_replacement_have_no_epochs() -> None:
    job, rng = Job(rate=0, is_filled=False), random.Random(2)
    job.open(rng.choices(job.files(TRAIN), k=8000))
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert (stream.pattern, stream.epoch, stream.is_mixed) == ("shuffled", None, True)


def test_each_job_gets_its_share_of_what_is_asked_for() -> None:
    job = Job(rate=0)
    job.open(list(job.files(TRAIN))[:512], JOB)
    job.open(list(job.files(VAL))[:512], OTHER_JOB)
    given = set(job.foresight.next(64))
    assert len(given & set(job.files(TRAIN))) == len(given & set(job.files(VAL))) == 32


@pytest.mark.parametrize("kind", ["ahead", "fill"])
def test_each_action_can_be_switched_off(kind: str) -> None:
    job = Job(rate=64, is_ahead=kind != "ahead", is_filled=kind != "fill")
    order = list(job.files(TRAIN)) if kind == "ahead" else shuffled(job.files(TRAIN), 6)
    job.open(order)
    assert job.given == []
    assert job.patterns == {"2": "sequential" if kind == "ahead" else "shuffled"}


def test_files_that_come_again_and_again_are_skewed_and_not_filled() -> None:
    job = Job()
    rng = random.Random(8)
    files = job.files(TRAIN)
    job.open([files[int(len(files) * rng.random() ** 6)] for _ in range(8000)])
    assert job.given == []
    assert job.patterns == {"2": "skewed"}
    # Afterwards all files are read once an epoch.
    for epoch in range(5):
        job.open(shuffled(job.files(TRAIN), epoch))
    assert job.patterns == {"2": "shuffled"}


@pytest.mark.parametrize("lot", [16, 64, 500, 2000])
def test_a_skewed_order_is_recognised_and_counted_in_lots_as_one_by_one(lot: int) -> None:
    """Its opens decide which files are admitted, those of the lot in which it is recognised, too.
    Only the last windows of a long lot are tested."""
    rng, jobs = random.Random(lot), [Job(rate=0), Job(rate=0)]
    files = jobs[0].files(TRAIN)[:1000]
    counted: list[list[int]] = [[], []]
    for job, inos in zip(jobs, counted, strict=True):
        job.foresight.on_skewed(inos.append)
        job.open([*files])
    opens = [files[int(len(files) * rng.random() ** 6)] for _ in range(20_000)]
    for start in range(0, len(opens), lot):
        jobs[0].foresight.opened_all(array("I", opens[start : start + lot]), JOB)
    jobs[1].open(opens)
    assert [job.patterns for job in jobs] == [{"2": "skewed"}] * 2
    together, single = counted
    assert together == opens[-len(together) :] and single == opens[-len(single) :]
    assert len(together) > len(single) - 2 * lot


def test_a_second_open_of_a_file_for_one_sample_is_not_a_repetition() -> None:
    job = Job(rate=0)
    job.open([ino for ino in shuffled(job.files(TRAIN), 9)[:640] for _ in range(2)])
    assert job.patterns == {"2": "shuffled"}


def test_noise_of_other_programs_changes_nothing() -> None:
    job = Job(rate=0)
    rng = random.Random(10)
    everything = range(2, job.tree.entries)
    job.open(with_noise(shuffled(job.files(TRAIN), 10), 0.05, everything, rng))
    assert job.patterns["2"] == "shuffled"


def test_a_sequential_job_reads_several_directories_as_one_stream() -> None:
    job = Job(tree=Tree((20, 400), (2, 40)))
    order = list(job.files(TRAIN))
    hits = job.open(order)
    assert job.patterns == {"2": "sequential"}
    assert hits >= 0.8 * len(order)


def test_hundreds_of_jobs_and_directories_use_bounded_memory() -> None:
    job = Job(rate=0, tree=Tree(*[(1, 100)] * 80))
    for number, files in enumerate(job.tree.files):
        job.open(list(files), number)
    assert len(job.foresight.report(counts_opens=True).streams) <= 16


@pytest.mark.fault("S9")
@pytest.mark.parametrize("name", [b"\xff" * 255, "\U0001d11e".encode() * 63])
def test_long_names_of_directories_leave_room_in_the_answer_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """The names are those of any user who may write at the source."""
    job = Job(rate=0, tree=Tree(*[(1, LEAST_FILES)] * 4))
    monkeypatch.setattr(job.tree, "path", lambda ino: b"/".join([name] * 16) + b"/%d" % ino)
    for number in range(1, 65):
        for files in job.tree.files:
            job.open(list(files), number)
    report = job.foresight.report(counts_opens=True)
    assert len(report.streams) == 256
    assert len(encode({"result": asdict(report)})) < 0.9 * MAX_LINE_BYTES
    assert {stream.directory[:3] for stream in report.streams} == {"..."}
    assert {stream.directory.rpartition("/")[2] for stream in report.streams} == set("6789")


def test_files_that_are_no_part_of_the_snapshot_are_ignored() -> None:
    job = Job()
    job.open([1 << 32, (1 << 32) + 5] * 100)
    assert job.patterns == {}
    assert job.woken == 0


def test_a_file_that_cannot_be_fetched_is_not_counted_as_unread() -> None:
    job = Job(rate=0)
    job.open(list(job.files(TRAIN))[:256])
    for ino in job.foresight.next(10):
        job.foresight.refused(ino)
    assert job.foresight.report(counts_opens=True).unread_files == 0


def test_a_file_that_is_opened_while_it_is_fetched_is_not_unread() -> None:
    job = Job(rate=0)
    job.open(list(job.files(TRAIN))[:256])
    (ino,) = job.foresight.next(1)
    job.open([ino])
    job.foresight.fetched(ino, SIZE)
    report = job.foresight.report(counts_opens=True)
    assert (report.fetched_files, report.unread_files, report.unread_bytes) == (1, 0, 0)


@pytest.mark.promise(182)
def test_files_of_an_announced_order_are_not_opened_until_they_are() -> None:
    """They are in no directory that a job reads."""
    job = Job(rate=0)
    files = list(job.files(VAL))[:100]
    announcer = Announcer(uid=1000, pid=7, started=1)
    job.foresight.announced.begin(announcer, 1)
    job.foresight.announced.extend(announcer, Piece(1, 0, array("I", files)))
    for ino in job.foresight.next(100):
        job.foresight.fetched(ino, SIZE)
    assert unread(job) == (100, 100 * SIZE)
    job.open(files[:60])
    assert unread(job) == (40, 40 * SIZE)


def test_files_with_copies_are_passed_in_short_steps() -> None:
    job = Job(rate=0)
    files = list(job.files(TRAIN))
    job.copies.update(files[:-1])
    announcer = Announcer(uid=1000, pid=7, started=1)
    job.foresight.announced.begin(announcer, 1)
    job.foresight.announced.extend(announcer, Piece(1, 0, array("I", files)))
    steps = 0
    while not (found := job.foresight.next(64)):
        steps += 1
        assert job.woken == steps, "it is asked again"
    assert found == files[-1:] and steps >= 3


@pytest.mark.promise(182)
def test_files_of_a_job_that_was_forgotten_are_unread_until_another_opens_them() -> None:
    directories = [(1, 100)] * 80
    job = Job(rate=0, tree=Tree(*directories))
    first = list(job.tree.files[0])
    job.open(first[:64])
    ahead = job.foresight.next(10)
    for ino in ahead:
        job.foresight.fetched(ino, SIZE)
    for number, files in enumerate(job.tree.files[1:], start=100):
        job.open(list(files), number)
    assert unread(job) == (10, 10 * SIZE)
    job.open([*ahead], 500)
    assert unread(job) == (0, 0)


@pytest.mark.parametrize("lot", [1, 50, 1000])
@pytest.mark.parametrize("kind", ["shuffled", "same order", "in order"])
def test_opens_that_are_recorded_together_are_recognised(kind: str, lot: int) -> None:
    """Only the last windows of many opens are tested, but epochs are counted one by one."""
    job = Job(is_ahead=False, is_filled=False)
    files = job.files(TRAIN)
    opens: list[Ino] = []
    for epoch in range(4):
        seed = 1 if kind == "same order" else epoch
        opens += map(Ino, files if kind == "in order" else shuffled(files, seed))
    for start in range(0, len(opens), lot):
        job.foresight.opened_all(array("I", opens[start : start + lot]))
    (stream,) = job.foresight.report(counts_opens=True).streams
    assert (stream.epoch, stream.files) == (4, len(files))
    # The first windows were opened before the stream had begun.
    assert stream.share is not None
    assert stream.share > 0.95
    assert stream.pattern == {"in order": "same order"}.get(kind, kind)


@pytest.mark.parametrize("lot", [16, 64, 500])
@pytest.mark.parametrize("processes", [[7], [7, 8], [0]])
@pytest.mark.parametrize("kind", ["shuffled", "in order"])
def test_opens_of_a_job_are_recorded_together_as_one_by_one(
    kind: str, processes: list[int], lot: int
) -> None:
    """Another job, and readers of another directory, open files before, between and after."""
    jobs = [Job(rate=0), Job(rate=0)]
    rng, files = random.Random(lot), jobs[0].files(TRAIN)
    for epoch in range(3):
        inos = [*files] if kind == "in order" else shuffled(files, epoch)
        for start in range(0, len(inos), lot):
            part = inos[start : start + lot]
            by = [rng.choice(processes) for _ in part]
            jobs[0].foresight.opened_all(array("I", part), JOB, by)
            for ino, process in zip(part, by, strict=True):
                jobs[1].foresight.opened(Ino(ino), JOB, process)
            for job in jobs:
                job.open([rng.choice(job.files(VAL))] * (start == 0), OTHER_JOB)
        together, single = (job.foresight for job in jobs)
        assert together.report(counts_opens=True) == single.report(counts_opens=True)
        assert together.is_scan(Ino(files[0])) == single.is_scan(Ino(files[0]))
        assert together.is_expected_again(Ino(files[9]), OTHER_JOB) == single.is_expected_again(
            Ino(files[9]), OTHER_JOB
        )


def test_an_open_of_a_shuffled_lot_takes_less_than_one_step() -> None:
    """In files that were read before, as all are from the second epoch on."""
    job, lot = Job(rate=0), 64
    files = job.files(TRAIN)
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal steps
        steps += event == "call"

    for epoch in range(3):
        inos = array("I", shuffled(files, epoch))
        lots = [inos[start : start + lot] for start in range(0, len(inos), lot)]
        sys.setprofile(count if epoch else None)
        try:
            for each in lots:
                job.foresight.opened_all(each, JOB, [7] * len(each))
        finally:
            sys.setprofile(None)
    opens = 2 * len(files)
    assert steps < opens


def test_few_opens_together_cost_hardly_more_than_one_by_one() -> None:
    """In the first epoch each open is recorded alone, since it precedes a decision. Counted are the
    calls of functions, also of those in C."""
    steps = [0, 0]
    for together in (False, True):
        job = Job(rate=0, is_filled=False)
        files = job.files(TRAIN)

        def count(frame: FrameType, event: str, argument: object, side: int = together) -> None:
            steps[side] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for ino in shuffled(files, 1):
                if together:
                    job.foresight.opened_all(array("I", [ino]), JOB, [7])
                else:
                    job.foresight.opened(Ino(ino), JOB, 7)
        finally:
            sys.setprofile(None)
    assert steps[1] < steps[0] + 5 * len(files)


def test_memory_grows_by_at_most_16_bytes_a_file() -> None:
    """A job reads all files of a directory in the same order, and another one begins there."""
    files = 60_000
    tree = Tree((1, files))
    orders = [array("I", random.Random(seed).sample(tree.files[0], files)) for seed in range(2)]
    tracemalloc.start()
    try:
        foresight = Foresight(tree, ForesightSettings(ahead=False, fill=False))
        for epoch in range(3):
            for start in range(0, files, 5000):
                foresight.opened_all(orders[0][start : start + 5000])
            if not epoch:
                for ino in orders[1][:1000]:
                    foresight.opened(Ino(ino), JOB)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    streams = foresight.report(counts_opens=True).streams
    assert {(stream.pattern, stream.epoch) for stream in streams} == {
        ("same order", 3),
        ("shuffled", 1),
    }
    assert held <= 16 * files + 65_536


def unread(job: Job) -> tuple[int, int]:
    """The files that were fetched ahead and not opened since, and their bytes."""
    report = job.foresight.report(counts_opens=True)
    return report.unread_files, report.unread_bytes
