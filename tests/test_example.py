"""The training example: it learns, is repeatable, and says what is wrong with its arguments."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import LAUNCHERS, ROOT, have_launcher, launch_command, run_command

EXAMPLE = "examples/train_moe.py"
TRACE = ROOT / "tests" / "data" / "moe_trace.npz"
SMALL = ["--steps", "12", "--batch", "4", "--length", "64", "--seeds", "1", "--validation-windows", "16"]
SMALL += ["--hidden", "64", "--expert-hidden", "16", "--experts", "8"]
LEGS = {"dispatch", "combine", "grad_dispatch", "grad_combine"}


def run_example(num_ranks: int, arguments: list[str], launcher: str = "mpi") -> str:
    """The output of a run that must succeed."""
    start = [sys.executable] if num_ranks == 1 else launch_command(launcher, num_ranks)
    code, output = run_command([*start, EXAMPLE, *arguments], timeout=120)
    assert code == 0, output
    return output


def losses(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All that must not change when the command is repeated."""
    return [
        (run["wire"], run["training_loss"], run["validation_loss"], run["bytes_per_token"]) for run in report["runs"]
    ]


def check_report(report: dict[str, Any], wires: list[str], num_ranks: int) -> None:
    assert report["num_ranks"] == num_ranks
    assert EXAMPLE in report["command"]
    assert report["versions"].keys() == {"fp4comm", "torch", "python"}
    assert report["machine"]
    assert report["date"]
    assert [run["wire"] for run in report["runs"]] == wires
    assert report["corpus"]["entropy_order_1"] < report["corpus"]["entropy_order_0"] < math.log(256)
    for run in report["runs"]:
        assert all(math.isfinite(loss) for loss in run["training_loss"])
        assert len(run["training_loss"]) == 12
        assert np.mean(run["training_loss"][-3:]) < np.mean(run["training_loss"][:3]) - 0.5
        assert run["validation_loss"][-1] == [12, run["final_loss"]]
        assert run["bytes_per_token"].keys() == LEGS


@pytest.mark.mpi
@pytest.mark.skipif(not have_launcher("mpi"), reason="needs mpirun and mpi4py")
def test_two_ranks_learn_and_repeat_themselves(tmp_path: Path) -> None:
    reports = []
    for launcher in LAUNCHERS:  # the strongest form of repeating: it doesn't matter how the ranks are started
        output = run_example(2, [*SMALL, "--wires", "bf16", "mxfp4", "--out", str(tmp_path / launcher)], launcher)
        assert "wire bytes/token" in output
        reports.append(json.loads((tmp_path / f"{launcher}.json").read_text()))
    check_report(reports[0], ["bf16", "mxfp4"], num_ranks=2)
    assert losses(reports[0]) == losses(reports[1])
    assert [report["transport"] for report in reports] == ["mpi", "process_group"]
    bf16, mxfp4 = (run["bytes_per_token"] for run in reports[0]["runs"])
    assert all(0 < mxfp4[leg] < 0.6 * bf16[leg] for leg in LEGS)


def test_one_process_with_trace(tmp_path: Path) -> None:
    trace_file = tmp_path / "trace.npz"
    arguments = [*SMALL, "--wires", "fp4", "twin", "--topk", "3", "--out", str(tmp_path / "run")]
    run_example(1, [*arguments, "--save-trace", str(trace_file)])
    report = json.loads((tmp_path / "run.json").read_text())
    check_report(report, ["fp4", "twin"], num_ranks=1)
    first, twin = (run["training_loss"] for run in report["runs"])
    assert first != twin
    assert first[0] == pytest.approx(twin[0], rel=1e-3)
    check_trace(trace_file, hidden=64, num_topk=3, num_experts=8)
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "run.png").stat().st_size > 10_000


def check_trace(path: Path, hidden: int, num_topk: int, num_experts: int) -> None:
    with np.load(path) as trace:
        assert set(trace) == {"x_bits", "topk_idx", "topk_weights", "num_experts"}
        x_bits, topk_idx, topk_weights = trace["x_bits"], trace["topk_idx"], trace["topk_weights"]
        assert int(trace["num_experts"]) == num_experts
    assert (x_bits.dtype, topk_idx.dtype, topk_weights.dtype) == (np.uint16, np.int32, np.float32)
    assert x_bits.shape == (len(x_bits), hidden)
    assert topk_idx.shape == topk_weights.shape == (len(x_bits), num_topk)
    x = torch.from_numpy(x_bits).view(torch.bfloat16).float()
    assert x.isfinite().all()
    assert 0.5 < x.square().mean().sqrt() < 2  # what a norm leaves
    assert topk_idx.min() >= 0
    assert topk_idx.max() < num_experts
    assert all(len(set(row)) == num_topk for row in topk_idx.tolist())
    assert np.allclose(topk_weights.sum(axis=1), 1, atol=1e-5)


def test_recorded_trace() -> None:
    check_trace(TRACE, hidden=128, num_topk=4, num_experts=16)
    assert TRACE.stat().st_size < 600_000
    with np.load(TRACE) as trace:
        load = np.bincount(trace["topk_idx"].ravel(), minlength=16) / trace["topk_idx"].size * 16
    assert load.min() > 0  # all experts are in use


def test_document_shows_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import moe_report

    report = moe_report.load(ROOT / "docs" / "training.json")
    assert moe_report.results(report) in (ROOT / "docs" / "training.md").read_text()
    assert {run.seed for run in report.runs} == {0, 1, 2}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--wires", "bf16", "fp3"], "'fp3'"),
        (["--hidden", "48", "--heads", "4"], "48"),
        (["--experts", "4", "--topk", "5"], "--topk is 5"),
        (["--heads", "3"], "--heads is 3"),
        (["--wires", "twin", "bf16"], "begins with 'twin'"),
        (["--wires", "bf16", "bf16"], "each wire once"),
        (["--steps", "0"], "0 is less than 1"),
        (["--out", "no/such/folder/x"], "no/such/folder"),
        (["--save-trace", "no/such/folder/x"], "no/such/folder"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *arguments])
    import train_moe

    with pytest.raises(SystemExit) as error:
        train_moe.main()
    assert message in f"{error.value.code} {capsys.readouterr().err}"


@pytest.mark.mpi
@pytest.mark.skipif(not have_launcher("mpi"), reason="needs mpirun and mpi4py")
def test_experts_must_divide_over_the_ranks() -> None:
    code, output = run_command([*launch_command("mpi", 2), EXAMPLE, "--experts", "5"], timeout=60)
    assert code not in (0, None), output
    assert output.count("train_moe: ") == 1
    assert "num_experts is 5" in output
