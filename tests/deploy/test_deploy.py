"""The files under deploy/ cannot be run here, so they are read as their programs read them."""

from __future__ import annotations

import configparser
import json
import re
import tomllib

import msgspec

from kvlease.protocols.config import EngineConfig
from kvlease.runtime.engine import open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.metrics import metrics_of
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenants
from tests.tidy.rules import ROOT

DEPLOY = ROOT / "deploy"


class Target(msgspec.Struct):
    refId: str
    expr: str
    legendFormat: str


class Panel(msgspec.Struct):
    id: int
    type: str
    title: str
    gridPos: dict[str, int]
    targets: list[Target] = []


class Dashboard(msgspec.Struct):
    title: str
    uid: str
    schemaVersion: int
    panels: list[Panel]


async def test_the_dashboard_shows_figures_that_exist() -> None:
    """A panel that asks for a figure that nobody tells stays empty, and nobody notices."""
    raw = (DEPLOY / "grafana" / "kvlease.json").read_bytes()
    board = msgspec.json.decode(raw, type=Dashboard)
    assert len({panel.id for panel in board.panels}) == len(board.panels)
    asked = {
        name
        for panel in board.panels
        for target in panel.targets
        for name in re.findall(r"kvlease_\w+", target.expr)
    }
    log = EventLog(level="off")
    async with open_engine(None, EngineConfig(compute="none"), log=log) as engine:
        service = Service(engine, Tenants(), Limits(), log)
        told = metrics_of(service)().decode()
    log.close()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", told, re.MULTILINE))
    unknown = {n for n in asked if n not in types and n.removesuffix("_bucket") not in types}
    assert not unknown
    missing = {"kvlease_exposed_stall_seconds_total", "kvlease_tool_call_errors_total"} - asked
    assert not missing
    for panel in board.panels:
        for target in panel.targets:
            assert target.expr.count("(") == target.expr.count(")")
            for name in re.findall(r"rate\((kvlease_\w+)", target.expr):
                assert types.get(name, "histogram") in ("counter", "histogram")


def test_the_unit_starts_what_exists_and_gives_a_drain_its_time() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # keys of a unit have capitals
    unit.read_string((DEPLOY / "systemd" / "kvlease.service").read_text())
    service = unit["Service"]
    assert re.fullmatch(r"\S+/kvlease serve --config \S+\.toml", service["ExecStart"])
    assert service["ExecStartPre"] == f"{service['ExecStart']} --check"
    assert int(service["TimeoutStopSec"]) > Limits().drain_timeout_s + 10
    assert service["KillSignal"] == "SIGTERM"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_the_image_installs_extras_that_exist_and_copies_files_that_are_there() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    joined = re.sub(r"\\\n", " ", text)
    steps = [line.split(None, 1) for line in joined.splitlines() if line and line[0] not in "# "]
    names = [name for name, _ in steps]
    assert names[0] == "FROM"
    known = "FROM ARG WORKDIR COPY RUN USER EXPOSE STOPSIGNAL ENTRYPOINT CMD"
    assert set(names) <= set(known.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"EXTRAS=([\w,]+)", text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    for name, rest in steps:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
    entry, command = (json.loads(rest) for name, rest in steps if name in ("ENTRYPOINT", "CMD"))
    assert entry == ["kvlease"]
    assert command[0] == "serve"
    assert names.index("USER") < names.index("ENTRYPOINT"), "it does not run as root"
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", steps[0][1])
    assert version is not None
    assert version.group(1) >= project["requires-python"].removeprefix(">=")
