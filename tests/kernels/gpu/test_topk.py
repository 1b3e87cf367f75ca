"""Top-k on the GPU equals its twin as lists, ties and all, and what is unseen may be anything."""

import pytest
import torch
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu.topk import TopkPlan, choose_rows
from kvlease.kernels.topk import select_topk

RATIO = 4
PAGE_ROWS = 8
ON_GPU = torch.cuda.is_available()


def expected(scores: Tensor, visible: Tensor, table: Tensor, k: int) -> Tensor:
    """The twin's rows, translated through each row's page table."""
    rows = select_topk(scores.cpu(), visible.cpu(), k)
    pages = table.cpu().gather(1, (rows.clamp(min=0) // PAGE_ROWS)).long()
    return torch.where(rows < 0, -1, pages * PAGE_ROWS + rows % PAGE_ROWS).int()


def chosen(scores: Tensor, visible: Tensor, table: Tensor, k: int, part: int, short: int) -> Tensor:
    """The kernel's rows; scores past the visible ones are NaN, table entries past them garbage."""
    num_rows, width = scores.shape
    plan = TopkPlan.make(num_rows, width, k, scores.device, short=short, part=part)
    out = torch.full((num_rows, k), -7, dtype=torch.int32, device=scores.device)
    unseen = torch.arange(width, device=scores.device) >= visible.unsqueeze(1)
    positions = (visible * RATIO + RATIO - 2).clamp(min=-1).int()
    positions[visible == 0] = -1
    columns = torch.arange(table.shape[1], device=scores.device)
    used = columns < -(-visible // PAGE_ROWS).unsqueeze(1)
    choose_rows(
        scores.masked_fill(unseen, torch.nan),
        positions,
        torch.where(used, table, 2**30),
        out,
        plan,
        ratio=RATIO,
        rows_per_page=PAGE_ROWS,
    )
    return out.cpu()


def page_tables(num_rows: int, width: int, device: str) -> Tensor:
    pages = -(-width // PAGE_ROWS)
    return torch.randperm(num_rows * pages, device=device).view(num_rows, pages).int()


def draw(kind: str, shape: tuple[int, int], device: str) -> Tensor:
    values = torch.randn(shape, device=device)
    match kind:
        case "normal":
            return values
        case "relu":
            return values.clamp(min=0)
        case "signed zeros":
            return torch.where(values > 0, 0.0, -0.0)
        case "few above zero":
            return torch.where(values > 1.9, values, 0.0)
        case "equal":
            return torch.full(shape, 1.5, device=device)
        case "narrow":
            return 5 + 0.001 * values
        case "clustered":
            return values.sort(dim=1, descending=True).values.contiguous()
        case _:
            return -values.exp()


KINDS = [
    "normal",
    "relu",
    "few above zero",
    "signed zeros",
    "equal",
    "narrow",
    "clustered",
    "negative",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short", [32, 1000], ids=["long", "general"])
def test_lists_equal_the_twin(device: str, kind: str, short: int) -> None:
    """Lengths below k, of one part of a row, and ending inside and at the end of another part.

    Rows of equal scores, and sorted ones, have more at their floor than the lists may hold.
    """
    torch.manual_seed(len(kind))
    k, width, part = 5, 192, 64
    lengths = [0, 5, 6, 63, 64, 66, 71, 191, 192]
    scores = draw(kind, (len(lengths), width), device)
    table = page_tables(len(lengths), width, device)
    visible = torch.tensor(lengths, device=device)
    got = chosen(scores, visible, table, k, part, short)
    assert got.tolist() == expected(scores, visible, table, k).tolist()


@pytest.mark.parametrize("k", [1, 2, 16])
def test_any_k(device: str, k: int) -> None:
    torch.manual_seed(k)
    scores = draw("relu", (3, 128), device)
    table = page_tables(3, 128, device)
    visible = torch.tensor([128, k, k + 1], device=device)
    got = chosen(scores, visible, table, k, 32, 64)
    assert got.tolist() == expected(scores, visible, table, k).tolist()


def test_queries_of_one_sequence_share_its_pages(device: str) -> None:
    scores = draw("normal", (4, 64), device)
    table = page_tables(2, 64, device)
    sequences = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=device)
    visible = torch.tensor([9, 40, 64, 3], device=device)
    plan = TopkPlan.make(4, 64, 4, scores.device)
    out = torch.empty((4, 4), dtype=torch.int32, device=device)
    choose_rows(
        scores,
        (visible * RATIO - 1).int(),
        table,
        out,
        plan,
        ratio=RATIO,
        rows_per_page=PAGE_ROWS,
        sequences=sequences,
    )
    assert out.tolist() == expected(scores, visible, table[sequences.long()], 4).tolist()


def test_a_plan_says_what_it_cannot_hold(device: str) -> None:
    with pytest.raises(LayoutMismatch, match="1 to 1024"):
        TopkPlan.make(1, 64, 1025, torch.device(device))
    plan = TopkPlan.make(1, 64, 4, torch.device(device))
    scores = torch.zeros(2, 64, device=device)
    table = torch.zeros(2, 8, dtype=torch.int32, device=device)
    spare = torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(LayoutMismatch, match="exceed the plan"):
        choose_rows(scores, spare[:, 0], table, spare, plan, ratio=4, rows_per_page=PAGE_ROWS)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "width", "short"),
    [
        (512, 8192, 8192),
        (512, 20000, 8192),
        (512, 131072, 8192),
        (512, 131072, 131072),
        (1024, 8192, 8192),
        (1024, 20000, 8192),
    ],
)
def test_lists_equal_the_twin_at_full_size(kind: str, k: int, width: int, short: int) -> None:
    torch.manual_seed(width + k + short)
    lengths = [0, 1, k - 1, k, k + 1, 2 * k + 3, width // 2 + 1, width - 3, width]
    scores = draw(kind, (len(lengths), width), "cuda")
    table = page_tables(len(lengths), width, "cuda")
    visible = torch.tensor(lengths, device="cuda").clamp(max=width)
    got = chosen(scores, visible, table, k, 16384, short)
    assert torch.equal(got, expected(scores, visible, table, k))
