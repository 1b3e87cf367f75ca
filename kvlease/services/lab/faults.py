"""Fault plans: what shall go wrong, as typed data with a seed, for files and command lines.

Faults enter through an engine's ports alone. A plan is a tuple of rules; what it says of one copy,
one message or one step depends on its seed and on which copy that is, never on what came before.
This module decides; `link`, `inbox` and `damage` do it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, TypeAlias, final

import msgspec
from attrs import define, field

from kvlease.errors import OperatingError
from kvlease.protocols.ports import CopyOrder


class InjectedFault(OperatingError):
    """Raised by a plan where something real would have raised."""


class Which(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which copies a rule is about; what is left empty fits all.

    Attributes:
        direction: loads or stores.
        source: the tier that the copy reads; loads have copies within the device too.
        layers, components: of the copy.
        transfers: which of its direction, counted from 1 in the order of their launch.
        probability: of each copy that fits.
    """

    direction: Literal["load", "store"] | None = None
    source: Literal["device", "host"] | None = None
    layers: tuple[int, ...] = ()
    components: tuple[str, ...] = ()
    transfers: tuple[int, ...] = ()
    probability: float = 1.0

    def fits(self, order: CopyOrder, nth: int) -> bool:
        """Whether the rule is about this copy, chance aside."""
        return (
            self.direction in (None, order.kind)
            and self.source in (None, order.source)
            and any(
                (not self.layers or part.layer in self.layers)
                and (not self.components or part.component in self.components)
                for part in order.parts
            )
            and (not self.transfers or nth in self.transfers)
        )


class Delay(msgspec.Struct, frozen=True, tag="delay"):
    """It takes so many seconds longer, and up to ``spread`` more, and so does all behind it."""

    seconds: float
    spread: float = 0.0


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """It never begins, and nobody says so."""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """It raises instead of moving anything."""

    message: str = "the link is down"


class Shorten(msgspec.Struct, frozen=True, tag="shorten"):
    """The last of its bytes are not moved, and it says how many were."""


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt"):
    """All bytes are moved, and then some are changed at the target."""


class Reorder(msgspec.Struct, frozen=True, tag="reorder"):
    """The copies of its group land in another order."""


class DoneEarly(msgspec.Struct, frozen=True, tag="done early"):
    """A lie: it is called done when it is launched. What nobody waits for gives way, see `link`."""


class FewerBytes(msgspec.Struct, frozen=True, tag="fewer bytes"):
    """A lie: the last of its bytes are not moved, and it says that all were."""


class NeverDone(msgspec.Struct, frozen=True, tag="never done"):
    """A lie: its bytes land, and it is never called done nor failed."""


class RecordedLate(msgspec.Struct, frozen=True, tag="recorded late"):
    """A lie: a stream's wait for its layer passes, as a wait for work not yet recorded would."""


CopyFault: TypeAlias = (
    Delay | Drop | Fail | Shorten | Corrupt | Reorder
    | DoneEarly | FewerBytes | NeverDone | RecordedLate
)  # fmt: skip


class CopyRule(msgspec.Struct, frozen=True, tag="copies"):
    """A fault of the copies that ``which`` chooses."""

    fault: CopyFault
    which: Which = Which()


class KillActor(msgspec.Struct, frozen=True, tag="kill"):
    """An actor dies once: before it takes a message, or with one in hand.

    Attributes:
        actor: loader, scheduler, prefill or decode.
        message: which of its messages, counted from 1 over all its lives.
        in_hand: die at work instead: a loader as it launches a group of copies, a worker in its
            model. Then ``message`` counts groups, or steps.
    """

    actor: str
    message: int = 1
    in_hand: bool = False


class StallMailbox(msgspec.Struct, frozen=True, tag="stall"):
    """An actor gets one of its messages so many seconds late, and all behind it too."""

    actor: str
    seconds: float
    message: int = 1


