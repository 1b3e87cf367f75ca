# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Where an attention kernel's keys are, how its work is cut, and its launch."""

import triton
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.attention_combine import combine
from kvlease.kernels.gpu.attention_core import Chosen, Partial, Queries, Turn, Window
from kvlease.kernels.gpu.attention_narrow import attend_narrow
from kvlease.kernels.gpu.attention_packed import attend_packed
from kvlease.kernels.gpu.attention_plain import attend_plain
from kvlease.kernels.gpu.attention_plan import Plan, Work, processors
from kvlease.kernels.gpu.attention_wide import attend_wide
from kvlease.kernels.gpu.early import early_launch

LOG2_E = 1.4426950408889634


@frozen
class Pool:
    """Rows of the cache in pages: plain (bf16 [pages, rows, D]) or packed (uint8).

    A packed row is D - rope e4m3 channels, the rope channels in bf16, and a scale byte for each 64
    quantised channels (padded to 8 bytes). Strides count elements of ``base``.

    Attributes:
        base: the memory, pages first.
        rope: channels of a packed row that are not quantised.
        page_rows: rows of a page.
        row_stride: from row to row inside a page.
        scale_start: from a page's start to its first row's scales.
        scale_stride: from one row's scales to the next one's.
    """

    base: Tensor
    rope: int
    page_rows: int
    row_stride: int
    scale_start: int = 0
    scale_stride: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether rows are e4m3 with scales."""
        return self.base.element_size() == 1

    @property
    def paged(self) -> int:
        """Rows of a page, or 0 where rows follow each other across pages, scales inside them.

        Raises:
            ValueError: rows cannot be read whole, since pages lie askew.
        """
        is_even = self.base.stride(0) == self.page_rows * self.row_stride
        if is_even and self.scale_stride in (0, self.row_stride):
            return 0
        stride = self.base.stride(0) * self.base.element_size()
        if stride % 16:
            raise ValueError(f"pages {stride} bytes apart; attention needs a multiple of 16")
        return self.page_rows


def pool_of(base: Tensor, width: int, rope: int) -> Pool:
    """Describe pages of rows that are each in one piece: [pages, rows, elements of a row]."""
    rows, stride = base.shape[1], base.stride(1)
    if base.element_size() != 1:
        return Pool(base, rope, rows, stride)
    return Pool(base, rope, rows, stride, width + rope, stride)


def planar_pool(base: Tensor, rows: int, width: int, rope: int) -> Pool:
    """Describe packed pages [pages, bytes] with all rows' channels first, then all their scales."""
    return Pool(base, rope, rows, width + rope, (width + rope) * rows, 8)


@frozen
class Ring:
    """The last keys of each sequence: base [slots, WINDOW, D], position p at row p % WINDOW.

    slots [N] int32: which ring is row n's.
    """

    base: Tensor
    slots: Tensor


@frozen
class Span:
    """Keys of the queries' own positions, in order: base [rows, D].

    own [N] int32: the row of query n's own position; its window ends there.
    """

    base: Tensor
    own: Tensor


@frozen
class Listed:
    """Rows of a pool by flat address (page * page_rows + row): index int32 [N, K], -1 for none."""

    pool: Pool
    index: Tensor


@frozen
class Visible:
    """Every row of a sequence's pages whose group of ``ratio`` tokens is complete.

    table [sequences, P] int32; row n reads the pages of sequence ``sequence[n]`` (None: n).
    """

    pool: Pool
    table: Tensor
    ratio: int
    sequence: Tensor | None = None


@frozen
class Rows:
    """Query rows: q, out [N, H, D]; sinks [H] float32; positions [N] int32, -1 for padding."""

    q: Tensor
    out: Tensor
    sinks: Tensor
    positions: Tensor
    scale: float


