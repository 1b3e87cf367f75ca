"""Serving throughput: an engine at 64 sessions against `generate`, one request after another.

Run from the checkout: ``python benchmarks/serve.py``. Needs transformers. The embedded model's
weights are written as a Hugging Face checkpoint into a temporary folder, and both sides load that.
The engine serves what `kvlease run` serves by default: 64 tool-agent sessions of three turns, on a
device tier too small for them. The other side is the public model as it comes (eager attention,
eager experts), which answers a sample of the same turns, spread evenly over their prompt lengths,
greedily, each with a fresh prefill of its whole prompt.

Blocks of both take turns, and an engine run is compared with the blocks right before and behind
it. Both have the same number of torch threads.
"""

import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
import trio
from attrs import define, field, frozen
from torch import Tensor, nn

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from _report import Report, Spread, make_parser  # noqa: E402  (run from a checkout)

from kvlease.kernels.models.embedded import EMBEDDED_CONFIG, RandomTensors  # noqa: E402
from kvlease.kernels.models.tensor_names import FUSED_DOWN, FUSED_UP, canonical_name  # noqa: E402
from kvlease.protocols.config import EngineConfig  # noqa: E402
from kvlease.protocols.ports import ModelRunner  # noqa: E402
from kvlease.runtime.engine import open_engine  # noqa: E402
from kvlease.runtime.models import load  # noqa: E402
from kvlease.services.driver import Driver, TurnRecord  # noqa: E402
from kvlease.services.options import PRESSED_PAGES  # noqa: E402
from kvlease.services.workload import WorkloadShape, tool_agent_sessions  # noqa: E402

PAGE_TOKENS = 64
_LAYERS = {
    "sliding": "sliding_attention",
    "sparse": "compressed_sparse_attention",
    "heavy": "heavily_compressed_attention",
}
_MLPS = {"hash": "hash_moe", "score": "moe"}


def hf_config() -> Any:  # noqa: ANN401 (transformers is untyped here)
    """Return the embedded model's geometry as the public model spells it."""
    from transformers import DeepseekV4Config

    c = EMBEDDED_CONFIG
    return DeepseekV4Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden,
        num_hidden_layers=len(c.layer_kinds),
        layer_types=[_LAYERS[kind] for kind in c.layer_kinds],
        mlp_layer_types=[_MLPS[kind] for kind in c.mlp_kinds],
        compress_rates={_LAYERS["sparse"]: c.sparse_ratio, _LAYERS["heavy"]: c.heavy_ratio},
        num_attention_heads=c.num_heads,
        head_dim=c.head_dim,
        partial_rotary_factor=c.rope_dim / c.head_dim,
        q_lora_rank=c.q_rank,
        o_groups=c.o_groups,
        o_lora_rank=c.o_rank,
        sliding_window=c.window,
        index_n_heads=c.index_heads,
        index_head_dim=c.index_dim,
        index_topk=c.index_topk,
        n_routed_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_intermediate_size=c.expert_width,
        max_position_embeddings=c.max_positions,
        eos_token_id=sorted(c.eos_tokens),
        attn_implementation="eager",
        experts_implementation="eager",
    )


def embedded_tensor(source: RandomTensors, name: str) -> Tensor:
    """Return the embedded model's value for a tensor of the public model."""
    name = canonical_name(name)
    prefix, _, fused = name.partition("ffn.")
    parts = {FUSED_UP: ("w1", "w3"), FUSED_DOWN: ("w2",)}.get(f"ffn.{fused}")
    if parts is None:
        return source.tensor(name)
    experts = [
        torch.cat([source.tensor(f"{prefix}ffn.experts.{number}.{part}.weight") for part in parts])
        for number in range(EMBEDDED_CONFIG.num_experts)
    ]
    return torch.stack(experts)


def write_checkpoint(folder: Path) -> nn.Module:
    """Write the embedded model the way transformers does; return it as loaded from there."""
    from transformers import DeepseekV4ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = RandomTensors(EMBEDDED_CONFIG)
    model: Any = DeepseekV4ForCausalLM(hf_config())
    for name, tensor in model.state_dict().items():
        tensor.copy_(embedded_tensor(source, name))
    model.save_pretrained(folder)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    loaded: Any = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    return cast("nn.Module", loaded.eval())


@frozen
class Rate:
    """Output tokens of a block, and the seconds it took by the clock and on all cores."""

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.wall_s

    def __add__(self, other: "Rate") -> "Rate":
        """Join two blocks."""
        return Rate(
            self.tokens + other.tokens, self.wall_s + other.wall_s, self.cpu_s + other.cpu_s
        )

    def saves(self, other: "Rate") -> float:
        """Return how many times less CPU a token takes here than there."""
        return (other.cpu_s / other.tokens) / (self.cpu_s / self.tokens)


@final
class Clock:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        """Start."""
        self._start = time.perf_counter(), time.process_time()

    def rate(self, tokens: int) -> Rate:
        """Return the rate of what was done since."""
        wall_s, cpu_s = self._start
        return Rate(tokens, time.perf_counter() - wall_s, time.process_time() - cpu_s)


