"""Valid logs written by hand, and how to plant one fault in them.

`Builder` numbers and stamps what it is given. `story` is a small valid log that uses every family
of events: two requests that share a prefix, a store, an eviction, a restore with a tail, a
quarantine, decode steps that name an earlier read, and an orderly end.
"""

from collections.abc import Callable, Iterable

import msgspec
from attrs import define, field

from kvlease.protocols import events as ev

PAGE = 16
LAYERS = 2
SPAN, TAIL = 8, 4
COMPONENTS = [
    ev.ComponentFacts(name="latent", kind="span", layers=[0, 1], nbytes=SPAN),
    ev.ComponentFacts(name="index_k", kind="span", layers=[1], nbytes=SPAN),
    ev.ComponentFacts(name="window", kind="tail", layers=[0, 1], nbytes=TAIL),
]
SPANS, TAILS = ["index_k", "latent"], ["window"]
EVERYTHING = [*SPANS, *TAILS]


def head(**changes: object) -> ev.LogOpen:
    plain: dict[str, object] = {
        "schema": ev.SCHEMA_VERSION, "program": "test", "level": "audit", "model": "toy",
        "identity": "root", "num_layers": LAYERS, "page_tokens": PAGE, "components": COMPONENTS,
        "device_pages": 16, "host_pages": 16,
    }  # fmt: skip
    return ev.LogOpen(**{**plain, **changes})  # type: ignore[arg-type]


def nbytes_of(pages: int, tails: int) -> int:
    return pages * 3 * SPAN + tails * 2 * TAIL


