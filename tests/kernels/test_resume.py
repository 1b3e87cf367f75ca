"""Resuming at a page boundary from span and tail alone gives the same bits as never stopping.

This is what every restore, share and hand-off relies on; the schema's kept rows and widths are
exactly what the arithmetic needs, no less.
"""

import pytest
import torch

from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.protocols.geometries import ComputeDtype, StoreFormat
from tests.kernels.rig import Rig

CASES: list[tuple[ComputeDtype, StoreFormat, int]] = [
    ("float32", "same", 32),
    ("float32", "fp8", 64),
    ("float64", "same", 64),
    ("bfloat16", "same", 32),
]


@pytest.mark.parametrize(("dtype", "fmt", "page_tokens"), CASES)
@pytest.mark.parametrize("first_chunk", [1, 50])
def test_span_and_tail_are_enough(
    dtype: ComputeDtype, fmt: StoreFormat, page_tokens: int, first_chunk: int
) -> None:
    """The window reaches over two pages of 32, and the overlap over one group."""
    rig = Rig(load_model(None, ModelOptions(dtype, fmt, fmt, page_tokens)))
    tokens = [(11 * n) % 264 for n in range(128 + 60)]
    sequence = rig.start(tokens)
    rig.run_alone(sequence, [128])
    resumed = rig.fork(sequence)
    resumed.pages = resumed.pages[: 128 // page_tokens]
    rig.run_alone(sequence, [59, 1])
    rig.run_alone(resumed, [first_chunk, 59 - first_chunk, 1])
    assert torch.equal(resumed.logits[-1], sequence.logits[-1])
    assert torch.equal(resumed.logits[-2], sequence.logits[-2])
