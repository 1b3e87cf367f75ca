"""What the lab knows of early reads by itself, apart from the log's checker."""

from array import array

import msgspec
import pytest

from kvlease.protocols.events import PageReserve
from kvlease.protocols.geometries import mla_indexer_schema
from kvlease.protocols.ownership import SequenceLease
from kvlease.runtime.transfer import Transfer
from kvlease.services.lab.truth import Truth
from kvlease.units import LeaseId, StepId
from tests.runtime.rig import order, plan

SCHEMA = mla_indexer_schema(1, 8, 4, 4, 16)


@pytest.mark.parametrize("moves_on", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_read_is_early_even_if_its_page_moves_on_before_the_bytes(
    is_told: bool, moves_on: bool
) -> None:
    """The bytes of a lie may come when the page is somebody else's; the reader never had them."""
    keys = msgspec.structs.replace(order(0, "index_k"), places=lambda: [7])
    transfer = Transfer(plan(keys))
    truth = Truth(SCHEMA)
    truth.asked(transfer, [keys])
    if is_told:
        assert transfer.begin_copy(0)
        transfer.end_copy(0, keys.nbytes)
    truth.opened(StepId(1), [SequenceLease(LeaseId(3), array("i", [7]), 1, 0)], 0)
    if moves_on:
        truth.watch(PageReserve(pages=[(7, 1, 2)], lease=9))
    truth.landed(transfer, keys, keys.nbytes)
    found = {(one.step, one.lease, one.layer, one.component) for one in truth.early}
    assert found == ({(1, 3, 0, "index_k")} if is_told else set())
