"""The queue of copies, without an engine: its order, the memory that it holds, and its end."""

from __future__ import annotations

from monarch.placement.controller import Controller
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Item
from monarch.placement.residency import Residency
from monarch.transfer.queue import Buffer, Flight, Flights
from monarch.types import Identity, Ino

IDENTITY = Identity(10, 0, 0, 0)


def queue() -> tuple[Flights, Controller, Ledger, Buffer]:
    ledger, buffer = Ledger([100, 100]), Buffer(50)
    controller = Controller(Residency(10), ledger, FirstCome())
    return Flights([1, 2], controller, buffer, _ignore), controller, ledger, buffer


def _ignore(ino: Ino) -> None:
    """No datapath keeps bytes."""


def flight(controller: Controller, number: int, content: bytes | None = None) -> Flight:
    promote = controller.warm(Item(Ino(number), 10, Ino(number)))
    assert promote is not None
    return Flight(promote, IDENTITY, content)


def test_copies_queued_for_a_tier_out_of_service_are_cancelled_and_their_bytes_are_freed() -> None:
    flights, controller, ledger, buffer = queue()
    for number in range(1, 4):
        flights.put(flight(controller, number, bytes(10)))
    flights.put(flight(controller, 4))
    assert (len(flights), flights.waiting, flights.waiting_copies) == (4, 4, 1)
    assert buffer.used == 30
    assert buffer.has_room(20)
    assert not buffer.has_room(21)
    flights.give_up_waiting(1)
    assert (len(flights), flights.waiting, buffer.used) == (0, 0, 0)
    assert ledger.reserved(1) == 0


def test_a_copy_in_progress_to_a_tier_that_hangs_keeps_its_bytes() -> None:
    flights, controller, ledger, buffer = queue()
    flights.put(flight(controller, 1, bytes(10)))
    (under_way,) = flights.contents[1].take()
    assert flights.abandon(2) == 0
    assert flights.abandon(1) == 1
    assert under_way.is_abandoned
    assert flights.get(Ino(1)) is None
    # A worker still has them: they are free when it is done.
    assert buffer.used == 10
    assert ledger.reserved(1) == 0
    flights.free(under_way)
    assert buffer.used == 0


def test_a_batch_takes_one_at_least_and_keeps_to_its_bytes() -> None:
    flights, controller, _, _ = queue()
    for number in range(1, 4):
        flights.put(flight(controller, number, bytes(10)))
    line = flights.contents[1]
    assert [each.ino for each in line.take(3, most_bytes=5)] == [1]
    assert [each.ino for each in line.take(3, most_bytes=20)] == [2, 3]
