"""Exact mode: a row's bits do not depend on the batch, the chunking, or other sequences.

If these fail, an answer changes with who else is being served, and no cold run can verify it.
"""

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import ConfigError
from kvlease.kernels import selftest
from kvlease.kernels.models.deepseek_v4 import DeepseekV4, ModelOptions, load_model
from kvlease.kernels.selftest import InvarianceReport, row_invariance
from kvlease.kernels.tiling import EXACT, FAST
from kvlease.protocols.config import Device
from kvlease.protocols.geometries import ComputeDtype, StoreFormat
from tests.kernels.rig import DEVICES, Rig, RigSequence, random_cuts

DTYPES: list[ComputeDtype] = ["float32", "float64", "bfloat16"]
FORMATS: list[tuple[StoreFormat, StoreFormat]] = [
    ("same", "same"),
    ("bf16", "bf16"),
    ("fp8", "fp8"),
]
LENGTH = 140
TAIL = 6


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@cache
def model(
    dtype: ComputeDtype, formats: tuple[StoreFormat, StoreFormat], device: Device = "cpu"
) -> DeepseekV4:
    return load_model(None, ModelOptions(dtype, *formats, page_tokens=32, device=device))


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(264) for _ in range(length)]


@cache
def alone(
    dtype: ComputeDtype, formats: tuple[StoreFormat, StoreFormat], device: Device = "cpu"
) -> RigSequence:
    """One prompt computed by itself: in one chunk but for the last tokens, one at a time."""
    rig = Rig(model(dtype, formats, device))
    sequence = rig.start(prompt(0))
    rig.run_alone(sequence, [LENGTH - TAIL] + [1] * TAIL)
    return sequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_start_up_test_passes_and_is_quick(threads: int, dtype: torch.dtype) -> None:
    report = row_invariance(dtype)
    assert report.is_invariant, report.varying
    assert report.threads == threads
    assert len(report.tried) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_start_up_test_passes_on_a_device(dtype: torch.dtype) -> None:
    if "cuda" not in DEVICES:
        pytest.skip("needs a CUDA device")
    report = row_invariance(dtype, device=torch.device("cuda"))
    assert report.is_invariant, report.varying
    assert report.device == "cuda"


def test_exact_mode_is_refused_where_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose arithmetic varies must say so at start-up, in one sentence."""
    failing = InvarianceReport("float32", 2, ("linear",), ("linear",))
    monkeypatch.setattr(selftest, "_cached_report", lambda *_: failing)
    with pytest.raises(ConfigError, match="linear in float32 with 2 threads"):
        load_model(None, ModelOptions())
    assert load_model(None, ModelOptions(exact=False)).tiling == FAST


def test_the_start_up_test_sees_arithmetic_that_varies() -> None:
    """A self-test that cannot fail proves nothing: a sum over the whole batch is caught."""
    rows = [torch.randn(96, 8)]
    stable = selftest._is_stable(lambda p: p[0] + p[0].sum(), rows, EXACT)
    assert not stable


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), formats=st.sampled_from(FORMATS))
def test_any_batching_and_chunking_gives_the_same_bits(
    dtype: ComputeDtype, device: Device, seed: int, formats: tuple[StoreFormat, StoreFormat]
) -> None:
    """The prompt of `alone`, cut at random and batched with sequences of other lengths."""
    rng = random.Random(seed)
    wanted = alone(dtype, formats, device)
    rig = Rig(model(dtype, formats, device), num_pages=64, seed=seed)
    sequence = rig.start(prompt(0))
    others = [rig.start(prompt(n + 1, rng.randint(1, 200))) for n in range(rng.randint(1, 5))]
    cuts = random_cuts(LENGTH - TAIL, rng, rng.choice([15, 40, 130])) + [1] * TAIL
    while cuts:
        work = [(sequence, cuts.pop(0))]
        for other in others:
            left = len(other.tokens) - other.computed
            if left and rng.random() < 0.6:
                work.append((other, rng.choice([1, rng.randint(1, left)])))
        rng.shuffle(work)
        rig.step(work)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(sequence.logits[-TAIL:], wanted.logits[-TAIL:], strict=True)
    )


def test_bits_do_not_depend_on_the_batch_with_any_threads(threads: int) -> None:
    """A step of several tiles against each sequence alone, under one and two threads."""
    assert torch.get_num_threads() == threads
    rig = Rig(model("float32", ("same", "same")), num_pages=100, num_slots=41)
    sequences = [rig.start(prompt(n, 33 + n)) for n in range(40)]
    rig.step([(s, len(s.tokens)) for s in sequences])
    for n in (0, 39):
        single = rig.start(prompt(n, 33 + n))
        rig.step([(single, 33 + n)])
        assert torch.equal(single.logits[0], sequences[n].logits[0])
        rig.release(single)


def test_fast_mode_agrees_closely() -> None:
    """The fast mode is another rounding of the same model, not another model."""
    wanted = alone("float64", ("same", "same"))
    rig = Rig(load_model(None, ModelOptions("float64", page_tokens=32, exact=False)))
    sequence = rig.start(prompt(0))
    rig.run_alone(sequence, [LENGTH - TAIL] + [1] * TAIL)
    gap = max(
        float((mine - theirs).abs().max())
        for mine, theirs in zip(sequence.logits, wanted.logits, strict=True)
    )
    assert gap < 1e-10


def test_digests_tell_equal_rows_from_unequal_ones() -> None:
    rig = Rig(model("float32", ("same", "same")))
    first, second = rig.start(prompt(1)), rig.start(prompt(1))
    drawn = rig.step([(first, 50), (second, 50)], digests=True).tokens()
    assert drawn[0] == drawn[1]
    assert drawn[0][0].digest is not None
    third = rig.start(prompt(2))
    assert rig.step([(third, 50)], digests=True).tokens()[0][0].digest != drawn[0][0].digest
