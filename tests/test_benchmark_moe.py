"""The benchmark of the MoE layer: every recipe beside plain PyTorch, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_runs import QUICK
from launch import launch_command, run_command

from benchmarks import common, moe_layer

SIZES = ["--hidden", "256", "--width", "128", "--experts", "8", "--topk", "2", "--tokens", "16"]


@pytest.mark.mpi
def test_moe_layer(tmp_path: Path) -> None:
    path = tmp_path / "moe.jsonl"
    options = ["-m", "benchmarks.moe_layer", *SIZES, *QUICK, "--json", str(path)]
    code, output = run_command([*launch_command("torchrun", 2), *options], timeout=120)
    assert code == 0, output
    run, *records = common.read_json_lines(path)
    assert run["benchmark"] == "moe_layer"
    assert [record["name"] for record in records] == [moe_layer.PLAIN, *moe_layer.RECIPES]
    by_name = {record["name"]: record for record in records}
    noise = {name: min(r for r in record["sqnr_db"] if r is not None) for name, record in list(by_name.items())[1:]}
    assert noise["bf16"] > 35  # BF16 sums in another order
    assert 15 < noise["fp8_flow"] < 30
    assert 5 < noise["fp4"] < 20
    assert all(record["seconds"]["step"]["minimum"] > 0 for record in records)