@define
class Builder:
    """Collects events; each is numbered by its place and a microsecond after the one before."""

    events: list[ev.Event] = field(factory=list)

    def add(self, *events: ev.Event) -> "Builder":
        for event in events:
            event.seq = len(self.events) + 1
            event.t_ns = event.seq * 1000
            event.actor = "test"
            self.events.append(event)
        return self

    @property
    def seq(self) -> int:
        return len(self.events)

    def open(self, lease: int, *pages: ev.PageRun, **more: object) -> None:
        plain: dict[str, object] = {"lease": lease, "mode": "shared", "pages": [*pages]}
        self.add(ev.LeaseOpen(**{**plain, **more}))  # type: ignore[arg-type]

    def close(self, *leases: int) -> None:
        self.add(*(ev.LeaseClose(lease=lease) for lease in leases))

    def submit(self, request: int, prompt: int = 33, output: int = 4) -> None:
        self.add(
            ev.RequestSubmitted(
                request=request, prompt_tokens=prompt, max_tokens=output, deadline_ns=10**9
            )
        )

    def admit(self, request: int, used: int = 0, **more: object) -> None:
        plain: dict[str, object] = {
            "request": request, "matched_tokens": used, "used_tokens": used,
            "hit_pages": (used // PAGE, 0, 0, 0), "reasons": {},
        }  # fmt: skip
        self.add(ev.RequestAdmitted(**{**plain, **more}))  # type: ignore[arg-type]

    def finish(self, request: int, output: int, loaded: int = 0, prompt: int = 33) -> None:
        usage = ev.Usage(prompt=prompt, hit_host=loaded, computed=prompt - loaded, output=output)
        self.add(ev.RequestFinished(request=request, reason="length", usage=usage))

    def step(
        self, number: int, *rows: ev.Row, read: int | None = None, after: int | None = None
    ) -> None:
        """A published step, with a ``step.read`` of its own unless it names an earlier one."""
        if read is None:
            after = self.seq if after is None else after
            opens = [ev.Opening(row.lease, 0, LAYERS, after) for row in rows]
            self.add(ev.StepRead(step=number, opens=opens))
        self.add(ev.StepDone(step=number, read=number if read is None else read, rows=[*rows]))

    def plan(
        self, transfer: int, source: ev.PageRun | None, target: ev.PageRun | None, **more: object
    ) -> None:
        """A load, with its two leases (100 and 101 behind ten times its number) and its pages."""
        first, second = transfer * 10 + 100, transfer * 10 + 101
        direction = more.get("direction", "load")
        tiers = ("host", "device") if direction == "load" else ("device", "host")
        sources = [] if source is None else [source]
        targets = [] if target is None else [target]
        self.open(first, *sources, tier=tiers[0], transfer=transfer)
        self.open(second, mode="exclusive", tier=tiers[1], transfer=transfer)
        if target is not None:
            self.add(ev.PageReserve(pages=targets, lease=second, tier=tiers[1]))  # type: ignore[arg-type]
        pages, tails = sum(run[1] for run in sources), more.get("tails", 0)
        assert isinstance(tails, int)
        plain: dict[str, object] = {
            "transfer": transfer, "direction": direction, "source_tier": tiers[0],
            "source": sources, "source_lease": first, "destination_tier": tiers[1],
            "destination": targets, "destination_lease": second, "layers": (0, LAYERS),
            "components": sorted((SPANS if pages else []) + (TAILS if tails else [])),
            "nbytes": nbytes_of(pages, tails), "deadline_ns": 10**9, "owner": "loader",
        }  # fmt: skip
        self.later = ev.TransferPlan(**{**plain, **more})  # type: ignore[arg-type]

    later: ev.TransferPlan | None = None

    def planned(self) -> None:
        """Write the plan that `plan` prepared: behind the lease of its reader."""
        assert self.later is not None
        self.add(self.later)
        self.later = None

    def move(self, transfer: int, pages: int, tails: int, *, by_layer: bool = True) -> None:
        """Record and finish every layer, and the whole."""
        sizes = [pages * SPAN + tails * TAIL, pages * 2 * SPAN + tails * TAIL]
        if not by_layer:
            self.add(ev.TransferRecord(transfer=transfer, layers=(0, LAYERS)))
        else:
            for layer, size in enumerate(sizes):
                self.add(ev.TransferRecord(transfer=transfer, layers=(layer, 1)))
                self.add(ev.TransferLayerDone(transfer=transfer, layers=(layer, 1), nbytes=size))
        self.add(ev.TransferDone(transfer=transfer, nbytes=sum(sizes)))

    def close_log(self) -> "Builder":
        return self.add(ev.LogClose(events=self.seq))


def story() -> Builder:
    """Write the valid log; tests find their places in it by type and number."""
    log = Builder().add(head())
    log.add(ev.ActorStart())
    # Request 1 computes 33 tokens, seals two pages, stores them.
    log.submit(1)
    log.open(1, request=1)
    log.admit(1)
    log.add(ev.PageReserve(pages=[(0, 3, 0)], lease=1, request=1))
    log.step(1, ev.Row(1, 1, 0, 33, 1))
    log.add(ev.PageSeal(pages=[(0, 2, 0)], lease=1, request=1, start=0))
    log.plan(1, (0, 2, 0), (4, 2, 0), direction="store", tails=1)
    log.planned()
    log.move(1, 2, 1, by_layer=False)
    log.add(ev.PageSeal(pages=[(4, 2, 0)], tier="host", lease=111))
    log.close(110, 111)
    log.step(2, ev.Row(1, 1, 33, 1, 1))
    log.step(3, ev.Row(1, 1, 34, 1, 1), read=2)
    log.close(1)
    log.add(ev.PageFree(pages=[(2, 1, 0)]))
    log.finish(1, 3)
    # The device copy goes; request 2 restores it, and reads while it arrives.
    log.add(ev.PageEvict(pages=[(0, 2, 0)], tier="device", tails=1))
    log.add(ev.PageFree(pages=[(0, 2, 0)]))
    log.submit(2)
    log.plan(2, (4, 2, 0), (0, 2, 1), tails=1, reader=2)
    log.open(2, (0, 2, 1), request=2)
    log.planned()
    log.admit(2, 32, hit_pages=(0, 2, 0, 0))
    log.add(ev.PageReserve(pages=[(2, 1, 1)], lease=2, request=2))
    log.add(
        ev.LeaseWait(
            leases=[2], layer=0, components=SPANS, transfer=2, owner="loader",
            deadline_ns=10**9, step=4,
        )
    )  # fmt: skip
    log.move(2, 2, 1)
    log.add(ev.StepRead(step=4, opens=[ev.Opening(2, 0, 2, log.seq)], stalls=[ev.Stall(2, 0, 70)]))
    log.add(ev.PageSeal(pages=[(0, 2, 1)], lease=121))
    log.close(120, 121)
    log.add(ev.StepDone(step=4, read=4, rows=[ev.Row(2, 2, 32, 1, 1)], kind="prefill"))
    # A reader beside the scheduler, and a ledger: pages 0 and 1 leased, 2 held.
    log.open(3, (0, 2, 1))
    log.add(ev.PageLedger(tier="device", quarantined=0, leased=3, cached=0, reserved=2, free=11))
    log.add(ev.LeaseClose(lease=3, opens=[ev.Opening(3, 0, 2, log.seq)]))
    # Request 2 is called off while a step runs: its page waits for the step.
    log.close(2)
    log.add(ev.PageQuarantine(pages=[(2, 1, 1)], steps=[5]))
    log.add(ev.StepDiscarded(step=5, read=0, reason="cancelled"))
    log.add(ev.PageFree(pages=[(2, 1, 1)]))
    log.finish(2, 1, loaded=32)
    return log.close_log()


Change = Callable[[list[ev.Event]], None]


def place_of(events: Iterable[ev.Event], kind: type[ev.Event], number: int = 0) -> int:
    """Index of the ``number``-th event of a type."""
    found = [index for index, event in enumerate(events) if isinstance(event, kind)]
    return found[number]


def renumbered(events: Iterable[ev.Event], tick_ns: int = 1000) -> list[ev.Event]:
    """Copies, numbered anew, a tick apart: a log that was written so.

    Events put in have no number yet; openings stay behind the events that they were behind.
    """
    events = [*events]
    moved = [(event.seq, number) for number, event in enumerate(events, 1) if event.seq]

    def later(opens: list[ev.Opening], own: int, number: int) -> list[ev.Opening]:
        def after(seq: int) -> int:
            if seq >= own > 0:
                return seq + number - own  # a lie stays one
            return max((new for old, new in moved if old <= seq and new < number), default=0)

        return [msgspec.structs.replace(one, after_seq=after(one.after_seq)) for one in opens]

    copies: list[ev.Event] = []
    for number, event in enumerate(events, 1):
        copy = msgspec.structs.replace(event, seq=number, t_ns=number * tick_ns)
        if isinstance(copy, ev.StepRead | ev.LeaseClose):
            copy = msgspec.structs.replace(copy, opens=later(copy.opens, event.seq, number))
        if isinstance(event, ev.LogClose) and event.events == event.seq - 1:
            copy = msgspec.structs.replace(copy, events=number - 1)
        copies.append(copy)
    return copies


def lines_of(events: Iterable[ev.Event]) -> bytes:
    """The log as a file has it."""
    return msgspec.json.Encoder().encode_lines([*events])
