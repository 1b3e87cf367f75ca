"""What `kvlease serve` can be told: one TOML file, the environment, and flags, in that order.

Every key has the same meaning in all three, and whoever is wrong is told which of them said it.
docs/serve.md lists them; this module starts nothing and loads neither torch nor trio.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias, cast

import attrs
import msgspec
from attrs import frozen
from msgspec import Meta

from kvlease.errors import ConfigError, KVLeaseError
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.event_base import Level
from kvlease.services.serving.limits import Limits

CACHE_EVENTS = 4096
"""Changes of cached pages that a server keeps for each tenant, unless told otherwise."""
_HIDDEN = frozenset({"tenant_salt", "poison", "digests", "prefix_cache"})
"""Of `EngineConfig`: what is not for operators."""
ENGINE_KEYS = tuple(f.name for f in attrs.fields(EngineConfig) if f.name not in _HIDDEN)

Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f]*\Z", max_length=1024)]
"""Of a file or an address: without control characters, as it has to fit in a sentence and a log."""
MAX_COMPLAINT = 300
"""Characters of a sentence about one value, which may itself be as long as a file."""


class TenantSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[tenants]]`` of the file."""

    name: str
    secret_file: Name
    salt: str | None = None
    """Keeps a tenant's pages its own when its secret changes; made of the secret by default."""
    admin: bool = False
    max_streams: int | None = None
    device_pages: int | None = None
    host_pages: int | None = None


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a server is told, checked."""

    listen: tuple[Name, ...] = ("tcp://127.0.0.1:7077",)
    http: Name | None = None
    model: Name | None = None
    secret_file: Name | None = None
    tls_cert: Name | None = None
    tls_key: Name | None = None
    log: Name | None = None
    log_level: Level | None = None
    tenants: tuple[TenantSection, ...] = ()
    engine: EngineConfig = EngineConfig()
    limits: Limits = Limits()

    @property
    def level(self) -> Level:
        """How much is logged: everything into a file, what people follow else."""
        return self.log_level or ("normal" if self.log is None else "audit")


@frozen
class Setting:
    """One key that the environment and a flag can set too.

    Attributes:
        key: its place in the file, with dots.
        flag: the long option.
        what: for the help, in one line.
        is_switch: whether the flag stands alone, with a ``--no-`` twin.
    """

    key: str
    flag: str
    what: str
    metavar: str = "N"
    is_switch: bool = False

    @property
    def variable(self) -> str:
        """Name of the environment's variable."""
        return "KVLEASE_" + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def dest(self) -> str:
        """Name under which argparse keeps the flag's text."""
        return self.key.replace(".", "__")


SETTINGS: tuple[Setting, ...] = (
    Setting("listen", "--listen", "tcp://HOST:PORT or unix://PATH; may be given again", "ADDRESS"),
    Setting("http", "--http", "where the OpenAI-compatible door listens", "HOST:PORT"),
    Setting("secret_file", "--secret-file", "file with the secret that clients prove", "FILE"),
    Setting("tls_cert", "--tls-cert", "certificate chain; TCP listeners speak TLS then", "FILE"),
    Setting("tls_key", "--tls-key", "its private key", "FILE"),
    Setting("model", "--model", "folder of a checkpoint (default: the embedded model)", "DIR"),
    Setting("log", "--log", "write the event log as JSON lines", "FILE"),
    Setting("log_level", "--log-level", "off, normal or audit", "LEVEL"),
    Setting("engine.device", "--device", "cpu or cuda", "DEVICE"),
    Setting("engine.dtype", "--dtype", "float64, float32 or bfloat16", "DTYPE"),
    Setting("engine.kv_format", "--kv-format", "latent rows: bf16, fp8 or same", "FORMAT"),
    Setting("engine.index_k_format", "--index-k-format", "index keys, likewise", "FORMAT"),
    Setting("engine.exact", "--exact", "answers do not depend on batching (cpu: on)", "", True),
    Setting("engine.seed", "--seed", "of the embedded model's weights"),
    Setting("engine.compute", "--compute", "model, or none for all but the arithmetic", "WHAT"),
    Setting("engine.page_tokens", "--page-tokens", "tokens of a page"),
    Setting("engine.device_pages", "--device-pages", "size of the device tier"),
    Setting("engine.host_pages", "--host-pages", "size of the host tier, 0 for none"),
    Setting("engine.tail_every", "--tail-every", "pages between kept tails"),
    Setting("engine.write_policy", "--write-policy", "through, selective or back", "POLICY"),
    Setting("engine.eviction", "--eviction", "lru or s3fifo", "POLICY"),
    Setting("engine.max_sessions", "--sessions", "answers computed at the same time"),
    Setting("engine.max_queue", "--max-queue", "answers that wait for their turn"),
    Setting("engine.chunk_tokens", "--chunk-tokens", "prompt tokens that one step takes"),
    Setting("engine.decode_ahead", "--decode-ahead", "tokens of each answer a step may draw"),
    Setting("engine.request_timeout_s", "--request-timeout", "for one answer", "SECONDS"),
    Setting("engine.load_timeout_s", "--load-timeout", "for one load from a tier", "SECONDS"),
    Setting("engine.audit_rate", "--audit-rate", "share of pages that are summed", "RATE"),
    Setting("engine.log_prompts", "--log-prompts", "write prompts into the log", "", True),
    Setting("engine.cache_events", "--cache-events", "changes of pages kept for subscribers"),
    Setting("engine.compile_ahead", "--compile-ahead", "compile kernels at the start", "", True),
    Setting("limits.max_connections", "--max-connections", "clients at a time"),
    Setting("limits.max_streams", "--max-streams", "answers under way, queued ones too"),
    Setting("limits.max_streams_per_client", "--max-streams-per-client", "of one client"),
    Setting("limits.max_prompt_tokens", "--max-prompt-tokens", "longest prompt"),
    Setting("limits.max_frame_bytes", "--max-frame-bytes", "longest RPC frame"),
    Setting("limits.handshake_timeout_s", "--handshake-timeout", "to prove oneself", "SECONDS"),
    Setting("limits.frame_timeout_s", "--frame-timeout", "from first to last byte", "SECONDS"),
    Setting("limits.idle_timeout_s", "--idle-timeout", "without a frame or a ping", "SECONDS"),
    Setting("limits.write_timeout_s", "--write-timeout", "to take what was written", "SECONDS"),
    Setting(
        "limits.slow_reader_timeout_s", "--slow-reader-timeout", "to take an answer", "SECONDS"
    ),
    Setting("limits.drain_timeout_s", "--drain-timeout", "for answers at the end", "SECONDS"),
)
CONFIG_VARIABLE = "KVLEASE_CONFIG"
_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"^Object contains unknown field `(.*)`$")


