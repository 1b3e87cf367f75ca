"""Seeing on the host that devices have passed points: one thread for all streams of an engine.

Asking never waits; what costs is waking up to ask. The thread sleeps until shortly before a point
is due, as told by the ones before it, and then watches closely, all within a share of one core.
This module does not know what the work between the points is, nor whose device it is.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, final

import trio

from kvlease.errors import DeadlineExceeded, InternalError, UsageError
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.cuda_alarm import Alarm
from kvlease.runtime.cuda_pace import Oversleep, Pace
from kvlease.runtime.cuda_spin import fine_timers

Passed = Callable[[BaseException | None], None]
"""Called once on the waiter's thread: the device has passed a point, or has failed before it."""

SHARE = 0.05
"""Of a core, for looking; beyond it nothing is watched closely."""
SAVED_S = 5e-3
"""How much of the waiter's budget is kept for later."""
SHORT_S = 250e-6
"""Sleeps shorter than this are not ended by new points: being woken costs more than it gains."""
SHORT_LATE_S = 20e-6
LONG_LATE_S = 300e-6
"""By how much a sleep is shortened at most. Processors of an idle machine sleep deeply: the longer
one slept the later it wakes (7 us for short sleeps, 30 to 200 us after 2 ms)."""
NAP_S = 5e-6
"""A sleep shorter than this costs more than it saves."""
THRIFT_S = 30e-6
"""Between looks at a point that is due, at least, where the budget for watching it is spent."""
POINT_S = 60e-6
"""What the budget gains with each point that was passed: that much is spent on telling of it."""
AT_ONCE = 8
"""Points of one stream that are told of before the others get their turn: telling takes time."""
_SLEEP_S = 5e-6

Spin = Callable[["DeviceEvent"], None]
"""Waits a moment for an event, some tens of microseconds at most, and returns sooner if it may."""


class DeviceEvent(Protocol):
    """What a device offers to mark a place in a stream; ``torch.cuda.Event`` is one.

    ``record`` and ``wait`` mean the current stream of the calling thread.
    """

    def record(self) -> None:
        """Mark the place behind all that the stream was given."""
        ...

    def wait(self) -> None:
        """Make the stream wait for the marked place; the caller does not wait."""
        ...

    def query(self) -> bool:
        """Whether the place was passed; raises what the device failed with."""
        ...


@final
class Point:
    """A recorded place in a stream's order; implements the `DevicePoint` port.

    Its event goes back to the waiter's stock when it was passed: events are reused.
    """

    __slots__ = ("_event", "_lock", "_passed", "hurry", "recorded_at")

    def __init__(self, event: DeviceEvent, passed: Passed, *, hurry: bool) -> None:
        """Take a recorded event; ``hurry`` is whether somebody waits for it on the host."""
        self._event: DeviceEvent | None = event
        self._lock = threading.Lock()
        self._passed: Passed | None = passed
        self.hurry = hurry
        self.recorded_at = time.perf_counter()

    def hold(self) -> None:
        """Hold the calling worker's device stream until the device has passed this place."""
        # Under the lock, so that an event is not in use for another point by then.
        with self._lock:
            if self._event is not None:
                self._event.wait()

    def was_passed(self) -> bool:
        """Ask the device; raises what it failed with."""
        return self._event is None or self._event.query()

    def spin(self, spin: Spin) -> None:
        """Watch it closely for a moment; on the waiter's thread."""
        if self._event is not None:
            spin(self._event)

    def end(self, error: BaseException | None) -> DeviceEvent | None:
        """Tell once that it was passed, or why not; return the event if it can be used again.

        What waits for it is told first: then nobody asks the event any more.
        """
        with self._lock:
            passed, self._passed = self._passed, None
        if passed is not None:
            passed(error)
        with self._lock:
            event, self._event = self._event, None
        return None if error is not None else event


def _short_sleep(_event: DeviceEvent) -> None:
    time.sleep(_SLEEP_S)


