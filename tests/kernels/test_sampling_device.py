"""The draw on a device against its twin, on whatever device there is."""

import random

import pytest
import torch

from kvlease.kernels.sampling import sample_tokens
from kvlease.kernels.sampling_device import PendingDraw
from kvlease.protocols.config import Device
from kvlease.protocols.ports import Sampling
from tests.kernels.rig import DEVICES

WIDTH = 97


def random_way(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 5.0]),
        top_k=rng.choice([0, 0, 1, 7, 2 * WIDTH]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.4, 1e-9]),
        seed=rng.randrange(-(2**40), 2**63),
        banned=tuple(rng.sample(range(WIDTH), rng.choice([0, 0, 5]))),
        logprobs=rng.choice([None, None, 0, 3]),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_drawn_as_the_twin_draws_it(seed: int, device: Device) -> None:
    """Mixed ways in one batch, ties and -inf among the logits."""
    rng = random.Random(seed)
    draw = torch.Generator().manual_seed(seed)
    count = 40
    logits = torch.randn((count, WIDTH), generator=draw).mul_(3).round_(decimals=1)
    logits[::5, WIDTH // 2 :] = -torch.inf
    how = [random_way(rng) for _ in range(count)]
    positions = [rng.randrange(10**6) for _ in range(count)]
    wanted = sample_tokens(logits, how, positions, digests=True)
    pending = PendingDraw(logits.to(device), how, positions, digests=True)
    if device == "cuda":
        torch.cuda.synchronize()
    for got, one in zip(pending.collect(), wanted, strict=True):
        assert (got.token, got.digest) == (one.token, one.digest)
        assert got.logprob == pytest.approx(one.logprob, abs=1e-12)
        assert [t for t, _ in got.top_logprobs] == [t for t, _ in one.top_logprobs]
        shares = [share for _, share in one.top_logprobs]
        assert [share for _, share in got.top_logprobs] == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_takes_the_lowest_of_equals(device: Device) -> None:
    logits = torch.zeros((3, WIDTH), device=device)
    logits[1, 40:60] = 2.0
    logits[2, -1] = 1.0
    drawn = PendingDraw(logits, [Sampling()] * 3, [1, 2, 3], digests=False)
    if device == "cuda":
        torch.cuda.synchronize()
    assert [one.token for one in drawn.collect()] == [0, 40, WIDTH - 1]
