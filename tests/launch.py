"""Run a test function on several ranks: `run_ranks(function, 4)` under mpirun or torchrun.

Executed as a program, this file is one of those ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LAUNCHERS = ("mpi", "torchrun")
START_SECS = 60.0  # for a rank to start and join the group

# What mpirun needs for more ranks than cores, and as root; each MPI ignores the variables of the others.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
}


class RankError(AssertionError):
    """A rank failed or ran out of time. The message holds the output of all ranks."""


def have_launcher(launcher: str) -> bool:
    """Whether this machine can start ranks with `launcher`."""
    if launcher == "mpi":
        return _mpirun() is not None and importlib.util.find_spec("mpi4py") is not None
    return importlib.util.find_spec("torch") is not None


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    launcher: str = "mpi",
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    on_gpus: bool = False,
) -> list[Any]:
    """Call `function(group, *args)` on every rank and return what the ranks returned, in rank order.

    Args:
        function: a top-level function of a module in `tests/` (or an importable one). `group` is `MPI.COMM_WORLD` or
            the process group of torch, with gloo. It, `args` and the result travel by pickle.
        launcher: "mpi" or "torchrun".
        timeout: seconds that the function may take; then the rank prints the stack of its threads and ends.
        env: further environment variables for the ranks.
        on_gpus: by torchrun, with a GPU for each rank, and NCCL in the group.

    Raises:
        RankError: a rank raised, died or ran out of time.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = (function.__module__, function.__qualname__, args, timeout, on_gpus)
        Path(folder, "call").write_bytes(pickle.dumps(call))
        command = [*launch_command(launcher, num_ranks), str(TESTS / "launch.py"), launcher, folder]
        code, output = run_command(command, timeout=START_SECS + timeout + 10, env=env)
        results = [Path(folder, f"result{rank}") for rank in range(num_ranks)]
        if code != 0 or not all(path.exists() for path in results):
            how = "ran out of time" if code is None else f"exit code {code}"
            logs = [_rank_log(folder, rank) for rank in range(num_ranks)]
            raise RankError(
                f"{function.__qualname__} on {num_ranks} ranks ({launcher}): {how}\n{output}{''.join(logs)}"
            )
        return [pickle.loads(path.read_bytes()) for path in results]


def failures_of(cases: Sequence[Callable[[Any], object]], group: Any) -> dict[str, str]:
    """Calls the cases one after the other on a rank; how each failed, by name; empty if none has.

    Starting ranks takes longer than most cases. After one that failed on any rank the others are not run, since the
    ranks may no longer make the same calls, and count as failed.
    """
    failures: dict[str, str] = {}
    for done, case in enumerate(cases):
        try:
            case(group)
        except BaseException:
            failures[case.__name__] = traceback.format_exc()
        if group is not None and any(_gather(bool(failures), group)):
            for left in cases[done + 1 :]:
                failures[left.__name__] = f"not run, since {case.__name__} failed"
            break
    return failures


def _gather(value: Any, group: Any) -> list[Any]:
    if hasattr(group, "Abort"):  # of MPI
        return list(group.allgather(value))
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def launch_command(launcher: str, num_ranks: int) -> list[str]:
    """The command line that starts `num_ranks` Python processes; a script or `-m module` follows."""
    if launcher == "mpi":
        return [_mpirun() or "mpirun", "-n", str(num_ranks), sys.executable]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    raise ValueError(f"launcher is {launcher!r}; accepted: {LAUNCHERS}")


def run_command(command: Sequence[str], *, timeout: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Run a command in the repository root; return its exit code (None: it ran out of time) and its output.

    The output goes to a file: a pipe would stay open for as long as a stray grandchild lives.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
        output.seek(0)
        return code, output.read().decode(errors="replace").replace("\0", "")


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = {"OMP_NUM_THREADS": "1"}  # one thread a rank: the ranks share the cores
    return {**os.environ, **MPI_ENVIRONMENT, **threads, "PYTHONPATH": path, **(extra or {})}


def _mpirun() -> str | None:
    """The `mpirun` of this Python environment, or else the first on the path."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, which ends its ranks, and what is left of its process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rank_log(folder: str, rank: int) -> str:
    path = Path(folder, f"log{rank}")
    text = path.read_text(errors="replace") if path.exists() else "(not started)\n"
    return f"--- rank {rank} ---\n{text}"


def _rank_main(launcher: str, folder: str) -> None:
    """One rank: its output goes to `log<rank>`, what the function returns to `result<rank>`."""
    rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in os.environ)
    log = os.open(Path(folder, f"log{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # a killed rank loses what it buffers
    module, name, args, timeout, on_gpus = pickle.loads(Path(folder, "call").read_bytes())
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_SECS, exit=True)
    group: Any = None
    try:
        if launcher == "mpi":
            from mpi4py import MPI

            group = MPI.COMM_WORLD
        else:
            import torch.distributed as dist

            import fp4comm

            if on_gpus:
                fp4comm.world_group()
            else:
                dist.init_process_group("gloo")
            group = dist.group.WORLD
        faulthandler.dump_traceback_later(timeout, exit=True)
        result = getattr(importlib.import_module(module), name)(group, *args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        if launcher == "torchrun":
            dist.destroy_process_group()
            # Gloo's threads may still let go of the last messages, for which they need Python's lock. Where Python ends
            # meanwhile, it ends those threads, and the process is aborted.
            time.sleep(0.2)
    except BaseException:
        # The other ranks may wait for this one, so end the job instead of finalizing.
        traceback.print_exc()
        sys.stderr.flush()
        if launcher == "mpi" and group is not None:
            group.Abort(1)
        os._exit(1)


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
