"""`kvlease doctor`: what this machine can do, and which optional parts are installed.

torch is asked in a process of its own, so that a broken installation of it is a finding and not the
end of the doctor. This module loads no torch.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from kvlease.version import __version__

PROBE_TIMEOUT_S = 120.0
"""How long torch may take to load, the embedded model to start, and exactness to be proven."""

_TORCH_PROBE = """
import json, torch
has_cuda = torch.cuda.is_available()
unpinned = None
if has_cuda:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        unpinned = str(error).splitlines()[0]
def facts(i):
    of = torch.cuda.get_device_properties(i)
    free, _ = torch.cuda.mem_get_info(i)
    return {"name": of.name, "memory": of.total_memory, "free": free,
            "capability": f"{of.major}.{of.minor}", "processors": of.multi_processor_count}
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "cuda": torch.version.cuda,
    "devices": [facts(i) for i in range(torch.cuda.device_count())] if has_cuda else [],
    "unpinned": unpinned,
}))
"""
_EXACT_PROBE = """
import trio, kvlease
async def main():
    async with kvlease.open_engine(None, kvlease.EngineConfig(exact=True)):
        print("{}")
trio.run(main)
"""
_CUDA_PROBE = _EXACT_PROBE.replace("exact=True", 'exact=True, device="cuda", host_pages=64')
PROVEN = "answers do not depend on batching: proven on the embedded model"

State = Literal["ok", "absent", "broken"]


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at: ``ok``, ``absent`` (optional and not there), or ``broken``."""

    name: str
    state: State
    detail: str


class Diagnosis(msgspec.Struct, frozen=True):
    """What the doctor found; ``can_serve`` is whether the embedded model runs here."""

    version: str
    can_serve: bool
    findings: list[Finding]


class _DeviceFacts(msgspec.Struct):
    name: str
    memory: int
    free: int
    capability: str
    processors: int


class _TorchFacts(msgspec.Struct):
    version: str
    threads: int
    cuda: str | None
    devices: list[_DeviceFacts]
    unpinned: str | None
    """Why host memory cannot be pinned, None if it can be or nobody would need it."""


def _probe(code: str) -> tuple[bool, str]:
    """Run code in a process of its own; return whether it ended well, and its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer after {PROBE_TIMEOUT_S:.0f} s"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = said[-1] if said else f"ended with status {done.returncode}"
    return done.returncode == 0, last


def _package(name: str, purpose: str) -> Finding:
    try:
        return Finding(name, "ok", f"{importlib.metadata.version(name)} ({purpose})")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", f"not installed ({purpose})")


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.0f} GB"


def num_cores() -> int:
    """Count the cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system has affinities
        return os.cpu_count() or 1


def _machine() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("cores", "ok", str(num_cores()))
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Finding("memory", "ok", _gigabytes(nbytes))
    except (AttributeError, ValueError, OSError):
        yield Finding("memory", "absent", "the system does not tell")


def _torch() -> Iterator[Finding]:
    well, said = _probe(_TORCH_PROBE)
    if not well:
        yield Finding("torch", "broken", said)
        return
    facts = msgspec.json.decode(said, type=_TorchFacts)
    yield Finding("torch", "ok", f"{facts.version}, {facts.threads} threads")
    yield from _cuda(facts)


def _cuda(facts: _TorchFacts) -> Iterator[Finding]:
    if not facts.devices:
        why = "no CUDA device" if facts.cuda else "this torch was built without CUDA"
        yield Finding("cuda", "absent", f"{why}; --device cpu")
        return
    for one in facts.devices:
        memory = f"{_gigabytes(one.memory)}, {_gigabytes(one.free)} of them free"
        parts = f"compute capability {one.capability}, {one.processors} multiprocessors"
        yield Finding("cuda", "ok", f"{facts.cuda}, {one.name}, {memory}, {parts}")
    if facts.unpinned is None:
        yield Finding("pinned memory", "ok", "a device reaches host pages by itself")
    else:
        yield Finding("pinned memory", "broken", f"{facts.unpinned}; --device cpu")
    well, said = _probe(_CUDA_PROBE)
    yield Finding("cuda engine", "ok" if well else "broken", PROVEN if well else said)


def examine() -> Diagnosis:
    """Look at everything; takes a few seconds, most of them torch's."""
    findings = [*_machine(), *_torch()]
    well, said = _probe(_EXACT_PROBE)
    findings.append(Finding("exactness", "ok" if well else "broken", PROVEN if well else said))
    findings.append(_package("triton", "GPU kernels; extra `gpu`"))
    findings.append(_package("tokenizers", "text prompts for checkpoints; extra `text`"))
    findings.append(_package("hypercorn", "the HTTP door of `kvlease serve`; extra `serve`"))
    findings.append(_package("transformers", "the oracle of the model tests; extra `test`"))
    return Diagnosis(__version__, well, findings)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a table on a terminal, plain lines otherwise."""
    if console.is_terminal:
        table = Table("what", "", "found", title=f"kvlease {diagnosis.version}")
        for finding in diagnosis.findings:
            table.add_row(finding.name, finding.state, finding.detail)
        console.print(table)
        return
    for f in diagnosis.findings:
        line = f"{f.name}: {f.state}, {f.detail}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
