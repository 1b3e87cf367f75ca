"""What a log's first line says of the engine, and what its transfers have to move."""

from typing import final

from kvlease.protocols.events import ComponentFacts, LayerRun, LogOpen


@final
class Head:
    """What the first line says, in the forms that the rules ask for.

    Attributes:
        every_layer: one bit a layer.
        tells_ran: whether the device tells when it has come to the end of a step's work.
        has_tails: whether computing can resume at kept tails only (R5).
        bundles: what a transfer has to move: of nothing, of pages, of tails, of both.
    """

    def __init__(self, event: LogOpen) -> None:
        """Read the head."""
        self.event = event
        self.page_tokens = event.page_tokens
        self.num_layers = event.num_layers
        self.every_layer = (1 << event.num_layers) - 1
        tells = None if event.ports is None else event.ports.get("tells")
        self.tells_ran = isinstance(tells, list) and "step.ran" in tells
        self.has_tails = any(c.kind == "tail" for c in event.components)
        moved: tuple[tuple[str, ...], ...] = ((), ("span",), ("tail",), ("span", "tail"))
        self.bundles = [
            Bundle([c for c in event.components if c.kind in kinds and c.nbytes], self.num_layers)
            for kinds in moved
        ]


@final
class Bundle:
    """The components that a transfer has to move, and their bytes, by layer.

    Attributes:
        names: of all components, sorted.
        layer_mask: layers that have bytes to move, one bit each, between ``first_layer`` and
            ``end_layer``.
        one_layer: those layers, by the run that names one of them.
        span_nbytes, tail_nbytes: by layer, of one page and of one tail.
    """

    def __init__(self, parts: list[ComponentFacts], num_layers: int) -> None:
        """Sum up the head's components."""
        self.names = sorted({part.name for part in parts})
        self.layer_mask = 0
        self.layer_names: list[list[str]] = [[] for _ in range(num_layers)]
        self.span_nbytes = [0] * num_layers
        self.tail_nbytes = [0] * num_layers
        for part in parts:
            column = self.span_nbytes if part.kind == "span" else self.tail_nbytes
            for layer in part.layers:
                self.layer_mask |= 1 << layer
                column[layer] += part.nbytes
                if part.name not in self.layer_names[layer]:
                    self.layer_names[layer].append(part.name)
        self.end_layer = self.layer_mask.bit_length()
        lowest = self.layer_mask & -self.layer_mask
        self.first_layer = lowest.bit_length() - 1 if lowest else num_layers
        self.one_layer: dict[LayerRun, int] = {
            (layer, 1): layer for layer, names in enumerate(self.layer_names) if names
        }
        self.num_parts = sum(len(names) for names in self.layer_names)
        self.all_spans = sum(self.span_nbytes)
        self.all_tails = sum(self.tail_nbytes)
