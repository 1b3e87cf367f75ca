"""The options of the command line, and the engine configuration that they describe.

Values are checked by `EngineConfig`; here only their spelling is. This module starts nothing and
loads no torch.
"""

import argparse
from typing import Literal

from attrs import frozen

from kvlease.errors import BadInput, ConfigError
from kvlease.protocols.config import Compute, Device, EngineConfig, Eviction, WritePolicy
from kvlease.protocols.event_base import Level
from kvlease.protocols.geometries import ComputeDtype, StoreFormat

PRESSED_PAGES = 192
"""Device pages of the built-in workload on the embedded model: too few for 64 sessions, on purpose,
so that prefixes are evicted and restored."""
TRACE_DEVICE_PAGES, TRACE_HOST_PAGES = 16384, 65536
"""Pages without the model's arithmetic: they cost next to nothing then, and fit whole traces."""
MAX_SESSIONS = 65536
"""More concurrent sessions than this are refused: each is a task of its own."""
_DEFAULTS = EngineConfig()


@frozen
class CommonOptions:
    """What every serving command takes; ``None`` leaves the choice to the engine."""

    model: str | None
    device: Device
    dtype: ComputeDtype
    kv_format: StoreFormat
    index_k_format: StoreFormat
    page_tokens: int | None
    device_pages: int | None
    host_pages: int | None
    tail_every: int
    write_policy: WritePolicy
    eviction: Eviction
    sessions: int
    seed: int
    exact: bool | None
    audit_rate: float
    log: str | None
    log_level: Level
    json: str | None
    log_prompts: bool = False
    decode_ahead: int | None = None

    def config(
        self,
        *,
        device_pages: int | None = None,
        host_pages: int | None = None,
        compute: Compute = "model",
        verify: bool = False,
    ) -> EngineConfig:
        """Build the engine's configuration.

        Args:
            device_pages: the command's own default, where it has one.
            host_pages: likewise.
            compute: whether the model's arithmetic is done.
            verify: makes the run exact and keeps a hash of every row of logits.

        Raises:
            ConfigError: a value cannot work.
        """
        if not 1 <= self.sessions <= MAX_SESSIONS:
            raise ConfigError(
                f"sessions is {self.sessions}; give a number from 1 to {MAX_SESSIONS}"
            )
        exact = self.exact if self.exact is not None else self.device == "cpu"
        open_size = _DEFAULTS.device_pages if self.device == "cpu" else 0
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            kv_format=self.kv_format,
            index_k_format=self.index_k_format,
            page_tokens=self.page_tokens,
            device_pages=_first(self.device_pages, device_pages, open_size),
            host_pages=_first(self.host_pages, host_pages, _DEFAULTS.host_pages),
            tail_every=self.tail_every,
            write_policy=self.write_policy,
            eviction=self.eviction,
            max_sessions=self.sessions,
            exact=exact or verify,
            seed=self.seed,
            compute=compute,
            digests=verify,
            audit_rate=self.audit_rate,
            log_prompts=self.log_prompts,
            decode_ahead=self.decode_ahead,
        )


def _first(*choices: int | None) -> int:
    return next(choice for choice in choices if choice is not None)


@frozen
class RunOptions:
    """What `kvlease run` takes beside the common options."""

    common: CommonOptions
    trace: str | None
    limit: int | None
    scale: int
    turns: int
    compute: Compute
    verify: bool

    def __attrs_post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        if self.verify and self.compute == "none":
            raise BadInput("--verify compares answers, and --compute none makes none; drop one")
        if self.verify and self.common.exact is False:
            raise BadInput("--verify needs the exact mode; drop --no-exact")
        if self.trace is None and (self.limit is not None or self.scale != 1):
            raise BadInput("--limit and --scale are about a trace; give one with --trace FILE")

    def config(self) -> EngineConfig:
        """Build the engine's configuration; raises ConfigError."""
        if self.compute == "none":
            return self.common.config(
                device_pages=TRACE_DEVICE_PAGES, host_pages=TRACE_HOST_PAGES, compute="none"
            )
        is_built_in = self.trace is None and self.common.model is None
        return self.common.config(
            device_pages=PRESSED_PAGES if is_built_in else None, verify=self.verify
        )


@frozen
class ReplayOptions:
    """What `kvlease replay` takes; ``log`` is a path, or ``-`` for standard input."""

    log: str
    json: str | None
    html: str | None
    perfetto: str | None
    rerun: bool
    model: str | None


@frozen
class DoctorOptions:
    """What `kvlease doctor` takes."""

    json: str | None


@frozen
class GenerateOptions:
    """What `kvlease generate` takes beside the common options."""

    common: CommonOptions
    text: str | None
    tokens_file: str | None
    max_tokens: int
    min_tokens: int
    ignore_eos: bool

    def config(self) -> EngineConfig:
        """Build the engine's configuration; raises ConfigError."""
        return self.common.config()