@frozen
class Said:
    """What the environment or a flag said of a key."""

    text: str | list[str]
    origin: str


def read_config(
    path: str | None, environment: Mapping[str, str], flags: Mapping[str, str | list[str]]
) -> ServeConfig:
    """Put a configuration together: the file, then the environment, then flags (by key).

    Raises:
        ConfigError: a key is unknown or a value cannot be; the sentence names the key and who said
            it.
    """
    path = path or environment.get(CONFIG_VARIABLE)
    tree = {} if path is None else _read_file(path)
    if path is not None:
        _convert(_with_defaults(tree), path, strict=True)
    said = _environment(environment)
    for setting in SETTINGS:
        if setting.key in flags:
            said[setting.key] = Said(flags[setting.key], setting.flag)
    for key, value in said.items():
        _put(tree, key, value.text)
    return _convert(_with_defaults(tree), path or "", said=said)


def _read_file(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def _environment(environment: Mapping[str, str]) -> dict[str, Said]:
    """Take the variables that begin with KVLEASE_; one that is none of ours is a mistake."""
    known = {setting.variable: setting for setting in SETTINGS}
    said: dict[str, Said] = {}
    for name, text in sorted(environment.items()):
        if not name.startswith("KVLEASE_") or name == CONFIG_VARIABLE:
            continue
        setting = known.get(name)
        if setting is None:
            raise ConfigError(f"the environment sets {name}, which is no setting of kvlease serve")
        is_list = setting.key == "listen"
        said[setting.key] = Said([s for s in text.split(",") if s] if is_list else text, name)
    return said


def _put(tree: dict[str, object], key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    place = tree
    if section:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            return  # the file's own mistake, which has been told
        place = cast("dict[str, object]", inner)
    place[name] = value


def _with_defaults(tree: dict[str, object]) -> dict[str, object]:
    """Add what a server wants otherwise than a library does."""
    engine = tree.get("engine", {})
    if not isinstance(engine, dict):
        return tree
    given = cast("dict[str, object]", engine)
    added: dict[str, object] = {"cache_events": CACHE_EVENTS}
    if given.get("device") == "cuda":
        added |= {"exact": False, "device_pages": 0}  # 0: all that the model leaves free
    return {**tree, "engine": {**added, **given}}


def _convert(
    tree: dict[str, object],
    path: str,
    *,
    strict: bool = False,
    said: Mapping[str, Said] | None = None,
) -> ServeConfig:
    """Check a whole tree; ``said`` tells who gave a key, if not the file."""
    origins = said or {}

    def refuse(key: str, what: str) -> ConfigError:
        who = origins[key].origin if key in origins else path
        what = what if len(what) <= MAX_COMPLAINT else f"{what[:MAX_COMPLAINT]}..."
        return ConfigError(f"{who}: {key}: {what}" if key else f"{who}: {what}")

    engine = tree["engine"]
    for name in cast("dict[str, object]", engine if isinstance(engine, dict) else {}):
        if name not in ENGINE_KEYS:
            raise refuse(f"engine.{name}", f"there is no such key; known are {_some(name)}")
    try:
        return msgspec.convert(tree, ServeConfig, strict=strict)
    except msgspec.ValidationError as error:
        key, what = _place(str(error))
        raise refuse(key, what) from None
    except KVLeaseError as error:
        what = str(error).removeprefix("limits.")
        name = what.split(" ", 1)[0]
        key = f"engine.{name}" if name in ENGINE_KEYS else f"limits.{name}"
        raise refuse(key, what) from None


def _place(message: str) -> tuple[str, str]:
    """Split one of msgspec's messages into the key that it is about and what it says of it."""
    at = _AT.search(message)
    key, what = (at.group(1), message[: at.start()]) if at else ("", message)
    unknown = _FIELD.match(what)
    if unknown:
        name = unknown.group(1)
        return f"{key}.{name}" if key else name, "there is no such key"
    return key, what.replace(" | null`", "`")  # left out is what none is here; TOML has no null


def default_of(key: str) -> str:
    """Return what holds where nobody says anything of a key, as people write it; empty for none."""
    value: object = _convert(_with_defaults({}), "")
    for name in key.split("."):
        value = getattr(value, name)
    if isinstance(value, tuple):
        return ", ".join(cast("tuple[str, ...]", value))
    return "" if value is None else str(value)


def _some(name: str) -> str:
    close = [key for key in ENGINE_KEYS if key[:3] == name[:3]]
    return ", ".join(close or ENGINE_KEYS)
