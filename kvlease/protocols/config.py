"""What a user can set about an engine and about one request, with the checks beside the fields.

Every refusal is one sentence that names the field and its value. Defaults suit the embedded model
on a CPU; the command line's flags have the same names.
"""

from typing import Literal

from attrs import frozen

from kvlease.errors import ConfigError, PromptError
from kvlease.protocols.geometries import ComputeDtype, StoreFormat

WritePolicy = Literal["through", "selective", "back"]
Eviction = Literal["lru", "s3fifo"]
Device = Literal["cpu", "cuda"]
Compute = Literal["model", "none"]

MAX_TIMEOUT_S = 1e9
"""Some thirty years; longer ones do not fit the log's nanoseconds."""
MAX_PAGES = 2**31 - 1
"""Page numbers are 32 bits wide in the books."""
_COUNTS = (
    "page_tokens", "device_pages", "host_pages", "device_tails", "host_tails", "tail_every",
    "max_sessions", "max_queue", "chunk_tokens", "decode_ahead", "cache_events",
)  # fmt: skip
"""Of `EngineConfig`: what memory, a queue or a step is sized by."""


@frozen
class EngineConfig:
    """How an engine lays out its pools and runs its steps.

    Sizes are pages of ``page_tokens`` tokens; times are seconds. None lets the engine choose:
    ``page_tokens`` 64 for the embedded model and 256 else, ``chunk_tokens`` (prompt tokens a
    prefill step takes) 256 with arithmetic and 65536 without, tails from pages and ``tail_every``,
    ``decode_ahead`` (tokens of one answer that a decode step may draw before they are handed out,
    while all draw greedily and nobody prefills) 4 on a CUDA device unless ``exact``, else 1.
    ``device_pages`` 0, on a CUDA device, takes what the model leaves free there; ``host_pages`` 0
    switches the host tier off; ``prefix_cache`` False gives every request a cold
    run; ``digests`` hashes each sampled row of logits; ``log_prompts`` writes prompts into the
    event log, so that it can be run again; ``poison`` fills unwritten memory with NaN bytes, for
    tests; ``audit_rate`` is the share of cached pages that are summed when they seal and compared
    when they are read, 0 to 1; ``cache_events`` is how many changes of cached pages are kept for
    those who follow them, for each tenant (0: none, and pages get no keys); ``compile_ahead``
    compiles a device's kernels when the engine opens, not when a request first needs one. Raises
    ConfigError.
    """

    device: Device = "cpu"
    dtype: ComputeDtype = "float32"
    kv_format: StoreFormat = "same"
    index_k_format: StoreFormat = "same"
    page_tokens: int | None = None
    device_pages: int = 512
    host_pages: int = 2048
    device_tails: int | None = None
    host_tails: int | None = None
    tail_every: int = 4
    write_policy: WritePolicy = "through"
    eviction: Eviction = "lru"
    max_sessions: int = 64
    max_queue: int = 1024
    chunk_tokens: int | None = None
    decode_ahead: int | None = None
    exact: bool = True
    seed: int = 0
    compute: Compute = "model"
    prefix_cache: bool = True
    digests: bool = False
    log_prompts: bool = False
    load_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    load_or_recompute: bool = True
    tenant_salt: bytes = b""
    poison: bool = False
    audit_rate: float = 0.0
    cache_events: int = 0
    compile_ahead: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse values that cannot work, naming the field."""
        for name in ("device_pages", "tail_every", "max_sessions", "max_queue"):
            value: int = getattr(self, name)
            is_open = name == "device_pages" and value == 0 and self.device == "cuda"
            if value < 1 and not is_open:
                raise ConfigError(f"{name} is {value}; give a number of 1 or more")
        if self.cache_events < 0:
            raise ConfigError(f"cache_events is {self.cache_events}; give 0 (none kept) or more")
        if self.host_pages < 0:
            raise ConfigError(f"host_pages is {self.host_pages}; give 0 (no host tier) or more")
        for name in ("page_tokens", "device_tails", "host_tails", "chunk_tokens", "decode_ahead"):
            optional: int | None = getattr(self, name)
            if optional is not None and optional < 1:
                raise ConfigError(f"{name} is {optional}; give a number of 1 or more")
        for name in _COUNTS:
            count: int | None = getattr(self, name)
            if count is not None and count > MAX_PAGES:
                raise ConfigError(f"{name} is {count}; give {MAX_PAGES} or fewer")
        if not 0 <= self.audit_rate <= 1:
            raise ConfigError(f"audit_rate is {self.audit_rate}; give a share from 0 to 1")
        for name in ("load_timeout_s", "request_timeout_s"):
            seconds: float = getattr(self, name)
            if not 0 < seconds <= MAX_TIMEOUT_S:
                raise ConfigError(
                    f"{name} is {seconds}; give seconds above 0, up to {MAX_TIMEOUT_S:.0f}:"
                    " every wait has an end"
                )


@frozen
class SamplingParams:
    """How one request wants its answer drawn.

    temperature 0 is greedy; top_k 0 and top_p 1.0 switch the filters off. ``min_tokens`` keeps EOS
    and ``stop_tokens`` away until so many tokens are out; ``ignore_eos`` goes on through EOS up to
    ``max_tokens``. ``logprobs`` n reports each token's log-probability and the n best others.
    Raises PromptError.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse values that cannot work, naming the field."""
        if self.max_tokens < 1:
            raise PromptError(f"max_tokens is {self.max_tokens}; give a number of 1 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise PromptError(
                f"min_tokens is {self.min_tokens}; give a number from 0 to max_tokens"
                f" ({self.max_tokens})"
            )
        if not self.temperature >= 0:
            raise PromptError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.top_k < 0:
            raise PromptError(f"top_k is {self.top_k}; give 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise PromptError(f"top_p is {self.top_p}; give a number above 0, up to 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise PromptError(f"logprobs is {self.logprobs}; give 0 or more")
