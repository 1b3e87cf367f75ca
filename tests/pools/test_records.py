"""Components inside records are ordinary tensors that share no byte."""

import torch

from kvlease.pools.records import Records
from kvlease.pools.storage import row_shape, span_components
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema
from kvlease.protocols.host_layout import page_groups

GEOMETRY = V4Geometry(("heavy", "sparse", "sliding", "sparse"), 96, 32, 36, 8, heavy_ratio=8)


def test_each_component_keeps_what_was_written_to_it_alone() -> None:
    schema = deepseek_v4_schema(GEOMETRY, 8, "float32", "fp8", "fp8")
    records = Records(page_groups(schema), 5, lambda n: torch.zeros(n, dtype=torch.uint8))
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, span in span_components(schema):
        dtype, length = row_shape(span.format)
        rows = schema.rows_per_page(span)
        view = records.component(layer, span.name, dtype, (rows, length))
        assert view.shape == (5, rows, length)
        assert view[0].is_contiguous()
        values = torch.randint(1, 100, view.shape).to(dtype)
        view.copy_(values)
        written.append((view, values))
    for view, values in written:
        assert torch.equal(view, values)
    assert int((records.memory != 0).sum()) <= 5 * schema.page_nbytes
