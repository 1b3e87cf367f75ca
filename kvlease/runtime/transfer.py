"""One transfer: many copies, one completion per (layer, component), joined per layer and in all.

A transfer has two ends that are not the same. It *ends* when its bytes are true, or when it is
known that they will not be: readers go on. It *settles* when every copy that began has really
returned: only then may others touch the pages at its ends (R6). This module does not know who runs
the copies, nor what the pages are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import final

from kvlease.errors import UsageError
from kvlease.protocols.machines import CopyEvent
from kvlease.protocols.ports import Clock, CompletionState, Copier, DevicePoint
from kvlease.runtime.clock import MonotonicClock
from kvlease.runtime.completions import (
    BAD_STATES,
    FINAL_STATES,
    CompletionBase,
    CpuCompletion,
    JointCompletion,
    Problem,
    fire,
    joint_points,
)
from kvlease.runtime.transfer_plan import (
    Joint,
    LayerTiming,
    TransferObserver,
    TransferPlan,
    adjoined,
)
from kvlease.runtime.wake import Hook
from kvlease.units import LayerId


@final
class LayerCompletion(JointCompletion):
    """The joint completion of one layer's components, which tells the transfer of its steps.

    Layers that are copied in one piece share one; ``layer`` is the first of them.
    """

    __slots__ = ("is_empty", "layer", "layers", "transfer")

    def __init__(
        self,
        transfer: Transfer,
        layers: range,
        parts: tuple[CpuCompletion, ...],
        lock: threading.Lock,
    ) -> None:
        """Adopt the parts; made by the transfer."""
        self.transfer = transfer
        self.layers = layers
        self.layer = LayerId(layers[0])
        self.is_empty = self.layer in transfer.plan.empty_layers
        super().__init__(f"{transfer.name} layer {self.layer}", parts, lock)

    @property
    def run(self) -> tuple[int, int]:
        """Its layers, (first, count)."""
        return self.layer, len(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that have arrived."""
        return sum(part.copy.done_nbytes for part in self.parts)

    def _entering(self, state: CompletionState, part: CpuCompletion) -> None:
        self.transfer._layer_entering(self, state, part)

    def _entered(self, state: CompletionState, part: CpuCompletion, due: list[Hook]) -> None:
        self.transfer._layer_entered(state, part, due)


