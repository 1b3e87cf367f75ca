"""Which layers a step over known memory is opened by."""

from attrs import evolve

from kvlease.kernels.models.opening import stand_for_all
from kvlease.protocols.geometries import LayerKind, V4Geometry, deepseek_v4_schema
from kvlease.protocols.schema import AnyLayer


def layers_of(*kinds: LayerKind) -> tuple[AnyLayer, ...]:
    return deepseek_v4_schema(V4Geometry(kinds, 64, 16, 32, 64), 256, "float32").layers


def test_the_shortest_rows_stand_for_all_that_end_with_one_of_them() -> None:
    layers = layers_of("sliding", "heavy", "sparse", "heavy", "sparse")
    assert stand_for_all(layers) == (layers[2],)
    assert stand_for_all(layers_of("sliding", "heavy")) == layers_of("sliding", "heavy")[1:]


def test_rows_that_end_elsewhere_are_opened_too() -> None:
    sparse, heavy = layers_of("sparse", "heavy")
    (span,) = heavy.spans
    odd = evolve(heavy, spans=(evolve(span, tokens_per_row=6),))
    assert stand_for_all((odd, sparse)) == (sparse, odd)


def test_where_nothing_is_kept_a_page_one_layer_is_opened() -> None:
    layers = layers_of("sliding", "sliding")
    assert stand_for_all(layers) == (layers[0],)
