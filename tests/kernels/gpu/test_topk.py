"""Top-k on the GPU equals its twin as lists, ties and all, and what is unseen may be anything."""

import pytest
import torch
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.gpu import topk
from kvlease.kernels.gpu.topk import choose_rows
from kvlease.kernels.topk import select_topk

RATIO = 4
PAGE_ROWS = 8
ON_GPU = torch.cuda.is_available()


def expected(
    scores: Tensor, visible: Tensor, table: Tensor, k: int, page_rows: int = PAGE_ROWS
) -> Tensor:
    """The twin's rows, translated through each row's page table."""
    rows = select_topk(scores.cpu(), visible.cpu(), k)
    pages = table.cpu().gather(1, (rows.clamp(min=0) // page_rows)).long()
    return torch.where(rows < 0, -1, pages * page_rows + rows % page_rows).int()


def chosen(
    scores: Tensor, visible: Tensor, table: Tensor, k: int, part: int, page_rows: int = PAGE_ROWS
) -> Tensor:
    """The kernel's rows; scores past the visible ones are NaN, table entries past them garbage."""
    num_rows, width = scores.shape
    out = torch.full((num_rows, k), -7, dtype=torch.int32, device=scores.device)
    unseen = torch.arange(width, device=scores.device) >= visible.unsqueeze(1)
    positions = (visible * RATIO + RATIO - 2).clamp(min=-1).int()
    positions[visible == 0] = -1
    columns = torch.arange(table.shape[1], device=scores.device)
    used = columns < -(-visible // page_rows).unsqueeze(1)
    pages = torch.where(used, table, 2**30)
    given = scores.masked_fill(unseen, torch.nan)
    if scores.is_cuda:
        torch.cuda.synchronize()  # positions and pages are read while kernels in front still end
    choose_rows(
        given,
        positions,
        pages,
        out,
        ratio=RATIO,
        rows_per_page=page_rows,
        part=part,
    )
    return out.cpu()


def page_tables(num_rows: int, width: int, device: str, page_rows: int = PAGE_ROWS) -> Tensor:
    pages = -(-width // page_rows)
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
        case "wide":
            return values * torch.exp2(torch.randint(-60, 60, shape, device=device).float())
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
    "wide",
    "clustered",
    "negative",
]


@pytest.mark.parametrize("kind", KINDS)
def test_lists_equal_the_twin(device: str, kind: str) -> None:
    """Rows of no more than k, of one part, and ending inside and at the end of another part."""
    torch.manual_seed(len(kind))
    k, width = 5, 300
    lengths = [0, 5, 129, 300]
    scores = draw(kind, (len(lengths), width), device)
    table = page_tables(len(lengths), width, device)
    visible = torch.tensor(lengths, device=device)
    got = chosen(scores, visible, table, k, 128)
    assert got.tolist() == expected(scores, visible, table, k).tolist()


@pytest.mark.parametrize("k", [1, 100, 200])
def test_any_k_and_pages_of_any_size(device: str, k: int) -> None:
    torch.manual_seed(k)
    scores = draw("relu", (2, 250), device)
    table = page_tables(2, 250, device, 2)
    visible = torch.tensor([250, k + 1], device=device)
    got = chosen(scores, visible, table, k, 1024, 2)
    assert got.tolist() == expected(scores, visible, table, k, 2).tolist()


def test_the_best_of_many_parts_are_chosen_in_several_turns(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk, "SLOTS", 128)
    torch.manual_seed(0)
    scores = draw("normal", (2, 500), device)
    table = page_tables(2, 500, device)
    visible = torch.tensor([500, 130], device=device)
    got = chosen(scores, visible, table, 60, 128)
    assert got.tolist() == expected(scores, visible, table, 60).tolist()


def test_queries_of_one_sequence_share_its_pages(device: str) -> None:
    scores = draw("normal", (4, 64), device)
    table = page_tables(1, 64, device).expand(4, -1)
    visible = torch.tensor([9, 40, 64, 3], device=device)
    positions = (visible * RATIO - 1).int()
    out = torch.empty((4, 4), dtype=torch.int32, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    choose_rows(
        scores,
        positions,
        table,
        out,
        ratio=RATIO,
        rows_per_page=PAGE_ROWS,
    )
    assert out.tolist() == expected(scores, visible, table, 4).tolist()


def test_more_than_it_can_choose_is_refused(device: str) -> None:
    scores = torch.zeros(1, 64, device=device)
    out = torch.zeros(1, 1025, dtype=torch.int32, device=device)
    with pytest.raises(LayoutMismatch, match="1 to 1024"):
        choose_rows(scores, out[:, 0], out, out, ratio=RATIO, rows_per_page=PAGE_ROWS)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "width", "part"),
    [
        (512, 8192, 16384),
        (512, 16384, 16384),
        (512, 20000, 16384),
        (512, 131072, 16384),
        (512, 131072, 2048),
        (1024, 8192, 16384),
        (1024, 20000, 8192),
        (100, 5001, 2048),
    ],
)
def test_lists_equal_the_twin_at_full_size(kind: str, k: int, width: int, part: int) -> None:
    torch.manual_seed(width + k + part)
    lengths = [0, 1, k - 1, k, k + 1, 2 * k + 3, width // 2 + 1, width - 3, width]
    scores = draw(kind, (len(lengths), width), "cuda")
    table = page_tables(len(lengths), width, "cuda")
    visible = torch.tensor(lengths, device="cuda").clamp(max=width)
    got = chosen(scores, visible, table, k, part)
    assert torch.equal(got, expected(scores, visible, table, k))
