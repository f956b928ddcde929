"""The benchmark of hosts' dispatchers: what it says of bytes and accuracy, and whom it refuses."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from benchmark_runs import QUICK
from launch import launch_command, run_command

from benchmarks import common, tables

TINY = ["--tokens", "16", "--hidden", "256", "--topk", "4", "--experts", "8", *QUICK]
PROGRAM = ["-m", "benchmarks.hosts", "--host"]
HOSTS = ["transformers"]


@pytest.mark.mpi
@pytest.mark.parametrize("host", HOSTS)
def test_host(host: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(host) is None:
        pytest.skip(f"needs {host}")
    path = tmp_path / "hosts.jsonl"
    options = [host, *TINY, "--width", "32", "--json", str(path)]
    code, output = run_command([*launch_command("torchrun", 2), *PROGRAM, *options], timeout=120)
    assert code == 0, output
    run, stock, *others = common.read_json_lines(path)
    assert run["benchmark"] == "hosts"
    assert stock["share_of_stock"] == 1
    assert stock["sqnr_db"] == [None] * 3
    by_name = {record["name"]: record for record in others}
    exact, fp4 = (by_name[name] for name in ("fp4comm bf16", "fp4comm fp4"))
    assert min(ratio for ratio in exact["sqnr_db"] if ratio is not None) > 35  # sums of BF16 in another order
    assert 5 < min(fp4["sqnr_db"]) < 25
    assert fp4["mean_sent_bytes"] < exact["mean_sent_bytes"] < 0.8 * stock["mean_sent_bytes"]
    for record in (stock, *others):
        seconds = {key: time["median"] for key, time in record["seconds"].items()}
        assert seconds["forward"] > 0
        assert seconds["training"] > 0
    assert tables.make_table("hosts", tmp_path).count("\n| ") == len(others) + 3


def test_one_process_is_refused() -> None:
    code, output = run_command([sys.executable, *PROGRAM, "transformers", *TINY], timeout=60)
    assert code == 2
    assert "benchmarks.hosts needs torch.distributed; accepted: torchrun --nproc-per-node N" in output