Rule: TypeAlias = CopyRule | KillActor | StallMailbox


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What shall go wrong in one run. Equal plans do the same; JSON keeps them whole."""

    seed: int = 0
    rules: tuple[Rule, ...] = ()


def gate_plan(gate: Literal["full", "kv-only", "off"], seed: int = 0) -> FaultPlan:
    """Return the plan that turns the gate off for index keys, or for all that the host sends.

    The gate itself cannot be turned off; a completion that lies makes it open too early.
    """
    if gate == "full":
        return FaultPlan(seed=seed)
    components = ("index_k",) if gate == "kv-only" else ()
    rule = CopyRule(DoneEarly(), Which(direction="load", source="host", components=components))
    return FaultPlan(seed=seed, rules=(rule,))


@define
class CopyFaults:
    """What a plan says of one copy."""

    delay_s: float = 0.0
    fail: str | None = None
    others: set[type[CopyFault]] = field(factory=set[type[CopyFault]])

    def __contains__(self, fault: type[CopyFault]) -> bool:
        """Whether this fault is among them."""
        return fault in self.others


@final
class Injector:
    """One run's reading of a plan: counts transfers, messages and steps, and looks up rules."""

    def __init__(self, plan: FaultPlan) -> None:
        """Start counting."""
        self.plan = plan
        self._transfers: dict[str, dict[int, int]] = {}
        self._counts: dict[tuple[str, bool], int] = {}
        self._used: list[KillActor] = []

    def of_copy(self, order: CopyOrder) -> CopyFaults:
        """Return what goes wrong with a copy; the same whenever it is asked."""
        seen = self._transfers.setdefault(order.kind, {})
        nth = seen.setdefault(order.transfer, len(seen) + 1)
        faults = CopyFaults()
        for number, rule in enumerate(self.plan.rules):
            if isinstance(rule, CopyRule) and rule.which.fits(order, nth):
                self._apply(rule, number, order, faults)
        return faults

    def _apply(self, rule: CopyRule, number: int, order: CopyOrder, faults: CopyFaults) -> None:
        chance, fault = rule.which.probability, rule.fault
        if chance < 1 and self._draw("whether", number, order) >= chance:
            return
        if isinstance(fault, Delay):
            more = fault.spread and fault.spread * self._draw("how long", number, order)
            faults.delay_s += fault.seconds + more
        elif isinstance(fault, Fail):
            faults.fail = fault.message
        else:
            faults.others.add(type(fault))

    def _draw(self, what: str, number: int, order: CopyOrder) -> float:
        """Draw from 0 to 1 for one copy, whatever else has been drawn."""
        name = f"{order.kind} {order.transfer} {order.layer} {order.component}"
        return random.Random(f"{self.plan.seed} {number} {what} {name}").random()

    def shuffled(self, transfer: int, layer: int, count: int) -> list[int]:
        """Return 0 .. count - 1 in another order."""
        places = list(range(count))
        random.Random(f"{self.plan.seed} {transfer} {layer}").shuffle(places)
        return places if places != sorted(places) else places[::-1]

    def is_plain(self, actor: str) -> bool:
        """Whether nothing goes wrong with an actor's next message."""
        return not any(self._due(actor, in_hand=False))

    def before_message(self, actor: str) -> float:
        """An actor asks for its next message: return how late it is; raises InjectedFault."""
        late_s = 0.0
        for rule in self._due(actor, in_hand=False):
            if isinstance(rule, StallMailbox):
                late_s += rule.seconds
            else:
                self._kill(rule)
        return late_s

    def took(self, actor: str) -> None:
        """An actor has its next message."""
        self._count(actor, in_hand=False)

    def at_work(self, actor: str) -> None:
        """An actor works on a message; raises InjectedFault where it is to die at that."""
        for rule in self._due(actor, in_hand=True):
            if isinstance(rule, KillActor):
                self._kill(rule)
        self._count(actor, in_hand=True)

    def _count(self, actor: str, *, in_hand: bool) -> None:
        self._counts[actor, in_hand] = self._counts.get((actor, in_hand), 0) + 1

    def _kill(self, rule: KillActor) -> None:
        self._used.append(rule)
        when = "with a message in hand" if rule.in_hand else "before it took its next message"
        raise InjectedFault(f"{rule.actor} was killed {when}")

    def _due(self, actor: str, *, in_hand: bool) -> Iterator[KillActor | StallMailbox]:
        """Rules about an actor's next message that have not been used up."""
        number = self._counts.get((actor, in_hand), 0) + 1
        for rule in self.plan.rules:
            if isinstance(rule, CopyRule) or (rule.actor, rule.message) != (actor, number):
                continue
            if isinstance(rule, StallMailbox):
                if not in_hand:
                    yield rule
            elif rule.in_hand is in_hand and rule not in self._used:
                yield rule
