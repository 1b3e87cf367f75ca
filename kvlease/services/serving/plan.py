"""A configuration made ready: secrets read, addresses parsed, TLS loaded; nothing is started.

All that can be wrong without an engine is found here, so that `kvlease serve --check` finds it too.
"""

from __future__ import annotations

import os
import ssl
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen

from kvlease.errors import ConfigError
from kvlease.services.outputs import check_writable
from kvlease.services.rpc.address import Address, TcpAddress, parse_address
from kvlease.services.serving.config import ServeConfig
from kvlease.services.serving.tenants import Tenant, Tenants, salt_of

HTTP_PACKAGES = ("hypercorn", "jsonschema_rs", "prometheus_client", "starlette")


@frozen
class Plan:
    """What a server is started from."""

    config: ServeConfig
    tenants: Tenants
    addresses: tuple[Address, ...]
    tls: ssl.SSLContext | None
    http: TcpAddress | None


def make_plan(config: ServeConfig) -> Plan:
    """Read the files that a configuration names, and refuse what cannot be served.

    Raises:
        ConfigError: a file is missing or no good, or the server would be open to strangers.
    """
    if config.model is not None and not os.path.isdir(config.model):
        raise ConfigError(f"model {config.model} is no folder; give one with a config.json")
    if config.level == "audit" and config.log is None:
        raise ConfigError("log_level audit is for a file; say which with log")
    check_writable(config.log)
    tenants = Tenants(_tenants(config))
    addresses = tuple(_listen(text) for text in config.listen)
    if not addresses and config.http is None:
        raise ConfigError("listen is empty, so nobody could reach the server; give an address")
    http = None if config.http is None else _http(config.http)
    for address in (*addresses, *(() if http is None else (http,))):
        if not (tenants.needs_secret or address.is_local):
            raise ConfigError(
                f"{address} can be reached from other machines; give secret_file or tenants, so"
                " that not everybody is let in"
            )
    return Plan(config, tenants, addresses, _tls(config), http)


def _listen(text: str) -> Address:
    try:
        return parse_address(text)
    except ConfigError as error:
        raise ConfigError(f"listen: {error}") from error


def _http(text: str) -> TcpAddress:
    """Read the HTTP door's address, and see that its packages are there."""
    missing = [name for name in HTTP_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"http needs the packages {', '.join(missing)} (extra `serve`); install them"
        )
    try:
        address = parse_address(f"tcp://{text}")
    except ConfigError as error:
        raise ConfigError(f"http is {text!r}; give HOST:PORT") from error
    assert isinstance(address, TcpAddress), "it says so"
    return address


def _tenants(config: ServeConfig) -> list[Tenant]:
    found: list[Tenant] = []
    if config.secret_file is not None:
        found.append(Tenant(secret=_secret("secret_file", config.secret_file), is_admin=True))
    for place, section in enumerate(config.tenants):
        secret = _secret(f"tenants[{place}].secret_file", section.secret_file)
        if not section.name:
            raise ConfigError(f"tenants[{place}].name is empty; a tenant needs a name")
        found.append(
            Tenant(
                name=section.name,
                secret=secret,
                salt=salt_of(secret if section.salt is None else section.salt.encode()),
                is_admin=section.admin,
                max_streams=section.max_streams,
                device_pages=section.device_pages,
                host_pages=section.host_pages,
            )
        )
    return found


def _secret(key: str, path: str) -> bytes:
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{key}: cannot read the secret {path!r}: {reason}") from error
    if not secret:
        raise ConfigError(f"{key}: the secret file {path!r} is empty")
    return secret


def _tls(config: ServeConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError("tls_cert and tls_key go together; give both or none")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot load tls_cert {config.tls_cert} with tls_key {config.tls_key}: {reason}"
        ) from error
    return context