@define
class Baseline:
    """`generate` on one request after another; counts how many greedy tokens were the same."""

    model: Any
    same: int = 0
    compared: int = 0

    def answer(self, turns: list[TurnRecord]) -> Rate:
        """Answer each turn from its whole prompt, as long as the engine's answer was."""
        clock = Clock()
        answers = [self._generate(turn) for turn in turns]
        rate = clock.rate(sum(map(len, answers)))
        for turn, answer in zip(turns, answers, strict=True):
            if turn.sampling.temperature == 0:
                self.same += sum(a == b for a, b in zip(answer, turn.tokens, strict=True))
                self.compared += len(answer)
        return rate

    def _generate(self, turn: TurnRecord) -> list[int]:
        prompt = torch.from_numpy(np.frombuffer(turn.prompt, dtype=np.int32).astype(np.int64))
        count = len(turn.tokens)
        with torch.inference_mode():
            whole = self.model.generate(
                prompt.unsqueeze(0),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                do_sample=False,
            )
        return cast("list[int]", whole[0, len(prompt) :].tolist())


@define
class Comparison:
    """Blocks of both sides in turns."""

    sessions: int
    device_pages: int
    per_block: int
    baseline: Baseline
    sample: list[TurnRecord] = field(factory=list[TurnRecord])
    order: random.Random = field(factory=lambda: random.Random(5))

    async def serve(self, runner: ModelRunner, *, exact: bool) -> Rate:
        """Serve all sessions on a fresh engine; the first run also gives the sample of turns."""
        config = EngineConfig(
            page_tokens=PAGE_TOKENS,
            device_pages=self.device_pages,
            max_sessions=self.sessions,
            exact=exact,
        )
        async with open_engine(runner, config) as engine:
            driver = Driver(engine, config.request_timeout_s, keep_records=not self.sample)
            shape = WorkloadShape()
            sessions = list(tool_agent_sessions(self.sessions, shape, engine.model.vocab_size, 0))
            clock = Clock()
            await driver.serve(sessions, self.sessions)
            rate = clock.rate(driver.tally.output_tokens)
        assert not driver.tally.complaints, driver.tally.complaints
        if not self.sample:
            self.sample = sorted(driver.records, key=lambda turn: len(turn.prompt))
        return rate

    def ask_baseline(self) -> Rate:
        """Answer one turn from each of as many strata of prompt lengths."""
        size = len(self.sample) / self.per_block
        numbers = [int((number + self.order.random()) * size) for number in range(self.per_block)]
        return self.baseline.answer([self.sample[number] for number in numbers])


def compare(comparison: Comparison, folder: Path, rounds: int, report: Report) -> None:
    """Alternate blocks and print rates and ratios of both modes."""
    runners: dict[str, ModelRunner] = {}
    for mode in ("exact", "fast"):
        config = EngineConfig(page_tokens=PAGE_TOKENS, exact=mode == "exact")
        runners[mode] = load(folder, config).runner
    trio.run(_serve, comparison, runners["exact"], True)  # warms up, and gives the sample
    blocks = [comparison.ask_baseline()]
    rates: dict[str, list[Rate]] = {mode: [] for mode in runners}
    for _ in range(rounds):
        for mode, runner in runners.items():
            rates[mode].append(trio.run(_serve, comparison, runner, mode == "exact"))
            blocks.append(comparison.ask_baseline())
    around = [before + after for before, after in pairwise(blocks)]
    report.row("transformers, output tokens a second", Spread.of([b.per_s for b in blocks]), "1/s")
    for number, (mode, found) in enumerate(rates.items()):
        pairs = list(zip(found, around[number :: len(rates)], strict=True))
        ratios = Spread.of([rate.per_s / beside.per_s for rate, beside in pairs])
        saved = Spread.of([rate.saves(beside) for rate, beside in pairs])
        rate = Spread.of([rate.per_s for rate in found])
        report.row(f"engine, {mode}, output tokens a second", rate, "1/s")
        report.row(f"engine, {mode}, over transformers", ratios, "x")
        report.row(f"engine, {mode}, less CPU a token than transformers", saved, "x")
        report.target(f"engine, {mode}, over transformers", ratios.median, 10, at_least=True)
    same, compared = comparison.baseline.same, comparison.baseline.compared
    print(f"  greedy tokens that both sides agree on: {same} of {compared}")


async def _serve(comparison: Comparison, runner: ModelRunner, exact: bool) -> Rate:
    return await comparison.serve(runner, exact=exact)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode (default 2)")
    parser.add_argument("--sessions", type=int, default=64, help="at a time (default 64)")
    parser.add_argument("--device-pages", type=int, default=PRESSED_PAGES, help="(default 192)")
    parser.add_argument("--sample", type=int, default=8, help="turns of a block (default 8)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {
        "sessions": options.sessions,
        "device pages": options.device_pages,
        "rounds": options.rounds,
        "turns of a block": options.sample,
    }
    report = Report("serve", about)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        baseline = Baseline(write_checkpoint(folder))
        comparison = Comparison(options.sessions, options.device_pages, options.sample, baseline)
        compare(comparison, folder, options.rounds, report)
    return report.finish(cast("Path | None", options.json))


if __name__ == "__main__":
    sys.exit(main())
