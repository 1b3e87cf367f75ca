"""A loader with its mailbox, its reports and what they said."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import final

import trio
import trio.testing

from kvlease.protocols.ports import CompletionState, Copier, CopyOrder, Stream
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.loader import Loader, loader_mailbox
from kvlease.runtime.streams import open_cpu_stream
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import Kind, TransferPlan
from kvlease.units import TransferId
from tests.runtime.rig import PATIENCE_S, Held, Witness

DONE, FAILED, REVOKED = CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED


@final
class Rig:
    """A loader's surroundings: its mailbox, its reports and what they said."""

    def __init__(self, copier: Copier | None = None, settle_timeout_s: float = 1.0) -> None:
        self.copier = copier
        self.settle_timeout_s = settle_timeout_s
        self.ended: list[Transfer] = []
        self.settled: list[Transfer] = []
        self.witness = Witness()
        self.mailbox = loader_mailbox(16, self.ended.append, self.settled.append)
        self.loader: Loader | None = None

    def make(self, load: Stream, store: Stream) -> Loader:
        self.loader = Loader(
            self.mailbox,
            load_stream=load,
            store_stream=store,
            on_end=self.ended.append,
            on_settled=self.settled.append,
            copier=self.copier,
            settle_timeout_s=self.settle_timeout_s,
        )
        return self.loader

    def transfer(
        self,
        *orders: CopyOrder,
        transfer_id: int = 1,
        kind: Kind = "load",
        deadline_s: float = 5.0,
        held: Held | None = None,
        after: tuple[CpuCompletion, ...] = (),
    ) -> Transfer:
        it = TransferPlan(
            TransferId(transfer_id),
            kind,
            orders,
            1 + max(each.layer for each in orders),
            deadline_s,
            "scheduler",
            holds=() if held is None else (held,),
            after=after,
        )
        return Transfer(it, observer=self.witness)


@asynccontextmanager
async def running(rig: Rig) -> AsyncGenerator[Loader]:
    """Run the rig's loader on worker threads; it is asked to finish at the end of the block."""
    async with (
        open_cpu_stream("load", close_timeout_s=1) as load,
        open_cpu_stream("store", close_timeout_s=1) as store,
        trio.open_nursery() as nursery,
    ):
        loader = rig.make(load, store)
        nursery.start_soon(loader.run)
        yield loader
        rig.mailbox.close()


async def wait_for(what: threading.Event) -> None:
    assert await trio.to_thread.run_sync(what.wait, PATIENCE_S)
