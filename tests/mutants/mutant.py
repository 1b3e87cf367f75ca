"""What a mutant is: one guard taken out, what must notice, and what the log shows."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LISTS = ("protocols", "pools", "transfers", "runtime", "device")


class Types(msgspec.Struct, frozen=True, tag="types", tag_field="kind"):
    """A type checker refuses the mutated file."""

    checker: Literal["mypy", "basedpyright"]
    file: str

    kind = "types"

    @property
    def how(self) -> str:
        """What to print."""
        return self.checker


class Guard(msgspec.Struct, frozen=True, tag="guard", tag_field="kind"):
    """Another guard raises ``error`` while the test runs, and so the test fails."""

    error: str
    test: str

    kind = "guard"

    @property
    def how(self) -> str:
        """What to print."""
        return f"{self.error} in {self.test}"


class Test(msgspec.Struct, frozen=True, tag="test", tag_field="kind"):
    """One test fails."""

    __test__ = False
    test: str

    kind = "test"

    @property
    def how(self) -> str:
        """What to print."""
        return self.test


class Witness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The play whose log makes replay name one of ``rules`` when the guard is gone.

    Attributes:
        first, seeds: the seeds that are tried at most; with the guard all are clean.
    """

    play: str
    rules: tuple[str, ...]
    first: int = 0
    seeds: int = 30


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One guard of the product, taken out.

    Attributes:
        id: the hazard, in words.
        rule: the one of DESIGN 3 that the guard keeps.
        file: where it stands; ``old`` occurs there once and becomes ``new``.
        by: what catches it.
        witness: where replay sees it.
        no_witness: why no log can show it. Both are left out where the types refuse the tree.
    """

    id: str
    rule: str
    file: str
    old: str
    new: str
    by: Types | Guard | Test
    witness: Witness | None = None
    no_witness: str = ""

    def apply(self, source: str) -> str:
        """Return the file's text without the guard; raises ValueError if it is not there once."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"{self.id}: its text occurs {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: tuple[Mutant, ...]


def _read(name: str) -> tuple[Mutant, ...]:
    found = tomllib.loads((HERE / f"{name}.toml").read_text())
    return msgspec.convert(found, _File).mutant


MUTANTS = tuple(mutant for name in LISTS for mutant in _read(name))
"""All mutants, in the order of the rooms."""


def tests_of(mutants: Sequence[Mutant]) -> list[str]:
    """List the tests that mutants name, each once."""
    named = {one.by.test: None for one in mutants if not isinstance(one.by, Types)}
    return list(named)
