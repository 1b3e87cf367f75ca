"""The parameters of a simulated device, as plain data for logs and tables."""

import msgspec


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of the link between host and device; seconds, and bytes a second."""

    latency_s: float = 20e-6
    bytes_per_s: float = 10e9

    def seconds(self, nbytes: int) -> float:
        """Return what one group of copies costs."""
        return self.latency_s + nbytes / self.bytes_per_s


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters of a simulated device.

    Attributes:
        load, store: what a group of copies costs: its latency, and its bytes by the bandwidth. A
            load's group is a layer, a store's is the whole transfer.
        shares_link: whether loads and stores take turns on one link instead of having one each.
        step_s, token_s: a step costs so much, and so much more for each of its tokens, spread
            evenly over the layers.
    """

    load: LinkSpec = LinkSpec()
    store: LinkSpec = LinkSpec()
    shares_link: bool = False
    step_s: float = 1e-3
    token_s: float = 20e-6

    def step_seconds(self, num_tokens: int) -> float:
        """Return what a step of so many tokens costs."""
        return self.step_s + num_tokens * self.token_s