@final
class Lane:
    """The points of one stream that were not seen passed yet; they are passed in order."""

    def __init__(self, waiter: CudaWaiter, share: float) -> None:
        """Made by the waiter."""
        self._waiter = waiter
        self.points: deque[Point] = deque()
        self.pace = Pace(share)
        self.num_watched = 0
        self.num_taken = 0

    def take_new(self) -> None:
        """Note points that were watched since the last look; on the waiter's thread."""
        num_new = self.num_watched - self.num_taken
        if self.points and len(self.points) <= num_new:
            self.pace.began(self.points[0].recorded_at)  # the stream had none to pass before it
        self.num_taken += num_new

    def next_look(self, now: float) -> tuple[float, Point | None]:
        """Return how long to sleep before the next look, and the point that somebody waits for."""
        if not self.points:
            return math.inf, None
        # By number: the stream's worker may append meanwhile, which ends an iteration.
        for ahead in range(len(self.points)):
            point = self.points[ahead]
            if point.hurry:
                return self.pace.next_look_s(now, ahead), point
        return self.pace.rare_look_s(), None

    def record(self, passed: Passed, *, hurry: bool) -> Point:
        """Mark the place behind all that the calling worker's stream was given.

        Tell readers of the point before `watch` is called: what waits may end from then on.
        Raises what the device failed with.
        """
        event = self._waiter.take_event()
        event.record()
        return Point(event, passed, hurry=hurry)

    def watch(self, point: Point) -> None:
        """See to it that the point is told of; in the order of recording. Never waits."""
        self.points.append(point)
        self.num_watched += 1
        in_s = self.pace.rare_look_s()
        if point.hurry:
            in_s = self.pace.first_look_s if len(self.points) == 1 else 0.0
        self._waiter.expect(point, in_s)


