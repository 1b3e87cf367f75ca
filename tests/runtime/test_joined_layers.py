"""Layers that an order moves in one piece share a completion, and the others keep theirs."""

import pytest

from kvlease.errors import UsageError
from kvlease.protocols.ports import CompletionState, CopyOrder, CopyPart, CopyParts
from kvlease.runtime.transfer import Transfer
from kvlease.units import LayerId, TransferId
from tests.runtime.rig import PlainCopier, Witness, order, plan
from tests.runtime.test_transfer import states

PLANNED, RECORDED = CompletionState.PLANNED, CompletionState.RECORDED
DONE, FAILED = CompletionState.DONE, CompletionState.FAILED


def joined(*layers: int, moved: int | None = None) -> CopyOrder:
    """An order of 8 bytes of ``latent`` in each of these layers."""
    parts = CopyParts(tuple(CopyPart(layer, "latent") for layer in layers))
    sizes = [8] * len(parts)
    move = sum(sizes) if moved is None else moved
    return CopyOrder(
        TransferId(1),
        "load",
        "host",
        parts,
        sum(sizes),
        lambda: move,
        lambda: sizes,
        list[int],
        list,
    )


def test_a_store_is_ready_as_a_whole() -> None:
    witness = Witness()
    transfer = Transfer(plan(joined(0, 1, 3), num_layers=4, empty=frozenset({2})), observer=witness)
    assert states(transfer) == [PLANNED] * 4
    assert transfer.missing(1) == ["latent"]
    transfer.record_layers([0])
    assert states(transfer) == [RECORDED] * 4
    transfer.run_copy(0, PlainCopier())
    assert transfer.state is DONE
    assert transfer.bytes_done == 24
    assert transfer.missing(1) == []
    assert all(timing.done_s is not None for timing in transfer.timings())
    heard = ["planned", "recorded", "layer_done", "done", "settled"]
    assert witness.names() == heard


def test_only_what_is_moved_together_waits_for_each_other() -> None:
    copies = order(0, "latent"), joined(1, 2), order(2, "index_k"), order(3, "latent")
    transfer = Transfer(plan(*copies, num_layers=4))
    transfer.run_copy(0, PlainCopier())
    transfer.run_copy(1, PlainCopier())
    assert states(transfer) == [DONE, PLANNED, PLANNED, PLANNED]
    transfer.run_copy(2, PlainCopier())
    assert states(transfer) == [DONE, DONE, DONE, PLANNED]
    assert transfer.layer_completion(LayerId(1)) is transfer.layer_completion(LayerId(2))
    assert len(transfer.parts(2, "latent")) == 1


def test_fewer_bytes_than_all_its_parts_have_fail_all_its_layers() -> None:
    transfer = Transfer(plan(joined(0, 1, moved=15), num_layers=2))
    transfer.run_copy(0, PlainCopier())
    assert states(transfer) == [FAILED, FAILED]


def test_a_layer_in_the_middle_that_nothing_moves_is_missed() -> None:
    transfer = Transfer(plan(joined(0, 2), num_layers=3))
    assert transfer.state is FAILED
    assert transfer.problem is not None
    assert "layers [1]" in transfer.problem.message


def test_parts_are_in_layer_order_and_not_in_layers_called_empty() -> None:
    with pytest.raises(UsageError, match="out of order"):
        plan(joined(1, 0), num_layers=2)
    with pytest.raises(UsageError, match="below 2"):
        plan(joined(0, 2), num_layers=2)
    with pytest.raises(UsageError, match="called empty"):
        plan(joined(0, 1), num_layers=2, empty=frozenset({1}))


def test_layers_that_are_recorded_together_are_told_as_one() -> None:
    """Each line of the log costs; what a worker has begun meanwhile was told by then."""
    told: list[tuple[int, int]] = []

    class Heard(Witness):
        def recorded(self, transfer: Transfer, layers: tuple[int, int]) -> None:
            super().recorded(transfer, layers)
            assert all(state is PLANNED for state in states(transfer)[layers[0] : sum(layers)])
            told.append(layers)

    copies = [order(layer, name) for layer in range(6) for name in ("latent", "index_k")]
    transfer = Transfer(plan(*copies, num_layers=6), observer=Heard())
    for number in (4, 5):  # layer 2, by its worker
        transfer.run_copy(number, PlainCopier())
    assert told == [(2, 1)]
    transfer.record_layers(range(5))
    assert told == [(2, 1), (0, 2), (3, 2)]
    assert states(transfer) == [RECORDED, RECORDED, DONE, RECORDED, RECORDED, PLANNED]
    transfer.record_layers(range(6))
    assert told == [(2, 1), (0, 2), (3, 2), (5, 1)]
    transfer.record_layers(range(6))
    assert len(told) == 4
