"""Breadth-first exploration of a world, the shortest way to what is wrong, and what it cost."""

import gc
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.rules.canonical import canonical
from tests.rules.guards import Guards
from tests.rules.invariants import breach, is_quiet
from tests.rules.remote import message_steps, remote_steps
from tests.rules.rulebook import Kind, Label, Rulebook, Step
from tests.rules.sequences import reader_steps, writer_steps
from tests.rules.state import Size, State, shown, start_of
from tests.rules.transfers import pool_steps, transfer_steps

MAX_STATES = 2_000_000


@dataclass
class Found:
    """What an exploration has found: ``rule`` is None where nothing is wrong."""

    size: Size
    num_states: int = 0
    num_quiet: int = 0
    depth: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rule: str | None = None
    trace: list[tuple[Label, State]] = field(default_factory=list[tuple[Label, State]])
    actions: Counter[str | int] = field(default_factory=Counter[str | int])

    def __str__(self) -> str:
        taken, kinds = self.actions.total(), len(self.actions)
        return (
            f"{self.size.name}: {self.num_states} states, {self.num_quiet} quiet, {taken} actions"
            f" of {kinds} kinds, depth {self.depth}, {self.seconds:.1f} s"
            f" ({self.cpu_seconds:.1f} s of CPU)"
        )

    def told(self) -> str:
        """Return the rule that breaks and the shortest way there, an action a line."""
        lines = [f"{self.size.name}: {self.rule}, after {len(self.trace)} actions:"]
        lines += [
            f"  {' '.join(map(str, label))}\n    {shown(state)}" for label, state in self.trace
        ]
        return "\n".join(lines)


class World:
    """One size under one set of guards."""

    def __init__(self, size: Size, guards: Guards | None = None) -> None:
        self.size = size
        self.rules = Rulebook(guards or Guards(), size.transfers)

    def start(self) -> State:
        """Return where it begins."""
        return self.canonical(start_of(self.size))

    def canonical(self, state: State) -> State:
        """Return the state that stands for all of its shape."""
        return canonical(self.size, self.rules.reader_bits[0], state)

    def steps(self, state: State) -> Iterator[Step]:
        """Everything that can happen in a state."""
        rules, size = self.rules, self.size
        for i in range(size.num_readers):
            yield from reader_steps(rules, size, state, i)
        if size.has_writer:
            yield from writer_steps(rules, size, state)
        for slot, transfer in enumerate(state.transfers):
            if transfer is not None:
                yield from transfer_steps(rules, size, state, slot)
        yield from pool_steps(rules, size, state)
        if size.has_remote:
            yield from remote_steps(rules, size, state)
            yield from message_steps(rules, state)


def explore(size: Size, guards: Guards | None = None, max_states: int = MAX_STATES) -> Found:
    """Visit every state that can be reached; stop at the first that breaks a rule.

    With no breach, every state must also be able to end by itself (R9): a quiet state must be
    reachable from it by what happens without new work and without faults.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()  # nothing here is a cycle, and the collector would walk every state again
    try:
        found = _Search(World(size, guards), max_states).run()
    finally:
        if was_enabled:
            gc.enable()
    found.seconds = time.perf_counter() - began
    found.cpu_seconds = time.process_time() - began_cpu
    return found


class _Search:
    def __init__(self, world: World, max_states: int) -> None:
        self._world = world
        self._max = max_states
        self._found = Found(world.size)
        first = world.start()
        self._states = [first]
        self._index = {first: 0}
        self._parents = array("i", [-1])
        self._ends = (array("i"), array("i"))  # progress from, to

    def run(self) -> Found:
        found, states = self._found, self._states
        at, level_end = 0, 1
        while at < len(states):
            if at == level_end:
                found.depth, level_end = found.depth + 1, len(states)
            found.rule = self._expand(at)
            if found.rule is not None:
                found.trace = self._trace(len(states) - 1)
                break
            at += 1
        found.num_states = len(states)
        if found.rule is None:
            self._check_ends()
        return found

    def _expand(self, at: int) -> str | None:
        """Add what follows a state; return the rule that a new state breaks, if one does."""
        world, index, states = self._world, self._index, self._states
        actions, (sources, targets) = self._found.actions, self._ends
        for label, kind, after in world.steps(states[at]):
            actions[label[0]] += 1
            known = index.get(after)
            if known is None:
                state = world.canonical(after)
                known = index.setdefault(state, len(states))
                if known == len(states):
                    rule = self._enter(state, at)
                    if rule is not None:
                        return rule
            if kind is Kind.PROGRESS:
                sources.append(at)
                targets.append(known)
        return None

    def _enter(self, state: State, parent: int) -> str | None:
        """Keep a new state; return the rule that it breaks, if it does."""
        self._states.append(state)
        self._parents.append(parent)
        if len(self._states) > self._max:
            raise AssertionError(f"{self._world.size.name} has over {self._max} states")
        return breach(self._world.size, state)

    def _trace(self, at: int) -> list[tuple[Label, State]]:
        way: list[int] = []
        while at >= 0:
            way.append(at)
            at = self._parents[at]
        way.reverse()
        trace: list[tuple[Label, State]] = []
        for before, after in pairwise(way):
            state = self._states[after]
            label = next(
                label
                for label, _, step in self._world.steps(self._states[before])
                if self._world.canonical(step) == state
            )
            trace.append((label, state))
        return trace

    def _check_ends(self) -> None:
        """Walk back from the quiet states; what is not met cannot end by itself (R9)."""
        states, (sources, targets) = self._states, self._ends
        before: list[list[int] | None] = [None] * len(states)
        for source, target in zip(sources, targets, strict=True):
            mine = before[target]
            if mine is None:
                before[target] = [source]
            else:
                mine.append(source)
        can_end = bytearray(len(states))
        todo = [at for at, state in enumerate(states) if is_quiet(state)]
        self._found.num_quiet = len(todo)
        for at in todo:
            can_end[at] = 1
        while todo:
            for source in before[todo.pop()] or ():
                if not can_end[source]:
                    can_end[source] = 1
                    todo.append(source)
        stuck = can_end.find(0)
        if stuck >= 0:
            self._found.rule = "R9: nothing that happens by itself leads to an end"
            self._found.trace = self._trace(stuck)
