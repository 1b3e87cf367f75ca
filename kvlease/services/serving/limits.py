"""The limits that hold at every door; over one of them the answer is a refusal, at once.

Names are keys of the configuration's ``[limits]`` and, with dashes, flags (docs/serve.md).
"""

import msgspec

from kvlease.errors import ConfigError

MAX_SECONDS = 2_000_000
"""Of any limit: the kernel counts some of them in milliseconds, in 32 bits."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what clients may ask for; times in seconds, sizes in bytes or tokens.

    A stream is one answer under way, from the call until the client has its last token.
    """

    max_connections: int = 1024
    max_streams: int = 1024
    max_streams_per_client: int = 512
    max_prompt_tokens: int = 1 << 20
    max_frame_bytes: int = 8 << 20
    handshake_timeout_s: float = 5.0
    frame_timeout_s: float = 20.0
    """From a frame's first byte to its last."""
    idle_timeout_s: float = 60.0
    """Without a whole frame; clients send pings to stay."""
    write_timeout_s: float = 20.0
    """For a client to take what was written to it."""
    slow_reader_timeout_s: float = 60.0
    """For a client to take an answer that is complete."""
    drain_timeout_s: float = 30.0
    """For answers under way to be completed and taken when the server ends."""

    def __post_init__(self) -> None:
        """Refuse bounds that would let nobody in."""
        for name in self.__struct_fields__:
            value: float = getattr(self, name)
            if name.endswith("_s") and not 0 < value <= MAX_SECONDS:
                raise ConfigError(
                    f"limits.{name} is {value}; give seconds above 0, up to {MAX_SECONDS}"
                )
            if value <= 0:
                raise ConfigError(f"limits.{name} is {value}; give a number above 0")
        if self.max_frame_bytes > 1 << 30:
            raise ConfigError(
                f"limits.max_frame_bytes is {self.max_frame_bytes}; give {1 << 30} or fewer"
            )
