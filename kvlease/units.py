"""Names for the numbers that travel between rooms.

A page id and a layer id are both integers; giving each its own type lets the checkers refuse a
mix-up. This module knows nothing of what the numbers refer to.
"""

from typing import NewType

PageId = NewType("PageId", int)
"""A page of one tier's pool; the same number names the page in every component of that tier."""
SlotId = NewType("SlotId", int)
"""A slot of sequence state (running ring or kept tail)."""
Epoch = NewType("Epoch", int)
"""Generation number of a page or of a lease cell; grows by one whenever the right ends."""
LayerId = NewType("LayerId", int)
"""Position of a layer in its schema, counted from 0."""
RequestId = NewType("RequestId", int)
"""One call of ``generate``, counted from 1 within an engine."""
LeaseId = NewType("LeaseId", int)
"""One lease, counted from 1 within an engine."""
TransferId = NewType("TransferId", int)
"""One movement of pages between tiers, counted from 1 within an engine."""
StepId = NewType("StepId", int)
"""One forward of one batch, counted from 1 within an engine."""

NO_STEP = StepId(0)
"""What stands where no step is concerned."""