@final
class Transfer(CompletionBase):
    """A transfer in being; itself the completion of all its layers (a whole-object reader's wait).

    Implements `ownership.PendingTransfer`. Ownership: holds the plan's leases until `release`,
    which whoever runs the transfer calls once it has settled. The first copy that goes wrong ends
    the transfer: what has not arrived by then never counts; layers that are DONE stay so.
    """

    __slots__ = (
        "_clock", "_done_s", "_joints", "_observer", "_parts", "_recorded_s",
        "_released", "_running", "_settled", "_told", "_unfinished", "_unrecorded",
        "observer_error", "plan", "planned_at",
    )  # fmt: skip

    def __init__(
        self,
        plan: TransferPlan,
        *,
        clock: Clock | None = None,
        observer: TransferObserver | None = None,
    ) -> None:
        """Plan it, on the Trio thread or without Trio.

        A plan with no copies, or with a layer that has none and is not empty by construction, is
        FAILED and settled at once (R2): nothing never passes for something.
        """
        super().__init__(plan.name)
        self.plan = plan
        self.observer_error: Exception | None = None
        self._observer = observer
        self._clock = clock or MonotonicClock()
        self.planned_at = self._clock.now()
        self._recorded_s: list[float | None] = [None] * plan.num_layers
        self._done_s: list[float | None] = [None] * plan.num_layers
        self._running = 0
        self._told = set[LayerCompletion]()  # to have been recorded, before they are
        self._released = False
        self._settled = CompletionBase(f"settling of {self.name}", self._lock)
        self._tell(lambda to: to.planned(self))
        self._parts = tuple(
            [
                CpuCompletion(f"{self.name} {order.parts.name}", order.nbytes, self._lock)
                for order in plan.copies
            ]
        )
        self._joints = [self._join(joint) for joint in plan.layout.joints]
        self._unrecorded = self._unfinished = len(self._joints)
        self._start()

    def _join(self, joint: Joint) -> LayerCompletion:
        """Make the completion of some layers that are there together."""
        parts = self._parts[joint.first : joint.stop]
        if not parts and joint.layers[0] in self.plan.empty_layers:
            # One part of no bytes, finished at the start: DONE by the machine, not by exception.
            parts = (CpuCompletion(f"{self.name} layer {joint.layers[0]}", 0, self._lock),)
        return LayerCompletion(self, joint.layers, parts, self._lock)

    def _start(self) -> None:
        unplanned = self.plan.layout.unplanned
        if unplanned or not self._parts:
            where = f"layers {list(unplanned)}" if unplanned else "any layer"
            self.fail(f"{self.name} plans no bytes for {where}, so it cannot make any true")
            return
        for each in self._joints:
            if each.is_empty:
                for part in each.parts:
                    part.set_recorded()
                    part.finish(0)

    def layer_completion(self, layer: LayerId) -> CompletionBase:
        """Return the completion of one layer, all its components together."""
        return self._joints[self.plan.layout.places[layer]]

    def parts(self, layer: int, component: str) -> tuple[CpuCompletion, ...]:
        """Return the completions of one component of one layer, in the order of their copies."""
        return tuple(
            completion
            for order, completion in zip(self.plan.copies, self._parts, strict=True)
            if any((part.layer, part.component) == (layer, component) for part in order.parts)
        )

    def missing(self, layer: int) -> list[str]:
        """Return the components of a layer that have not arrived."""
        return [
            part.component
            for order, completion in zip(self.plan.copies, self._parts, strict=True)
            for part in order.parts
            if part.layer == layer and completion.state is not CompletionState.DONE
        ]

    @property
    def is_done(self) -> bool:
        """Whether everything planned has arrived."""
        return self.state is CompletionState.DONE

    @property
    def deadline_ns(self) -> int:
        """When every byte must be true, on the clock that it was planned by."""
        return round((self.planned_at + self.plan.deadline_s) * 1e9)

    @property
    def bytes_done(self) -> int:
        """Bytes that arrived in time, over all components."""
        return sum(part.copy.done_nbytes for part in self._parts)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; negative once it has passed."""
        return self.planned_at + self.plan.deadline_s - self._clock.now()

    @property
    def is_settled(self) -> bool:
        """Whether no copy is running and none will begin."""
        return self._settled.state in FINAL_STATES

    def timings(self) -> tuple[LayerTiming, ...]:
        """Return when each layer was recorded and done."""
        both = zip(self._recorded_s, self._done_s, strict=True)
        return tuple(LayerTiming(layer, *seconds) for layer, seconds in enumerate(both))

    async def wait_settled(self) -> None:
        """Wait until every copy that began has really returned, however the transfer ended.

        Checkpoints: only if it waits; if cancelled nothing changes. Raises nothing.
        """
        await self._settled.wait_final()

    def on_settled(self, hook: Hook) -> bool:
        """Call ``hook`` once when settled, on the thread that saw it; False if it is already."""
        return self._settled.on_final(hook)

    def release(self) -> None:
        """Close the leases at both ends, exactly once; on the Trio thread.

        Raises UsageError while a copy may still touch the pages (R6).
        """
        if not self.is_settled:
            raise UsageError(f"{self.name} is still moving; await wait_settled() before release()")
        if not self._released:
            self._released = True
            for hold in reversed(self.plan.holds):
                hold.close()

    def points(self) -> tuple[DevicePoint, ...] | None:
        """Return where a device has done all layers that are not done yet."""
        return joint_points(self._joints)

    def record_layers(self, layers: Iterable[int], point: DevicePoint | None = None) -> None:
        """Say that the copies of layers are in their stream's order; a device's have a place.

        Neighbours are told as one. Parts that a worker has begun are recorded already: being run
        proves the order.
        """
        due: list[Hook] = []
        with self._lock:
            places = self.plan.layout.places
            joints = [self._joints[place] for place in dict.fromkeys([places[n] for n in layers])]
            fresh = [each for each in joints if each.state is CompletionState.PLANNED]
            for run in adjoined([each.run for each in fresh]):
                self._tell_recorded(run)
            self._told.update(fresh)
            for joint in joints:
                for part in joint.parts:
                    if part.state is CompletionState.PLANNED:
                        part._record(point, due)
        fire(due)

    def run_copy(self, index: int, copier: Copier) -> None:
        """Execute one copy of the plan on the calling stream worker; skip it if all is over.

        Never raises for the copy's sake: what goes wrong ends the transfer.
        """
        if not self.begin_copy(index):
            return
        try:
            moved: int | BaseException = copier.copy(self.plan.copies[index])
        except BaseException as error:
            moved = error
        self.end_copy(index, moved)
        if isinstance(moved, BaseException) and not isinstance(moved, Exception):
            raise moved

    def begin_copy(self, index: int, *, on_device: bool = False) -> bool:
        """Say that a copy begins now; False if all is over and it must not.

        Being run by a worker proves its place in the order; being given to a device does not yet.
        Whoever gets True calls `end_copy` once, or the transfer never settles (R6).
        """
        part = self._parts[index]
        due: list[Hook] = []
        with self._lock:
            if self.state in FINAL_STATES:
                return False
            self._running += 1
            if part.state is CompletionState.PLANNED and not on_device:
                part._record(None, due)
        fire(due)
        return True

    def fail_copy(self, index: int, error: BaseException) -> None:
        """Say at once that a copy went wrong which began and may still be moving bytes.

        The transfer ends with it, and settles only after `end_copy` (R6).
        """
        self._parts[index].fail(error)

    def end_copy(self, index: int, moved: int | BaseException) -> None:
        """Say that a copy has returned: with how many bytes, or with what went wrong."""
        part = self._parts[index]
        due: list[Hook] = []
        try:
            if isinstance(moved, BaseException):
                part.fail(moved)
            else:
                part.finish(moved)
        finally:
            with self._lock:
                self._running -= 1
                self._settle_if_over(due)
            fire(due)

    def fail(self, cause: BaseException | str, reason: str = "failed") -> bool:
        """End it FAILED; returns False if it had ended before, whichever way."""
        return self._end(CopyEvent.FAIL, Problem.of(self.name, cause, reason))

    def revoke(self, message: str | None = None) -> bool:
        """End it REVOKED; returns False if it had ended before, whichever way."""
        problem = Problem(message or f"{self.name} was revoked", "revoked")
        return self._end(CopyEvent.REVOKE, problem)

    def _end(self, event: CopyEvent, problem: Problem) -> bool:
        due: list[Hook] = []
        with self._lock:
            if self.state in FINAL_STATES:
                return False
            self._tell(lambda to: to.failed(self, problem.reason, problem.message))
            self._end_the_rest(event, problem, due)
        fire(due)
        return True

    def _end_the_rest(self, event: CopyEvent, problem: Problem, due: list[Hook]) -> None:
        revoked = event is CopyEvent.REVOKE
        self._enter(CompletionState.REVOKED if revoked else CompletionState.FAILED, due, problem)
        for layer in self._joints:
            for part in layer.parts:
                if part.state not in FINAL_STATES:
                    part._step(event, 0, problem, due)
        self._settle_if_over(due)

    def _settle_if_over(self, due: list[Hook]) -> None:
        # Once the state is final `begin_copy` lets no copy start, so none running means none ever.
        if (
            self.state in FINAL_STATES
            and not self._running
            and self._settled.state not in FINAL_STATES
        ):
            self._tell(lambda to: to.settled(self))
            self._settled._enter(CompletionState.DONE, due, None)

    def _layer_entering(
        self, layer: LayerCompletion, state: CompletionState, part: CpuCompletion
    ) -> None:
        """Tell the observer of a layer's step before a reader can see it; the lock is held."""
        if self.state in FINAL_STATES:
            return
        if state in BAD_STATES:
            problem = part.problem or Problem(f"{part.name} {state.value}", "failed")
            self._tell(lambda to: to.failed(self, problem.reason, problem.message))
        elif state is CompletionState.RECORDED:
            self._note(self._recorded_s, layer.layers)
            if not layer.is_empty and layer not in self._told:
                self._tell_recorded(layer.run)
        elif state is CompletionState.DONE:
            self._note(self._done_s, layer.layers)
            if not layer.is_empty:
                self._tell(lambda to: to.layer_done(self, layer.run, layer.nbytes))
            if self._unfinished == 1:
                self._tell(lambda to: to.done(self, self.bytes_done))

    def _note(self, times: list[float | None], layers: range) -> None:
        times[layers.start : layers.stop] = [self._clock.now() - self.planned_at] * len(layers)

    def _layer_entered(self, state: CompletionState, part: CpuCompletion, due: list[Hook]) -> None:
        """Follow a layer's step with the whole; the lock is held."""
        if self.state in FINAL_STATES:
            return
        if state in BAD_STATES:
            event = CopyEvent.FAIL if state is CompletionState.FAILED else CopyEvent.REVOKE
            problem = part.problem or Problem(f"{part.name} {state.value}", "failed")
            self._end_the_rest(event, problem, due)
        elif state is CompletionState.RECORDED:
            self._unrecorded -= 1
            if not self._unrecorded:
                self._enter(CompletionState.RECORDED, due, None)
        elif state is CompletionState.DONE:
            self._unfinished -= 1
            if not self._unfinished:
                self._enter(CompletionState.DONE, due, None)
                self._settle_if_over(due)

    def _tell_recorded(self, layers: tuple[int, int]) -> None:
        self._tell(lambda to: to.recorded(self, layers))

    def _tell(self, call: Callable[[TransferObserver], None]) -> None:
        """Tell the observer; its error must not cost the readers their wake-up, so keep it."""
        if self._observer is not None:
            try:
                call(self._observer)
            except Exception as error:
                self.observer_error = self.observer_error or error
