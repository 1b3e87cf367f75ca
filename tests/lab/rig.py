"""What the lab's tests share: a run in virtual time, sessions, and their cold answers."""

import io
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import trio
from attrs import define, field

from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.events import Event, LogOpen
from kvlease.runtime.counters import Statistics
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult
from kvlease.services.lab.device import SimulatedDevice, virtual_log
from kvlease.services.lab.faults import FaultPlan
from kvlease.services.lab.schedule import Replay, run_scheduled
from kvlease.services.lab.spec import DeviceSpec
from tests.runtime.toy import PAGE, answer, prompt_of, toy_config, toy_model

HOUR_S = 3600.0
"""Virtual; a run that takes longer hangs."""
PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)


def simulate(body: Callable[[], Awaitable[None]]) -> None:
    """Run a program in virtual time under the default schedule; raise what it raises."""

    async def bounded() -> None:
        with trio.fail_after(HOUR_S):
            await body()

    ran = run_scheduled(bounded, Replay({}), max_steps=1_000_000)
    if ran.error is not None:
        raise ran.error


@define
class Lab:
    """One engine on one simulated device, and what is left of it when it has closed."""

    spec: DeviceSpec = field(factory=DeviceSpec)
    config: EngineConfig = field(factory=toy_config)
    faults: FaultPlan = field(factory=FaultPlan)
    file: io.BytesIO = field(factory=io.BytesIO)
    events: list[Event] = field(factory=list[Event])
    results: list[GenerateResult] = field(factory=list[GenerateResult])
    device: SimulatedDevice | None = None
    statistics: Statistics | None = None
    seconds: float = 0.0

    def run(
        self, body: Callable[[Engine], Awaitable[object]], model: DeepseekV4 | None = None
    ) -> None:
        """Run ``body`` with the engine, in virtual time."""

        async def main() -> None:
            log = virtual_log(self.file)
            self.events = log.remember()
            device = SimulatedDevice(model or toy_model(), self.spec, log, self.faults)
            self.device = device
            began = trio.current_time()
            async with open_engine(device.runner, self.config, log=log, ports=device.ports) as it:
                await body(it)
                self.seconds = trio.current_time() - began
                self.statistics = it.statistics()
            assert log.complete

        simulate(main)

    def lines(self) -> list[bytes]:
        """The log as it is compared: the wall clock's field left out."""
        for event in self.events:
            if isinstance(event, LogOpen):
                event.started_at = ""
        return [msgspec.json.encode(event) for event in self.events]


async def serve(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, at_once: int
) -> list[GenerateResult]:
    """Answer all prompts, so many at a time; results in the order of the prompts."""
    results: dict[int, GenerateResult] = {}
    room = trio.Semaphore(at_once)

    async def one(number: int, prompt: list[int]) -> None:
        async with room:
            results[number] = await answer(engine, prompt, params)

    async with trio.open_nursery() as nursery:
        for number, prompt in enumerate(prompts):
            nursery.start_soon(one, number, prompt)
    return [results[number] for number in range(len(prompts))]


async def make_host_only(engine: Engine, prompt: list[int]) -> None:
    """Cache a prompt on both tiers, then push it off the device."""
    await answer(engine, prompt, PARAMS)
    await trio.sleep(1)
    for seed in range(100, 100 + engine.config.device_pages // 6):
        await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
    await trio.sleep(1)
