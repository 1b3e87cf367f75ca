"""What all layers of one step share: numbers, index tensors and rotation angles."""

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.models.config import V4Config
from kvlease.kernels.norms import accumulate_dtype
from kvlease.kernels.placing import place
from kvlease.kernels.rope import Rotation, inverse_frequencies, rotation
from kvlease.kernels.step_plan import StepPlan


class StepRotations:
    """Angles of a step's rows and of the groups it closes, each made once."""

    def __init__(self, config: V4Config, plan: StepPlan, wide: torch.dtype) -> None:
        """No angle is computed before it is asked for."""
        self._plan = plan
        self._frequencies = {
            False: inverse_frequencies(config.main_rope, wide, plan.device),
            True: inverse_frequencies(config.compress_rope, wide, plan.device),
        }
        self._rows: dict[bool, tuple[Rotation, Rotation]] = {}
        self._closings: dict[int, Rotation] = {}

    def rows(self, *, compressed: bool) -> tuple[Rotation, Rotation]:
        """Return the rotation of every row and its inverse."""
        if compressed not in self._rows:
            turn = rotation(self._plan.positions, self._frequencies[compressed])
            self._rows[compressed] = turn, turn.inverse()
        return self._rows[compressed]

    def closings(self, ratio: int, groups: Tensor) -> Rotation:
        """Return the rotation of the groups that close in this step, at their first positions."""
        if ratio not in self._closings:
            firsts = place(groups * ratio, self._plan.device)
            self._closings[ratio] = rotation(firsts, self._frequencies[True])
        return self._closings[ratio]


@frozen
class AttentionContext:
    """What all layers of a step share."""

    config: V4Config
    plan: StepPlan
    rotations: StepRotations
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The accumulating dtype."""
        return accumulate_dtype(self.dtype)
