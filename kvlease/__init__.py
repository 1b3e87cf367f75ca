"""kvlease: an async runtime with typed leases for serving models from a hierarchical KV cache.

Public names load on first use, so that ``import kvlease`` brings in no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvlease.version import __version__ as __version__

if TYPE_CHECKING:
    from kvlease.errors import BadInput as BadInput
    from kvlease.errors import ConnectionLost as ConnectionLost
    from kvlease.errors import EngineFull as EngineFull
    from kvlease.errors import KVLeaseError as KVLeaseError
    from kvlease.errors import Refused as Refused
    from kvlease.errors import RequestFailed as RequestFailed
    from kvlease.protocols.config import EngineConfig as EngineConfig
    from kvlease.protocols.config import SamplingParams as SamplingParams
    from kvlease.runtime.engine import Engine as Engine
    from kvlease.runtime.engine import open_engine as open_engine
    from kvlease.runtime.event_log import EventLog as EventLog
    from kvlease.services.rpc.client import Client as Client
    from kvlease.services.rpc.client import connect as connect


_HOMES = {
    "BadInput": "kvlease.errors",
    "Client": "kvlease.services.rpc.client",
    "ConnectionLost": "kvlease.errors",
    "Engine": "kvlease.runtime.engine",
    "EngineConfig": "kvlease.protocols.config",
    "EngineFull": "kvlease.errors",
    "EventLog": "kvlease.runtime.event_log",
    "KVLeaseError": "kvlease.errors",
    "Refused": "kvlease.errors",
    "RequestFailed": "kvlease.errors",
    "SamplingParams": "kvlease.protocols.config",
    "connect": "kvlease.services.rpc.client",
    "open_engine": "kvlease.runtime.engine",
}


def __getattr__(name: str) -> object:
    """Load a public name from its home module the first time it is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvlease' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """List the public names without loading them."""
    return sorted([*_HOMES, "__version__"])
