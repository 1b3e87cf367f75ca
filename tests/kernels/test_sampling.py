"""Drawing tokens: filters, bans, log probabilities, and independence of the batch."""

import hashlib
import math

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlease.kernels.counter_rng import philox, uniforms
from kvlease.kernels.sampling import sample_tokens
from kvlease.protocols.ports import SampledToken, Sampling


def draw(logits: Tensor, how: Sampling, position: int = 0) -> SampledToken:
    return sample_tokens(logits.unsqueeze(0), [how], [position], digests=False)[0]


def test_philox_equals_published_vectors() -> None:
    """The known answers of Philox 4x32-10: a wrong round would still look random."""
    ones = 0xFFFFFFFF
    cases = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ]
    for counter, key, wanted in cases:
        got = philox(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
        assert got[0].tolist() == wanted


def test_uniforms_depend_on_seed_and_position_only() -> None:
    together = uniforms([1, 1, 2, -5], [0, 1, 0, 7])
    assert ((together >= 0) & (together < 1)).all()
    assert len(set(together.tolist())) == 4
    for n, (seed, position) in enumerate([(1, 0), (1, 1), (2, 0), (-5, 7)]):
        assert uniforms([seed], [position])[0] == together[n]


def test_greedy_takes_the_lowest_of_equals_and_obeys_bans() -> None:
    """An EOS before min-tokens would end an answer early."""
    logits = torch.tensor([0.0, 3.0, 3.0, -1.0])
    assert draw(logits, Sampling()).token == 1
    assert draw(logits, Sampling(banned=(1,))).token == 2
    assert draw(logits, Sampling(banned=(1, 2), temperature=5.0)).token in (0, 3)
    assert logits[1].item() == 3.0, "the caller's logits must not change"


@given(
    seed=st.integers(0, 2**63),
    position=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.integers(0, 5),
    top_p=st.sampled_from([0.1, 0.5, 0.99, 1.0]),
)
def test_a_draw_does_not_depend_on_its_batch(
    seed: int, position: int, temperature: float, top_k: int, top_p: float
) -> None:
    """Else a request answers differently when others come and go."""
    how = Sampling(temperature, top_k, top_p, seed, logprobs=2)
    logits = torch.randn(3, 17, generator=torch.Generator().manual_seed(seed % 1000))
    alone = sample_tokens(logits[1:2], [how], [position], digests=True)[0]
    others = [Sampling(1.0, seed=9), how, Sampling()]
    together = sample_tokens(logits, others, [5, position, 6], digests=True)[1]
    assert alone == together
    assert alone.digest == hashlib.blake2b(logits[1].numpy().tobytes(), digest_size=16).digest()


def test_filters_keep_the_best_tokens() -> None:
    logits = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.25]))
    ways = Sampling(temperature=1.0)
    for position in range(200):
        assert draw(logits, evolve(ways, top_k=1), position).token == 1
        assert draw(logits, evolve(ways, top_k=2), position).token in (1, 2)
        assert draw(logits, evolve(ways, top_p=0.69), position).token in (1, 2)
        assert draw(logits, evolve(ways, top_p=0.71), position).token in (1, 2, 3)
        assert draw(logits, evolve(ways, top_p=1e-9), position).token == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    shares = (logits / temperature).softmax(0)
    count = 4000
    how = [Sampling(temperature, seed=3)] * count
    drawn = sample_tokens(logits.expand(count, 4), how, range(count), digests=False)
    for token, share in enumerate(shares.tolist()):
        seen = sum(d.token == token for d in drawn)
        assert abs(seen / count - share) < 5 * math.sqrt(max(share, 1e-9) / count)


def test_log_probabilities_are_of_the_allowed_tokens() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 5.0])
    got = draw(logits, Sampling(banned=(3,), logprobs=2))
    shares = logits[:3].double().log_softmax(0)
    assert got.token == 1
    assert got.logprob == pytest.approx(shares[1].item())
    assert [t for t, _ in got.top_logprobs] == [1, 2]
    assert draw(logits, Sampling(logprobs=0)).top_logprobs == ()
    assert draw(logits, Sampling()).logprob is None
