"""Rights that leave the process: lent bytes end with their lease, remote writers hold pages."""

import pytest

from kvlease.errors import LeaseMoved, StaleEpoch, UsageError
from kvlease.protocols.grants import ByteLease, GrantBook, WriteGrant
from kvlease.units import Epoch, LeaseId, PageId

GRANT = WriteGrant(LeaseId(1), (PageId(3),), (Epoch(7),), "peer", 2, "region", expires_at_s=10.0)


def book() -> tuple[GrantBook, list[WriteGrant]]:
    stopped: list[WriteGrant] = []
    made = GrantBook(stopped.append)
    made.issue(GRANT)
    return made, stopped


def test_lent_bytes_cannot_be_read_after_the_lease() -> None:
    """A kept reference raises instead of reading reused pages (K049)."""
    memory, closed = bytearray(b"abcd"), []
    with ByteLease(LeaseId(1), [memoryview(memory)], lambda: closed.append(True)) as lease:
        kept = lease.regions[0]
        assert lease.nbytes == 4
    assert closed == [True]
    with pytest.raises(ValueError, match="released"):
        kept.tobytes()
    with pytest.raises(LeaseMoved):
        lease.close()


def test_an_expired_grant_still_holds_its_pages() -> None:
    """Late remote write after abort (sglang#24527): expiry refuses the writer, frees nothing."""
    grants, stopped = book()
    assert grants.expire(9.0) == []
    assert grants.expire(10.0) == [GRANT]
    with pytest.raises(StaleEpoch, match="not open"):
        grants.accept(LeaseId(1), 2, GRANT.epochs)
    assert stopped == []
    grants.stopped(LeaseId(1))
    assert stopped == [GRANT]


@pytest.mark.parametrize(("incarnation", "epoch"), [(1, 7), (3, 7), (2, 6)])
def test_a_stale_writer_is_refused(incarnation: int, epoch: int) -> None:
    """R8: peers travel with incarnations, pages with epochs (vllm#52234)."""
    grants, _ = book()
    with pytest.raises(StaleEpoch):
        grants.accept(LeaseId(1), incarnation, (Epoch(epoch),))
    assert grants.accept(LeaseId(1), 2, GRANT.epochs) is GRANT


def test_the_end_of_a_connection_ends_its_writers_only() -> None:
    """The first failing handle must not free pages under its siblings (vllm#56104)."""
    grants, stopped = book()
    assert grants.connection_ended("peer", 1) == 0
    assert grants.num_open == 1
    assert grants.connection_ended("peer", 2) == 1
    assert stopped == [GRANT]
    with pytest.raises(StaleEpoch):
        grants.stopped(LeaseId(1))


def test_a_grant_is_issued_once() -> None:
    """Two writers under one id could not be told apart."""
    grants, _ = book()
    with pytest.raises(UsageError, match="issued already"):
        grants.issue(GRANT)
