"""The model by kernels against the plain torch model, over the same weights."""

import gc
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from attrs import evolve
from torch import Tensor

from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.decode_graph import DecodeGraphs, Layout, Memory
from kvlease.kernels.models.deepseek_v4 import DeepseekV4, ModelOptions
from kvlease.kernels.models.device_run import DeviceRun, kernel_runs
from kvlease.kernels.models.embedded import EMBEDDED_CONFIG, RandomTensors
from kvlease.kernels.models.opening import StepView
from kvlease.kernels.models.weights import build_weights
from kvlease.protocols.geometries import StoreFormat
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.schema import AnyLayer
from tests.kernels.rig import Rig

CONFIG = evolve(
    EMBEDDED_CONFIG, hidden=64, layer_kinds=("sliding", "sparse", "heavy", "sparse"),
    mlp_kinds=("hash", "score", "score", "score"), q_rank=32, o_rank=16, expert_width=32, window=16,
    index_topk=8, heavy_ratio=8, num_experts=4,
)  # fmt: skip
LENGTH = 130


def make_model(config: V4Config, fmt: StoreFormat, device: str, *, by_kernels: bool) -> DeepseekV4:
    source = RandomTensors(config)
    weights = build_weights(config, source, torch.bfloat16, torch.device(device))
    options = ModelOptions(
        "bfloat16", fmt, fmt, 32, exact=False, device="cuda" if device == "cuda" else "cpu"
    )
    model = DeepseekV4(config, weights, "test", options)
    if by_kernels:
        runs = kernel_runs(config, weights, torch.bfloat16)
        assert runs is not None
        model._run = runs
    return model


def drive(
    model: DeepseekV4, steps: int, seed: int, ahead: Sequence[int] = ()
) -> tuple[list[torch.Tensor], list[int]]:
    """Chunks of two prompts, then both decoded together, with the tokens the caller fixed.

    Then on with the tokens drawn, so many as ``ahead`` says in a step; logits of the last alone.
    """
    rng = random.Random(seed)
    rig = Rig(model)
    first = rig.start([rng.randrange(CONFIG.vocab_size) for _ in range(LENGTH)])
    second = rig.start([rng.randrange(CONFIG.vocab_size) for _ in range(LENGTH)])
    rig.step([(first, 21)])
    rig.step([(first, 19), (second, 18)])
    rig.step([(second, 1), (first, 3)])
    for _ in range(steps):
        rig.step([(first, 1), (second, 1)])
    for one in (first, second):
        one.tokens[one.computed :] = one.drawn[-1:]
    for count in ahead:
        rig.step([(first, 1), (second, 1)], ahead=count)
        for one in (first, second):
            one.tokens += one.drawn[-count:]
    for one in (first, second):
        del one.logits[-len(ahead) : -1]
    return first.logits + second.logits, first.drawn + second.drawn


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_chunks_and_decode_steps_agree_with_plain_torch(fmt: StoreFormat, device: str) -> None:
    """Same logits to bf16 noise; without a device the kernels run in the interpreter."""
    steps = 40 if device == "cuda" else 3
    got, _ = drive(make_model(CONFIG, fmt, device, by_kernels=True), steps, seed=1)
    wanted, _ = drive(make_model(CONFIG, fmt, device, by_kernels=False), steps, seed=1)
    assert all(torch.isfinite(mine).all() for mine in got)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]
    assert max(errors) < 0.05, errors


class LaunchesAgain:
    """What a captured step is, without a device that has any: the same launches over its buffer."""

    def __init__(self, buffer: Tensor, step: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.graph = self
        self.buffer = buffer
        self._step = step
        self.logits, self.tokens = step()

    def replay(self) -> None:
        self.logits, self.tokens = self._step()


def _capture(graphs: DecodeGraphs, buffer: Tensor, layout: Layout, memory: Memory) -> object:
    rows, tokens = layout.parts(buffer)
    return LaunchesAgain(buffer, partial(graphs._step, rows, tokens, memory))


@pytest.mark.slow
def test_a_whole_step_gives_the_bits_of_its_layers(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first whole step opens every layer, later ones one for all; the log hears of all.

    The last one draws three tokens.
    """
    if device == "cuda":
        pytest.skip("there are graphs here: see the next test")
    opened: list[list[tuple[int, int, int]]] = []
    leases: list[int] = []

    def whole(run: DeviceRun, layers: Sequence[tuple[AnyLayer, StepView]], memory: object) -> None:
        leases.append(len(layers))
        plain(run, layers, memory)

    def close(lease: StepLease) -> None:
        opened.append(lease.openings.runs)
        lease.cell.end()

    plain = DeviceRun.whole
    model = make_model(CONFIG, "fp8", device, by_kernels=True)
    launched = drive(model, 3, seed=2, ahead=(1, 1, 1))
    monkeypatch.setattr(StepLease, "close", close)
    monkeypatch.setattr(DecodeGraphs, "_capture", _capture)
    monkeypatch.setattr(DeviceRun, "whole", whole)
    monkeypatch.setattr(DeviceRun, "fits_a_graph", property(_is_decode))
    replayed = drive(model, 3, seed=2, ahead=(3,))
    assert replayed[1] == launched[1]
    assert all(torch.equal(a, b) for a, b in zip(replayed[0], launched[0], strict=True))
    assert leases == [4, 1, 1, 1]
    assert set(map(tuple, opened)) == {((0, 4, 0),)}


def _is_decode(run: DeviceRun) -> bool:
    return all(len(part.tokens) == 1 for part in run._inputs.sequences)


@pytest.mark.gpu
def test_a_graph_gives_the_bits_of_its_launches(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay, filled up with rows that are none, and the same step layer by layer.

    Then several replays in a row, and a step for each of their tokens.
    """
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    model = make_model(CONFIG, "fp8", device, by_kernels=True)
    replayed = drive(model, 40, seed=2, ahead=(1, 4, 7, 2))
    monkeypatch.setattr(DeviceRun, "fits_a_graph", False)
    launched = drive(model, 40, seed=2, ahead=(1,) * 14)
    assert replayed[1] == launched[1]
    assert all(torch.equal(a, b) for a, b in zip(replayed[0], launched[0], strict=True))


@pytest.mark.gpu
def test_a_decode_step_allocates_nothing_on_the_device(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    model = make_model(CONFIG, "bf16", device, by_kernels=True)
    rig = Rig(model)
    sequence = rig.start([n % CONFIG.vocab_size for n in range(LENGTH)])
    rig.run_alone(sequence, [50, 1, 1])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    rig.run_alone(sequence, [1] * 20)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_graphs_go_with_the_memory_they_were_captured_over(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    model = make_model(CONFIG, "bf16", device, by_kernels=True)

    def steps_of_a_pool() -> int:
        rig = Rig(model)
        sequence = rig.start([n % CONFIG.vocab_size for n in range(LENGTH)])
        rig.run_alone(sequence, [50, 1, 1])
        return torch.cuda.memory_allocated()

    inside = steps_of_a_pool()
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated()
    assert left < inside
    steps_of_a_pool()
    gc.collect()
    assert torch.cuda.memory_allocated() == left
