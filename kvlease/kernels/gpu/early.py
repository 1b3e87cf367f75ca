# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Kernels that are started before the one in front has ended (programmatic dependent launch).

Such a kernel first fetches what no kernel of the step writes (weights), and then waits. Every
kernel waits, so the one in front has itself waited for all that came before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(64)
"""bf16 numbers of one line of the cache."""


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the one in front to end."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch_lines(first, inside, LINES: tl.constexpr, EARLY: tl.constexpr):
    """Bring the first LINES lines of rows that begin at pointers ``first`` [N] into the cache.

    A row that is not ``inside`` stands for the first one.
    """
    if EARLY:
        at = tl.where(inside, first.to(tl.int64), tl.min(first.to(tl.int64)))
        at = at[:, None] + tl.arange(0, LINES)[None, :] * (2 * LINE)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


def early_launch(kernel: object) -> dict[str, bool]:
    """Return the options of a launch that may start early; interpreted kernels never do."""
    if isinstance(kernel, triton.JITFunction):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
