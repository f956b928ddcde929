"""`python -m fp4comm`: one report for all ranks, and none that waits for a rank without end."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch_command, run_command

from fp4comm.__main__ import report

# Rank 1 is spoilt by what stands at SPOIL; the other one has PATIENCE.
PROGRAM = """
import os
from fp4comm import __main__ as program

names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
if next(os.environ[name] for name in names if name in os.environ) == "1":
    SPOIL
else:
    program.LONGEST_SECS = PATIENCE
program.main()
"""
FAILURES = {  # how, and what its report says
    "no MPI": ("os.environ['MPI4PY_LIBMPI'] = '/none.so'", "transport here     none: MPI can't be used"),
    "early end": ("os._exit(3)", ""),
    "error": ("program._transport = {}.pop", "KeyError"),
}


def run_spoilt(launcher: str, spoil: str, patience: float, tmp_path: Path) -> tuple[int | None, str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("SPOIL", spoil).replace("PATIENCE", str(patience)))
    return run_command([*launch_command(launcher, 2), str(program)], timeout=50)


def test_what_others_find_stands_below() -> None:
    first, other = {"gpu": "H200", "mpi": "MPICH"}, {"gpu": "none", "mpi": "MPICH"}
    assert report([first, other, first, other, {"gpu": "B200", "mpi": "MPICH"}]).splitlines() == [
        "gpu                H200",
        "  ranks 1, 3       none",
        "  rank 4           B200",
        "mpi                MPICH",
    ]


@pytest.mark.mpi
def test_ranks_share_a_report(launcher: str, tmp_path: Path) -> None:
    code, output = run_spoilt(launcher, "program.__version__ = '0.0.7'", 50.0, tmp_path)
    assert code == 0, output
    assert output.count("cpu kernels ") == 1
    assert "  rank 1           0.0.7\n" in output
    assert f"{'mpi' if launcher == 'mpi' else 'process_group'}, 2 ranks, rows on " in output


@pytest.mark.mpi
@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_ends_the_others(launcher: str, failure: str, tmp_path: Path) -> None:
    spoil, message = FAILURES[failure]
    if failure == "no MPI" and launcher != "mpi":
        pytest.skip("not needed")
    code, output = run_spoilt(launcher, spoil, 10.0, tmp_path)
    assert code, "it ran out of time" if code is None else output
    assert message in output
