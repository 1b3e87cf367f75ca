"""A very small DeepSeek-V4 for runtime tests, faults at the copier's port, and a cold twin."""

import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from attrs import define, evolve, field

from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.deepseek_v4 import DeepseekV4, ModelOptions
from kvlease.kernels.models.embedded import RandomTensors
from kvlease.kernels.models.weights import build_weights
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult

PAGE = 16
TOY = V4Config(
    vocab_size=64,
    hidden=32,
    layer_kinds=("sliding", "sparse", "heavy"),
    mlp_kinds=("hash", "score", "score"),
    num_heads=2,
    head_dim=16,
    rope_dim=8,
    q_rank=16,
    o_groups=2,
    o_rank=8,
    window=24,
    index_heads=16,
    index_dim=8,
    index_topk=12,
    num_experts=4,
    experts_per_token=2,
    expert_width=16,
    max_positions=2048,
    sparse_ratio=4,
    heavy_ratio=16,
)
"""Three layers, one of each kind; a window longer than a page; top-k far below the rows."""


@cache
def toy_model(config: V4Config = TOY, seed: int = 0) -> DeepseekV4:
    """Return the model; one per geometry and seed for the whole test run."""
    weights = build_weights(config, RandomTensors(config, seed), torch.float32)
    return DeepseekV4(config, weights, f"toy {seed}", ModelOptions(page_tokens=PAGE))


TOY_CONFIG = EngineConfig(
    device_pages=64,
    host_pages=128,
    tail_every=2,
    max_sessions=8,
    chunk_tokens=48,
    digests=True,
    poison=True,
    load_or_recompute=False,
    load_timeout_s=5.0,
    request_timeout_s=60.0,
)
toy_config = partial(evolve, TOY_CONFIG)
"""Return a configuration with poisoned memory and digests, changed as given."""


def prompt_of(seed: int, length: int, shared: int = 0) -> list[int]:
    """Return random tokens; the first ``shared`` are the same for every seed."""
    common, own = random.Random(0), random.Random(seed + 1)
    head = [common.randrange(TOY.vocab_size) for _ in range(min(shared, length))]
    return head + [own.randrange(TOY.vocab_size) for _ in range(length - len(head))]


async def answer(
    engine: Engine, prompt: list[int], params: SamplingParams | None = None
) -> GenerateResult:
    """Return the whole answer of one request."""
    async with engine.generate(prompt, params or SamplingParams(max_tokens=6)) as stream:
        return await stream.drain()


@define
class Cold:
    """Answers of cold runs of one model: nothing cached, nobody beside, in whole chunks."""

    config: V4Config
    known: dict[tuple[object, ...], GenerateResult] = field(factory=dict)

    async def learn(self, cases: Iterable[tuple[list[int], SamplingParams]]) -> None:
        """Run what is not known yet, one request after another."""
        missing = [c for c in cases if (tuple(c[0]), c[1]) not in self.known]
        if not missing:
            return
        config = toy_config(prefix_cache=False, host_pages=0, chunk_tokens=4096, max_sessions=1)
        async with open_engine(toy_model(self.config), config) as engine:
            for prompt, params in missing:
                self.known[tuple(prompt), params] = await answer(engine, prompt, params)

    async def answer(self, prompt: list[int], params: SamplingParams) -> GenerateResult:
        """Return one cold answer."""
        await self.learn([(prompt, params)])
        return self.known[tuple(prompt), params]


COLD = Cold(TOY)


def same(left: GenerateResult, right: GenerateResult) -> bool:
    """Whether two answers are equal bit for bit, logits included."""
    return left.tokens == right.tokens and left.digests == right.digests


@define
class FaultyCopier:
    """Runs orders as ``fault`` says; a fault returns bytes moved, or None to copy as usual."""

    fault: Callable[[CopyOrder], int | None]
    seen: list[tuple[str, int, str]] = field(factory=list)

    def copy(self, order: CopyOrder) -> int:
        """Apply the fault on the stream's worker."""
        self.seen.append((order.kind, order.layer, order.component))
        moved = self.fault(order)
        return order.run() if moved is None else moved


@define
class Hold:
    """Holds the copies that ``matches``; the first one held is announced."""

    matches: Callable[[CopyOrder], bool]
    reached: threading.Event = field(factory=threading.Event)
    go: threading.Event = field(factory=threading.Event)

    def __call__(self, order: CopyOrder) -> int | None:
        """Hold the stream's worker here until ``go``."""
        if self.matches(order):
            self.reached.set()
            assert self.go.wait(30), "nobody let the held copy go"
        return None


def random_delays(seed: int, longest_s: float) -> Callable[[CopyOrder], int | None]:
    """Return a fault that delays every copy by a random time."""
    rng = random.Random(seed)

    def delay(_order: CopyOrder) -> int | None:
        time.sleep(rng.random() * longest_s)
        return None

    return delay