def add_common(parser: argparse.ArgumentParser, *, sessions: int) -> None:
    """Add the options that every serving command takes."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="DIR",
        help="folder of a Hugging Face deepseek_v4 checkpoint (default: the embedded small model)",
    )
    model.add_argument("--device", choices=["cpu", "cuda"], default=_DEFAULTS.device)
    model.add_argument(
        "--dtype",
        choices=["float64", "float32", "bfloat16"],
        default=_DEFAULTS.dtype,
        help="what the model computes in (default: %(default)s)",
    )
    model.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="answers are the same bit for bit however they were batched, cached and restored "
        "(default: on for cpu, off for cuda)",
    )
    model.add_argument(
        "--seed", type=int, metavar="N", default=_DEFAULTS.seed, help="of weights and workload"
    )
    _add_cache(parser.add_argument_group("cache"))
    _add_running(parser.add_argument_group("running and logging"), sessions)
    add_json(parser)


def _add_running(about_run: "argparse._ArgumentGroup", sessions: int) -> None:
    about_run.add_argument(
        "--sessions",
        type=int,
        metavar="N",
        default=sessions,
        help="how many are served at the same time (default: %(default)s)",
    )
    about_run.add_argument(
        "--decode-ahead",
        type=int,
        metavar="N",
        help="tokens that a step draws of each answer before they are handed out, while all draw "
        "greedily and nobody prefills (default: 4 on cuda with --no-exact, else 1)",
    )
    about_run.add_argument(
        "--audit-rate",
        type=float,
        metavar="R",
        default=_DEFAULTS.audit_rate,
        help="share of cached pages, 0 to 1, whose bytes are summed when full and compared "
        "before a request reads them; a page that changed is named and computed again "
        "(default: %(default)s)",
    )
    about_run.add_argument("--log", metavar="FILE", help="write the event log as JSON lines")
    about_run.add_argument(
        "--log-level",
        choices=["off", "normal", "audit"],
        help="off; normal: requests, actors and what went wrong; audit: everything that replay "
        "needs (default: audit with --log, else off; normal without --log prints to stderr)",
    )
    about_run.add_argument(
        "--log-prompts",
        action="store_true",
        help="write prompts into the log too, so that `replay --rerun` can ask them again",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that every command takes."""
    parser.add_argument("--json", metavar="FILE", help="write the result as one JSON object")


def _add_cache(cache: "argparse._ArgumentGroup") -> None:
    for name, what in (("--kv-format", "latent rows"), ("--index-k-format", "index keys")):
        cache.add_argument(
            name,
            choices=["bf16", "fp8", "same"],
            default="same",
            help=f"how {what} are stored; same: the compute dtype (default: %(default)s)",
        )
    cache.add_argument(
        "--page-tokens",
        type=int,
        metavar="N",
        help="tokens of a page, a multiple of every compression ratio (default: the model's)",
    )
    cache.add_argument(
        "--device-pages",
        type=int,
        metavar="N",
        help=f"size of the device tier (default: {_DEFAULTS.device_pages} on the CPU, what the "
        f"model leaves free on a CUDA device, also called 0; for run {PRESSED_PAGES} with the "
        f"built-in workload, to press it, and {TRACE_DEVICE_PAGES} with --compute none, to fit "
        "whole traces)",
    )
    cache.add_argument(
        "--host-pages",
        type=int,
        metavar="N",
        help=f"size of the host tier, 0 for none (default: {_DEFAULTS.host_pages}; "
        f"{TRACE_HOST_PAGES} with --compute none)",
    )
    cache.add_argument(
        "--tail-every",
        type=int,
        metavar="N",
        default=_DEFAULTS.tail_every,
        help="pages between kept tails, where computing can resume (default: %(default)s)",
    )
    cache.add_argument(
        "--write-policy",
        choices=["through", "selective", "back"],
        default=_DEFAULTS.write_policy,
        help="when pages are copied to the host (default: %(default)s)",
    )
    cache.add_argument(
        "--eviction",
        choices=["lru", "s3fifo"],
        default=_DEFAULTS.eviction,
        help="which pages go first (default: %(default)s)",
    )


def common_of(space: argparse.Namespace) -> CommonOptions:
    """Read the common options from what argparse found.

    Raises:
        BadInput: the log options contradict each other.
    """
    level: Literal["off", "normal", "audit"] | None = space.log_level
    if level == "audit" and space.log is None:
        raise BadInput("--log-level audit is for a file; say which with --log FILE")
    if space.log_prompts and space.log is None:
        raise BadInput("--log-prompts is about the event log; write one with --log FILE")
    return CommonOptions(
        model=space.model,
        device=space.device,
        dtype=space.dtype,
        kv_format=space.kv_format,
        index_k_format=space.index_k_format,
        page_tokens=space.page_tokens,
        device_pages=space.device_pages,
        host_pages=space.host_pages,
        tail_every=space.tail_every,
        write_policy=space.write_policy,
        eviction=space.eviction,
        sessions=space.sessions,
        seed=space.seed,
        exact=space.exact,
        audit_rate=space.audit_rate,
        log=space.log,
        log_level=level or ("off" if space.log is None else "audit"),
        json=space.json,
        log_prompts=space.log_prompts,
        decode_ahead=space.decode_ahead,
    )
