"""The code blocks of README.md and docs/ run.

A block is run if its fence says so: "```python run" or "```bash run". The Python blocks of a file are one program, in
order; each bash block is a program of its own, which stops at the first command that fails.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launch import ROOT, have_launcher, run_command

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
TIMEOUT_SECS = 180.0


def blocks(document: Path, language: str, *, run: bool) -> list[tuple[int, str]]:
    """(line number of the first line, code) of the blocks in a language; with `run`, of those to be run."""
    text = document.read_text()
    return [
        (text.count("\n", 0, match.start(3)) + 1, match[3])
        for match in FENCE.finditer(text)
        if match[1] == language and ("run" in match[2].split() or not run)
    ]


def python_program(document: Path) -> str:
    """The Python blocks at the lines where they stand, so that a traceback names the document's line."""
    program = ""
    for line, code in blocks(document, "python", run=True):
        program += "\n" * (line - 1 - program.count("\n")) + code
    return program


BASH = [
    pytest.param(code, id=f"{document.name}:{line}")
    for document in DOCUMENTS
    for line, code in blocks(document, "bash", run=True)
]
PYTHON = [pytest.param(document, id=document.name) for document in DOCUMENTS if python_program(document)]


def check(command: list[str]) -> None:
    env = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    code, output = run_command(command, timeout=TIMEOUT_SECS, env=env)
    assert code == 0, f"{'ran out of time' if code is None else f'exit code {code}'}\n{output}"


@pytest.mark.parametrize("document", PYTHON)
def test_python_blocks(document: Path, tmp_path: Path) -> None:
    script = tmp_path / document.name
    script.write_text(python_program(document))
    check([sys.executable, "-W", "error", str(script)])


@pytest.mark.mpi
@pytest.mark.parametrize("code", BASH)
def test_bash_block(code: str) -> None:
    if "mpirun" in code and not have_launcher("mpi"):
        pytest.skip("no MPI on this machine")
    check(["bash", "-euo", "pipefail", "-c", code])


def test_make_targets_exist() -> None:
    """The `make` commands of the documents, which would start this very test, are only looked up."""
    code = "".join(code for document in DOCUMENTS for _, code in blocks(document, "bash", run=False))
    targets = set(re.findall(r"^make (\w+)", code, re.MULTILINE))
    assert {"bench", "test"} <= targets
    check(["make", "--dry-run", *sorted(targets)])


def test_links_lead_to_files() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
