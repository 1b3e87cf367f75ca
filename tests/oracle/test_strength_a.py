"""Strength A: equal to the widened Hugging Face model in float64, to 1e-9.

If these fail, the model computes something else than DeepSeek-V4, in a way too small to notice in
fp32 and large enough to change answers.
"""

import random
from pathlib import Path

import pytest
import torch

from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.protocols.config import Device
from tests.kernels.rig import DEVICES, Rig, random_cuts
from tests.oracle.checkpoints import (
    SHAPES,
    Shape,
    logits_of,
    make_config,
    make_model,
    random_tokens,
    save,
)
from tests.oracle.near_ties import first_near_tie
from tests.oracle.widened import widened_module

TOLERANCE = 1e-9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_heads", [1, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_chunked_forward_equals_the_oracle(
    shape: Shape, index_heads: int, device: Device, tmp_path: Path
) -> None:
    """Chunks, single tokens and batches all give the oracle's logits at every cut."""
    config = make_config(shape, index_heads=index_heads)
    plain = make_model(config, seed=index_heads)
    save(plain, tmp_path)
    oracle = make_model(config, seed=index_heads, module=widened_module()).double()
    options = ModelOptions("float64", page_tokens=shape.page_tokens, device=device)
    model = load_model(tmp_path, options)
    rng = random.Random(shape.name)
    rig = Rig(model)
    prompts = [random_tokens(config, shape.length - 30 * n, seed=n) for n in range(2)]
    sequences = [rig.start(prompt) for prompt in prompts]
    wanted = [logits_of(oracle, prompt) for prompt in prompts]
    cuts = [random_cuts(len(prompt) - 12, rng, 40) + [1] * 12 for prompt in prompts]
    worst = 0.0
    while any(cuts):
        work = [(s, cut.pop(0)) for s, cut in zip(sequences, cuts, strict=True) if cut]
        rig.step(work)
        for sequence, _ in work:
            expected = wanted[sequences.index(sequence)][sequence.computed - 1]
            worst = max(worst, float((sequence.logits[-1] - expected).abs().max()))
    assert worst < TOLERANCE
    assert float(wanted[0].abs().max()) > 0.1, "the oracle's logits are too flat to prove anything"


def test_widened_oracle_really_is_wide() -> None:
    """A cast left in fp32 would hide errors of 1e-7 behind the oracle's own."""
    config = make_config(SHAPES[0], index_heads=16)
    wide = make_model(config, seed=0, module=widened_module()).double()
    narrow = make_model(config, seed=0)
    tokens = random_tokens(config, 60, seed=0)
    tokens = tokens[: first_near_tie(narrow, tokens, config)]
    assert len(tokens) > 20
    assert logits_of(wide, tokens).dtype == torch.float64
    gap = (logits_of(wide, tokens) - logits_of(narrow, tokens).double()).abs().max()
    assert 1e-9 < float(gap) < 1e-3
