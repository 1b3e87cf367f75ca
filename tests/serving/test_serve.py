"""`kvlease serve` as a process: ready, serving, drained by a signal, and how its status says so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import httpx
import pytest
import trio

import kvlease
from kvlease.errors import ConfigError, Refused
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import AnyEvent, RpcCall, RpcDrain
from kvlease.services.replay.checker import check_log
from kvlease.services.rpc.client import Client
from kvlease.services.serving.config import ServeConfig
from kvlease.services.serving.plan import make_plan
from tests.runtime.test_event_log import lines_of
from tests.tidy.rules import ROOT

LONG = SamplingParams(max_tokens=150, ignore_eos=True)
READY = re.compile(
    r"kvlease: ready at (\S+(?: \S+)*) \(model embedded, .* open (\d+\.\d+) s later\)"
)


@asynccontextmanager
async def running(
    *arguments: str, errors: BinaryIO | None = None
) -> AsyncGenerator[tuple[trio.Process, str]]:
    """Start a server; yields the process and where it listens, and ends it if need be.

    What it says on standard error goes to ``errors``.
    """
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "kvlease", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if errors is None else errors,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        text = b""
        with trio.fail_after(60):
            while b"\n" not in text:
                chunk = await process.stdout.receive_some()
                assert chunk, "the server ended before it was ready"
                text += chunk
        ready = READY.match(text.decode())
        assert ready, text
        assert float(ready.group(2)) < 2
        yield process, ready.group(1)
    finally:
        if process.poll() is None:
            process.kill()
        await process.wait()
        await process.stdout.aclose()


async def until_draining(client: Client) -> None:
    with trio.fail_after(20):
        while True:
            if (await client.health()).status == "draining":
                return
            await trio.sleep(0.01)


async def status_of(process: trio.Process) -> int:
    with trio.fail_after(30):
        return await process.wait()


async def test_sigterm_drains_and_loses_no_token(tmp_path: Path) -> None:
    """Answers under way are completed and taken, new ones refused; the log of it all is clean."""
    log, report = str(tmp_path / "log"), str(tmp_path / "report")
    address = f"unix://{tmp_path}/k.sock"
    flags = ("--listen", address, "--device-pages", "128", "--log", log, "--json", report)
    async with running(*flags) as (process, where):
        assert where == address
        assert os.stat(tmp_path / "k.sock").st_mode & 0o077 == 0
        async with kvlease.connect(address) as client, trio.open_nursery() as nursery:
            got: list[int] = []

            async def one(number: int, task_status: trio.TaskStatus[None]) -> None:
                async with client.generate([number, 2, 3], LONG) as answer:
                    await answer.__anext__()
                    task_status.started()
                    got.append(len((await answer.drain()).tokens))

            for number in range(3):
                await nursery.start(one, number)
            process.send_signal(signal.SIGTERM)
            await until_draining(client)
            with pytest.raises(Refused, match="ending"):
                async with client.generate([1], LONG) as answer:
                    await answer.drain()
        assert got == [150] * 3
        assert await status_of(process) == 0
    assert not (tmp_path / "k.sock").exists()
    check_files(log, report)


def check_files(log: str, report: str) -> None:
    figures = json.loads(Path(report).read_text())
    assert figures["ledger_ok"]
    assert figures["engine"]["output_tokens"] == 450
    events: list[AnyEvent] = lines_of(Path(log).read_bytes())
    assert [e.code for e in events if isinstance(e, RpcCall) and e.method == "generate"].count(
        "ok"
    ) == 3
    assert [e.cut for e in events if isinstance(e, RpcDrain)] == [0, 0]
    assert check_log(log).verdict == "clean"


async def test_a_second_signal_stops_at_once_and_says_what_it_cut(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    flags = ("--listen", "tcp://127.0.0.1:0", "--device-pages", "128", "--log", f"{tmp_path}/log")
    with (tmp_path / "errors").open("wb") as errors:
        async with (
            running(*flags, errors=errors) as (process, address),
            kvlease.connect(address) as client,
            client.generate([1, 2, 3], params) as answer,
            client.generate([1, 2, 4], params) as other,
        ):
            await answer.__anext__()
            await other.__anext__()
            process.send_signal(signal.SIGTERM)
            await until_draining(client)
            process.send_signal(signal.SIGTERM)
            assert await status_of(process) == 1
    assert (tmp_path / "errors").read_text() == "kvlease: 2 answers were cut short\n"


async def test_a_client_may_end_the_server() -> None:
    """Before it does, its address is nobody else's."""
    flags = ("--listen", "tcp://127.0.0.1:0")
    async with running(*flags) as (process, address), kvlease.connect(address) as client:
        sentence = await trio.to_thread.run_sync(refused, "--listen", address)
        assert "cannot listen at" in sentence
        assert await client.drain() == 0
        assert await status_of(process) == 0


def refused(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvlease", "serve", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_wrong_configuration_is_one_sentence() -> None:
    assert "--max-streams: limits.max_streams" in refused("--max-streams", "x")
    assert "other machines" in refused("--listen", "tcp://0.0.0.0:0", "--check")


def test_a_good_configuration_is_checked_without_torch() -> None:
    code = (
        "import sys\nfrom kvlease.services.cli import main\n"
        "assert main(['serve', '--check']) == 0\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines() == ["kvlease: the configuration is good", "set()"]


async def test_the_http_door_is_served_too_and_an_interrupt_drains_both() -> None:
    """One engine behind both; the exit status says that it was an interrupt."""
    flags = ("--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--device-pages", "128")
    async with running(*flags) as (process, where):
        rpc, url = where.split()
        async with kvlease.connect(rpc) as client, httpx.AsyncClient(base_url=url) as http:
            asked = {"model": "embedded", "prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
            got = await http.post("/v1/completions", json=asked)
            assert got.json()["usage"]["completion_tokens"] == 4
            assert (await client.statistics()).engine["output_tokens"] == 4
            assert "kvlease_output_tokens_total 4.0" in (await http.get("/metrics")).text
            process.send_signal(signal.SIGINT)
            assert await status_of(process) == 130


def test_an_open_http_door_needs_keys() -> None:
    with pytest.raises(ConfigError, match="other machines"):
        make_plan(ServeConfig(http="0.0.0.0:0"))
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        make_plan(ServeConfig(http="localhost"))
