"""The options of `kvlease serve`, as flags; what they mean is in `serving/config.py`.

Loads neither torch nor trio.
"""

import argparse
import os
from collections.abc import Mapping

from attrs import frozen

from kvlease.services.options import add_json
from kvlease.services.serving.config import (
    SETTINGS,
    ServeConfig,
    Setting,
    default_of,
    read_config,
)

SERVE = """\
Serve a model to other programs: over RPC (--listen), with tenants, limits, and an access
log in the event log. Settings come from --config FILE, then from the environment
(KVLEASE_ and the flag's name, as KVLEASE_MAX_STREAMS), then from flags; the later wins.
One line on standard output tells when and where it is ready. SIGTERM drains: answers under
way are completed within --drain-timeout, new ones refused; a second signal stops at once.
Exit status: 0 drained, 1 answers were cut short or pages leaked, 2 the configuration is
wrong, 130 interrupted.
"""
SERVE_EXAMPLES = """\
examples:
  kvlease serve --listen unix:///run/kvlease.sock
      one machine: whoever may open the socket is let in
  kvlease serve --listen tcp://0.0.0.0:7077 --secret-file secret --tls-cert c --tls-key k
      a network: clients prove that they know the secret
  kvlease serve --config kvlease.toml --check
      find what is wrong with a configuration, and start nothing
"""
_GROUPS = {"": "doors, model and log", "engine": "engine", "limits": "limits"}


@frozen
class ServeOptions:
    """What `kvlease serve` takes; ``flags`` are texts by key."""

    config_file: str | None
    check: bool
    json: str | None
    flags: Mapping[str, str | list[str]]

    def config(self) -> ServeConfig:
        """Put the configuration together, with this process's environment; raises ConfigError."""
        return read_config(self.config_file, os.environ, self.flags)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags; none has a default of its own, so that those of the file hold."""
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file with settings (docs/serve.md)"
    )
    parser.add_argument(
        "--check", action="store_true", help="check the configuration and start nothing"
    )
    add_json(parser)
    for section, title in _GROUPS.items():
        group = parser.add_argument_group(title)
        for setting in SETTINGS:
            if setting.key.rpartition(".")[0] == section:
                _add(group, setting)


def _add(group: "argparse._ArgumentGroup", setting: Setting) -> None:
    if setting.is_switch:
        group.add_argument(
            setting.flag,
            dest=setting.dest,
            action=argparse.BooleanOptionalAction,
            default=None,
            help=setting.what,
        )
        return
    shown = default_of(setting.key)
    group.add_argument(
        setting.flag,
        dest=setting.dest,
        metavar=setting.metavar,
        action="append" if setting.key == "listen" else "store",
        help=f"{setting.what} (default: {shown})" if shown else setting.what,
    )


def serve_options(space: argparse.Namespace) -> ServeOptions:
    """Read the options from what argparse found."""
    flags: dict[str, str | list[str]] = {}
    for setting in SETTINGS:
        value: str | list[str] | bool | None = getattr(space, setting.dest)
        if value is not None:
            flags[setting.key] = str(value).lower() if isinstance(value, bool) else value
    return ServeOptions(space.config, space.check, space.json, flags)