@final
class CudaWaiter:
    """Looks for passed points on a thread that lives as long as `run`.

    Ownership: the task in `run` owns the thread. Streams record and watch on their workers and must
    have ended before the waiter does.
    """

    def __init__(
        self,
        new_event: Callable[[], DeviceEvent],
        *,
        spin: Spin = _short_sleep,
        share: float = SHARE,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Prepare it; no thread before `run`. ``share`` is of one core, for looking."""
        self._new_event = new_event
        self._spin = spin
        self._share = share
        self._close_timeout_s = close_timeout_s
        self._events: deque[DeviceEvent] = deque()
        self._lanes: list[Lane] = []
        self._alarm = Alarm()
        self._short, self._long = Oversleep(SHORT_LATE_S), Oversleep(LONG_LATE_S)
        self._failure: BaseException | None = None
        self._budget_s = SAVED_S
        self._clocks = (0.0, 0.0)
        self._thread: threading.Thread | None = None
        self._closing = CpuCompletion("closing of the device waiter")
        self._ended = CpuCompletion("thread of the device waiter")
        self._ended.set_recorded()

    def lane(self) -> Lane:
        """Return a place for one more stream; before `run`."""
        lane = Lane(self, self._share)
        self._lanes.append(lane)
        return lane

    def take_event(self) -> DeviceEvent:
        """Return an event that nobody uses, made only if there is none."""
        try:
            return self._events.pop()
        except IndexError:
            return self._new_event()

    def expect(self, point: Point, in_s: float) -> None:
        """Have the thread look for a new point so long after it was recorded, if it sleeps then."""
        if self._failure is not None:
            point.end(self._failure)
            return
        early_s = in_s - self._long.late_s
        self._alarm.bring_forward(0.0 if early_s < SHORT_S else point.recorded_at + early_s)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the thread until `close`; start it with ``await nursery.start(waiter.run)``.

        Checkpoints: always. Not cancelled before `close`: streams that are, still need it. Then
        points that are left are told of as they are passed, for at most ``close_timeout_s``. Raises
        InternalError if the thread crashed, DeadlineExceeded if points are left even then.
        """
        if self._thread is not None:
            raise UsageError("a device waiter runs once; open a new one")
        # Under cancellation a start ends only with its task, which would wait for a closing that
        # whoever starts it does not come to.
        await trio.lowlevel.checkpoint_if_cancelled()
        self._thread = threading.Thread(target=self._work, name="kvlease-waiter", daemon=True)
        self._thread.start()
        task_status.started()
        with trio.CancelScope(shield=True):
            await self._closing.wait_final()
            with trio.move_on_after(self._close_timeout_s):
                await self._ended.wait_final()
        if not self._ended.state.is_final:
            raise DeadlineExceeded(
                f"the device has not passed all points {self._close_timeout_s:g} s after its"
                " waiter was closed; the thread is left behind"
            )
        self._thread.join(self._close_timeout_s)
        if self._failure is not None:
            raise InternalError("the device waiter crashed") from self._failure

    def close(self) -> None:
        """End once all points were passed; call it after the streams have ended. Never waits."""
        self._closing.revoke()
        self._alarm.bring_forward(0.0)

    def _work(self) -> None:
        try:
            fine_timers()
            while True:
                pause, point = self._look()
                if pause == math.inf and self._closing.state.is_final:
                    break
                self._wait(pause, point)
        except BaseException as error:
            self._failure = error
            self._fail_all(error)
            self._closing.revoke()
        self._ended.finish()

    def _fail_all(self, error: BaseException) -> None:
        """Leave nobody waiting for a thread that has gone."""
        for lane in self._lanes:
            while lane.points:
                lane.points.popleft().end(error)

    def _look(self) -> tuple[float, Point | None]:
        """Tell of points that were passed; say how long to sleep, and what is due first.

        0 seconds and no point is to look again: there was more to tell than in one go.
        """
        soonest, due = math.inf, None
        for lane in self._lanes:
            if lane.num_taken != lane.num_watched:
                lane.take_new()
            if not lane.points:
                continue
            if self._look_at(lane) == AT_ONCE:
                soonest, due = 0.0, None
                continue
            pause, point = lane.next_look(time.perf_counter())
            if pause < soonest:
                soonest, due = pause, point
        return soonest, due

    def _look_at(self, lane: Lane) -> int:
        points = lane.points
        num_passed = 0
        error: BaseException | None = None
        while points and error is None and num_passed < AT_ONCE:
            try:
                if not points[0].was_passed():
                    break
            except Exception as failure:
                error = failure
            self._end(points.popleft(), error)
            num_passed += 1
        lane.pace.looked(time.perf_counter(), num_passed)
        self._budget_s += POINT_S * num_passed
        return num_passed

    def _end(self, point: Point, error: BaseException | None) -> None:
        event = point.end(error)
        if event is not None:
            self._events.append(event)

    def _has_budget(self) -> bool:
        """Whether watching closely is still within the waiter's share of a core."""
        now, used = time.perf_counter(), time.thread_time()
        wall_before, used_before = self._clocks
        earned = (now - wall_before) * self._share - (used - used_before)
        self._budget_s = min(SAVED_S, self._budget_s + earned)
        self._clocks = now, used
        return self._budget_s > 0

    def _wait(self, pause: float, due: Point | None) -> None:
        """Let so much time pass before the next look; none is to watch the point that is due."""
        if pause >= SHORT_S + self._long.late_s:
            self._sleep(time.perf_counter() + pause)
        elif due is None:
            return  # there is more to tell at once
        elif not self._has_budget():
            self._nap(time.perf_counter() + min(max(3 * pause, THRIFT_S), SHORT_S))
        elif not pause or not self._nap(time.perf_counter() + pause):
            due.spin(self._spin)

    def _nap(self, until: float) -> bool:
        """Sleep until then, whatever happens; False if that is too soon to sleep."""
        wakes = until - self._short.late_s
        pause = wakes - time.perf_counter()
        if pause < NAP_S:
            return False
        time.sleep(pause)
        self._short.ended(time.perf_counter() - wakes)
        return True

    def _sleep(self, until: float) -> None:
        """Sleep until shortly before then, or until a new point needs it earlier."""
        alarm = self._alarm
        alarm.set(until - self._long.late_s)
        # What is new is shown before the alarm is brought forward.
        is_news = any(lane.num_taken != lane.num_watched for lane in self._lanes)
        if not is_news and not (until == math.inf and self._closing.state.is_final):
            at = alarm.wait()
            if at:
                self._long.ended(time.perf_counter() - at)
        alarm.unset()
