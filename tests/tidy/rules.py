"""Conventions of the source, as functions over syntax trees that yield a sentence a breach."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvlease"
VIEWS = PACKAGE / "protocols" / "views.py"
OPENER = PACKAGE / "kernels" / "views.py"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

# Spelled in pieces, so that this file does not breach its own rules.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
MACHINE_PATH = re.compile(r"(?<![\w.~)>}])/(?:home|root|work|tmp|Users|opt|mnt|data)/\w")


def sources(*folders: str) -> list[Path]:
    """Every Python file of the named folders, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """The path as people write it, from the repository's root."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def length_breaches(path: Path, text: str) -> Iterator[str]:
    """Files over 400 lines, functions over 60."""
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{name_of(path)}: {lines} lines; files stay under {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines"


def _public_definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """Public classes and functions, methods of public classes included, magic ones left out."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node.body, f"{prefix}{node.name}.")


def _is_overload(node: Definition) -> bool:
    return any(ast.unparse(d).split(".")[-1] == "overload" for d in node.decorator_list)


def docstring_breaches(path: Path, text: str) -> Iterator[str]:
    """Modules and public names without a docstring."""
    tree = ast.parse(text)
    if ast.get_docstring(tree) is None and path.name != "__main__.py":
        yield f"{name_of(path)}: the module has no docstring"
    for name, node in _public_definitions(tree.body, ""):
        if ast.get_docstring(node) is None and not _is_overload(node):
            yield f"{name_of(path)}:{node.lineno}: {name} has no docstring"


def text_breaches(path: Path, text: str) -> Iterator[str]:
    """Unfinished marks and paths of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{name_of(path)}:{number}: an unfinished mark"
        if MACHINE_PATH.search(line):
            yield f"{name_of(path)}:{number}: a path of one machine"


def private_slots(views_text: str) -> frozenset[str]:
    """Names of the private slots of the handles that ``protocols/views.py`` defines."""
    slots: set[str] = set()
    for node in ast.walk(ast.parse(views_text)):
        if not isinstance(node, ast.ClassDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__slots__" for t in statement.targets
            ):
                slots.update(ast.literal_eval(statement.value))
    return frozenset(slot for slot in slots if slot.startswith("_"))


def _own(node: ast.expr) -> bool:
    """Whether an object is the method's own, whose private names are its own business."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _declared(tree: ast.AST) -> set[int]:
    """Constants inside a ``__slots__`` declaration, by identity: they name, they do not reach."""
    return {
        id(constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets)
        for constant in ast.walk(node.value)
    }


def opening_breaches(path: Path, text: str, slots: frozenset[str]) -> Iterator[str]:
    """Places that reach the memory behind a handle: by attribute, by name in a string, by match."""
    tree = ast.parse(text)
    declared = _declared(tree)
    for node in ast.walk(tree):
        found: str | None = None
        if isinstance(node, ast.Attribute) and node.attr in slots and not _own(node.value):
            found = node.attr
        elif isinstance(node, ast.Constant) and node.value in slots and id(node) not in declared:
            found = str(node.value)
        elif isinstance(node, ast.MatchClass):
            found = next((name for name in node.kwd_attrs if name in slots), None)
        if found is not None:
            line = getattr(node, "lineno", 0)
            yield f"{name_of(path)}:{line}: {found} of a handle; only kernels/views.py opens rows"
