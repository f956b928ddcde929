"""The shape of the package: who imports whom, what the import costs, and what is public."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp4comm

PACKAGE = Path(__file__).resolve().parent.parent / "fp4comm"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A module imports from the lines above its own, and within its own package.
LAYERS = (
    ("errors",),
    ("formats", "memory"),
    ("memory", "precision", "reference", "_cpu"),
    ("backends",),
    ("codec", "fp8_rows", "routing", "transport"),
    ("agreement", "checks", "exchange"),
    ("autograd", "received"),
    ("communicator", "launch"),
    ("moe", "ops"),
    ("adapters",),
    ("__init__",),
    ("__main__",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}

# Who may import what from outside; the standard library is free.
THIRD_PARTY = {
    "numpy": ("",),
    "torch": ("",),
    "mpi4py": ("transport/mpi.py",),
    "cupy": ("backends/cuda", "transport/nccl", "transport/peer"),
    "transformers": ("adapters/",),
    "megatron": ("adapters/",),
    "torchtitan": ("adapters/",),
    "deep_ep": ("adapters/",),
}
MAX_IMPORT_SECS = 1.0  # beyond torch and numpy
MAX_PUBLIC_NAMES = 15
MAX_ENVIRONMENT_VARIABLES = 5


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports_at_run_time(path: Path) -> Iterator[str]:
    """Absolute dotted names of all imports, also those inside functions, but not those for annotations alone."""
    package = ["fp4comm", *path.relative_to(PACKAGE).parent.parts]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parent, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            todo += ast.iter_child_nodes(node)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert unit in LAYER_OF, f"give {unit} a place in LAYERS"
    for name in imports_at_run_time(path):
        top, *rest = name.split(".")
        if name == "fp4comm.__version__":  # a constant
            continue
        if top == "fp4comm":
            target = rest[0] if rest else "__init__"
            assert target == unit or LAYER_OF.get(target, len(LAYERS)) < LAYER_OF[unit], f"{unit} imports {name}"
        elif top not in sys.stdlib_module_names:
            places = THIRD_PARTY.get(top, ())
            assert name_of(path).startswith(places or "never"), f"{name_of(path)} imports {name}"


def test_import_is_quick_and_needs_only_numpy_and_torch() -> None:
    code = (
        "import sys, time, numpy, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "import fp4comm\n"
        "print(time.perf_counter() - start)\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)\n"
    )
    for _ in range(3):  # other work on the machine may slow one run down
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, modules = run.stdout.splitlines()
        if float(seconds) < MAX_IMPORT_SECS:
            break
    else:
        pytest.fail(f"import fp4comm took {seconds} s beyond torch")
    third_party = {name for name in modules.split() if not name.startswith(("fp4comm", "_editable"))}
    assert third_party <= {"numpy", "torch"}


def test_few_public_names_each_explained() -> None:
    assert len(fp4comm.__all__) <= MAX_PUBLIC_NAMES
    for name in fp4comm.__all__:
        thing = getattr(fp4comm, name)
        summary = (inspect.getdoc(thing) or "").split("\n\n")[0]
        assert summary.rstrip().endswith((".", ":")), f"{name} has no summary sentence: {summary!r}"
        assert not summary.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


def test_few_environment_variables() -> None:
    """Any text that looks like a variable's name counts, in the modules that look at the environment."""
    names = set()
    for path in SOURCES:
        text = path.read_text()
        if "environ" in text or "getenv" in text:
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            names |= {value for value in strings if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", value)}
    assert len(names) <= MAX_ENVIRONMENT_VARIABLES, sorted(names)


def test_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