def launch(
    rows: Rows,
    window: Ring | Span | Listed | None,
    chosen: Listed | Visible | None,
    turn: Turn | None,
    plan: Plan,
    window_keys: int,
) -> None:
    """Attend every row to its keys, and join the shares where a row's keys are shared out."""
    num_rows, num_heads, width = rows.q.shape
    queries = Queries(rows.q, rows.out, rows.sinks, rows.positions, num_heads, rows.scale * LOG2_E)
    partial = Partial(None, None)
    if plan.splits > 1:
        shape = (num_rows, plan.splits, num_heads)
        float32 = rows.sinks.dtype
        partial = Partial(
            rows.q.new_empty((*shape, width), dtype=float32),
            rows.q.new_empty((*shape, 2), dtype=float32),
        )
    near, near_kind = _window(window)
    far, options = _chosen(chosen)
    rope = turn.cos.shape[1] * 2 if turn is not None else 0
    if chosen is not None and chosen.pool.is_packed:
        rope = chosen.pool.rope
    options |= {"D": width, "ROPE": rope, "SPLITS": plan.splits, "WINDOW": window_keys}
    options |= {"NEAR": near_kind, "TURN": turn is not None, "num_warps": plan.warps}
    options |= early_launch(combine)
    is_packed = "ROW" in options
    if is_packed:
        options["NEAR_PAGED"] = window.pool.paged if isinstance(window, Listed) else 0
    groups = triton.cdiv(num_heads, plan.heads)
    grid = num_rows, groups, plan.splits
    if plan.schedule == "wide":
        items = num_rows * groups * plan.splits
        grid = (min(items, processors(rows.q.device)),)
        attend_wide[grid](queries, near, far, turn, partial, items, groups, **options)
    elif plan.schedule == "narrow":
        work = work_of(rows, window, chosen, window_keys)
        options["TILES"] = -(-work.tiles(plan.keys) // plan.splits)
        options |= {"HEADS": plan.heads, "KEYS": plan.keys}
        attend_narrow[grid](queries, near, far, turn, partial, **options)
    else:
        options |= {"BLOCK_H": plan.heads, "BK": min(plan.keys, window_keys)}
        options["STAGES"] = plan.stages
        if is_packed:
            options |= zip("ABC", packed_parts(width - rope), strict=True)
        kernel = attend_packed if is_packed else attend_plain
        kernel[grid](queries, near, far, turn, partial, **options)
    if plan.splits > 1:
        _combine(queries, turn, partial, width, rope, plan.splits)


def _combine(
    queries: Queries,
    turn: Turn | None,
    partial: Partial,
    width: int,
    rope: int,
    splits: int,
) -> None:
    num_rows, num_heads, _ = queries.q.shape
    # a warp joins all channels of a head, or a fourth of them where few rows would idle the device
    enough = 512 if splits <= 4 else 1024
    part = width if num_rows * num_heads >= enough else max(width // 4, rope)
    combine[num_rows, num_heads, width // part](
        queries,
        turn,
        partial,
        D=width,
        ROPE=rope,
        SPLITS=splits,
        SPLITS_2=triton.next_power_of_2(splits),
        PART=part,
        STEP=8 if part == width else 32,
        TURN=turn is not None,
        # where joiners fill the device, what comes next would stand in their way
        NEXT=num_rows * num_heads < 2048,
        num_warps=1,
        **early_launch(combine),
    )


def work_of(
    rows: Rows, window: Ring | Span | Listed | None, chosen: Listed | Visible | None, near: int
) -> Work:
    """Return the sizes that a plan is made from."""
    num_rows, num_heads, width = rows.q.shape
    far = 0
    if isinstance(chosen, Listed):
        far = chosen.index.shape[1]
    elif chosen is not None:
        far = chosen.table.shape[1] * chosen.pool.page_rows
    is_packed = chosen is not None and chosen.pool.is_packed
    near = 0 if window is None else near
    return Work(num_rows, num_heads, width, near, far, is_packed, rows.q.device)


def _window(window: Ring | Span | Listed | None) -> tuple[Window, str]:
    if window is None:
        return Window(None, None, 0, 0, 0), "none"
    if isinstance(window, Listed):
        pool, index = window.pool, window.index
        stride, scale_at = pool.base.stride(0), pool.scale_start
        return Window(pool.base, index, index.shape[1], stride, scale_at), "list"
    if isinstance(window, Ring):
        return Window(window.base, window.slots, 0, 0, 0), "ring"
    return Window(window.base, window.own, 0, 0, 0), "span"


def _chosen(chosen: Listed | Visible | None) -> tuple[Chosen, dict[str, object]]:
    if chosen is None:
        nothing = Chosen(None, None, None, 0, 1, 0, 0)
        return nothing, {"CHOSEN": "none", "PAGE": 1, "PAGED": 0}
    pool = chosen.pool
    if isinstance(chosen, Listed):
        listed, sequence, ratio, kind = chosen.index, None, 1, "list"
    else:
        listed, sequence, ratio, kind = chosen.table, chosen.sequence, chosen.ratio, "table"
    far = Chosen(
        pool.base, listed, sequence, listed.shape[1], ratio, pool.base.stride(0), pool.scale_start
    )
    options: dict[str, object] = {"CHOSEN": kind, "PAGE": pool.page_rows, "PAGED": pool.paged}
    if pool.is_packed:
        options |= {"ROW": pool.row_stride, "SCALE_ROW": pool.scale_stride}
    return far, options


def packed_parts(channels: int) -> tuple[int, int, int]:
    """Cut so many quantised channels into three powers of two, 16 or more each.

    Raises:
        ValueError: there is no such cut.
    """
    parts = [1 << (channels - 32).bit_length() - 1 if channels >= 48 else 0]
    rest = channels - parts[0]
    parts.append(1 << (rest - 16).bit_length() - 1 if rest >= 32 else 0)
    last = rest - parts[1]
    if last < 16 or last & (last - 1):
        raise ValueError(
            f"{channels} quantised channels; three powers of two from 16 up are needed"
        )
    return parts[0], parts[1], last
