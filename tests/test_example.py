"""The training example: it learns, is repeatable, and says what is wrong with its arguments."""

from __future__ import annotations

import importlib
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
GRADIENTS = "examples/gradient_error.py"
TRACE = ROOT / "tests" / "data" / "moe_trace.npz"
SMALL = ["--steps", "12", "--batch", "4", "--length", "64", "--seeds", "1", "--validation-windows", "16"]
SMALL += ["--hidden", "64", "--expert-hidden", "16", "--experts", "8", "--device", "cpu"]
TINY = ["--batch", "4", "--length", "32", "--layers", "2", "--hidden", "64", "--heads", "2", "--experts", "4"]
TINY += ["--topk", "2", "--expert-hidden", "32", "--device", "cpu", "--threads", "1"]
RECIPES = ["bf16", "fp8_flow", "fp4", "fp4_all"]
LEGS = {"dispatch", "combine", "grad_dispatch", "grad_combine"}


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests import the modules of the examples."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def run_example(num_ranks: int, arguments: list[str], launcher: str = "mpi", program: str = EXAMPLE) -> str:
    """The output of a run that must succeed."""
    start = [sys.executable] if num_ranks == 1 else launch_command(launcher, num_ranks)
    code, output = run_command([*start, program, *arguments], timeout=120)
    assert code == 0, output
    return output


def run_here(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process."""
    module = importlib.import_module(Path(program).stem)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    threads = torch.get_num_threads()
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)


def losses(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All that must not change when the command is repeated."""
    return [
        (run["name"], run["training_loss"], run["validation_loss"], run["bytes_per_token"]) for run in report["runs"]
    ]


def check_report(report: dict[str, Any], wires: list[str], num_ranks: int) -> None:
    assert report["num_ranks"] == num_ranks
    assert EXAMPLE in report["command"]
    assert report["versions"].keys() == {"fp4comm", "torch", "python"}
    assert report["machine"]
    assert report["date"]
    assert [run["name"] for run in report["runs"]] == wires
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


@pytest.mark.mpi
@pytest.mark.skipif(not have_launcher("mpi"), reason="needs mpirun and mpi4py")
def test_recipes_on_two_ranks(tmp_path: Path) -> None:
    """They learn alike, send less and less, and clipping, which two ranks must agree on, changes what they do."""
    arguments = [*TINY, "--steps", "20", "--seeds", "1", "--validation-windows", "16", "--dtype", "float32"]
    run_example(2, [*arguments, "--clip", "1", "--recipes", *RECIPES, "--out", str(tmp_path / "recipes")])
    report = json.loads((tmp_path / "recipes.json").read_text())
    assert [run["name"] for run in report["runs"]] == RECIPES
    assert (report["kind"], report["num_ranks"], report["transport"]) == ("recipe", 2, "mpi")
    assert str(tmp_path) not in json.dumps(report)
    first = report["runs"][0]
    assert np.mean(first["training_loss"][-3:]) < np.mean(first["training_loss"][:3]) - 0.5
    for run in report["runs"][1:]:
        assert run["training_loss"] == pytest.approx(first["training_loss"], rel=0.02)
        assert run["training_loss"] != first["training_loss"]
    sent = [sum(run["bytes_per_token"].values()) for run in report["runs"]]
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] < 0.5 * sent[0]


def test_runs_are_taken_up(tmp_path: Path, examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*TINY, "--steps", "3", "--seeds", "1", "--validation-windows", "8", "--out", f"{tmp_path / 'run'}/"]
    (tmp_path / "training.md").write_text("a\n<!-- results: run -->\n<!-- end of results: run -->\nb\n")
    run_here(EXAMPLE, [*arguments, "--recipes", "bf16"], monkeypatch)
    first = json.loads((tmp_path / "run.json").read_text())
    run_here(EXAMPLE, [*arguments, "--recipes", "bf16", "twin", "fp4", "--resume"], monkeypatch)
    report = json.loads((tmp_path / "run.json").read_text())
    assert [run["name"] for run in report["runs"]] == ["bf16", "twin", "fp4"]
    assert report["runs"][0] == first["runs"][0]
    assert report["command"].count(EXAMPLE) == 2
    assert report["summary"]["twin"]["difference_percent"] == pytest.approx(0, abs=0.1)
    document = (tmp_path / "training.md").read_text()
    assert document.startswith("a\n<!-- results: run -->\n```text\npython examples/train_moe.py")
    assert document.endswith("<!-- end of results: run -->\nb\n")
    with pytest.raises(SystemExit, match="learning_rate"):
        run_here(EXAMPLE, [*arguments, "--recipes", "fp8_flow", "--resume", "--learning-rate", "1"], monkeypatch)
    run_here("examples/moe_report.py", [str(tmp_path / "run.json")], monkeypatch)
    assert (tmp_path / "training.md").read_text() == document
    (tmp_path / "run.json").write_text('{"runs": []}')
    with pytest.raises(SystemExit, match="no results of train_moe"):
        run_here(EXAMPLE, [*arguments, "--recipes", "bf16", "--resume"], monkeypatch)


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_experts_use_the_weights_of_the_last_step(recipe: str, examples: None) -> None:
    import moe_trainer
    import train_moe
    from moe_data import Corpus
    from moe_ranks import Ranks

    settings = train_moe.parse([*TINY, "--recipes", recipe, "--learning-rate", "0.05", "--steps", "4"])
    text = torch.arange(4096).remainder(251).to(torch.uint8)
    corpus, ranks = Corpus(text, text, num_files=1, digest=""), Ranks(None)
    trainer, fresh = (moe_trainer.Trainer(settings, recipe, 0, corpus, ranks) for _ in range(2))
    before = trainer.evaluate(4)
    trainer.step(0)
    fresh.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate(4) == fresh.evaluate(4) != before


@pytest.mark.mpi
@pytest.mark.skipif(not have_launcher("mpi"), reason="needs mpirun and mpi4py")
def test_gradient_errors(tmp_path: Path, examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow as numbers get fewer bits, and one process and two measure the same but for the order of sums."""
    arguments = [*TINY, "--after", "2", "--dtype", "float32", "--recipes", *RECIPES]
    run_here(GRADIENTS, [*arguments, "--out", str(tmp_path / "one")], monkeypatch)
    run_example(2, [*arguments, "--out", str(tmp_path / "two")], program=GRADIENTS)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for part in ("tokens", "gate_up", "down", "router"):
        bf16, fp8, fp4, fp4_all = (np.array(one["errors"][recipe][part]) for recipe in RECIPES)
        assert bf16.shape == (2,)
        assert 0 < bf16.max() < fp8.max() < min(fp4.max(), fp4_all.max())
        assert max(fp4.max(), fp4_all.max()) < 0.6
        for recipe in ("fp8_flow", "fp4"):
            assert two["errors"][recipe][part] == pytest.approx(one["errors"][recipe][part], rel=0.2)
    assert 0 <= max(one["errors"]["fp4"]["choices"]) < 0.1
    assert one["loss"]["fp32"] == pytest.approx(two["loss"]["fp32"], rel=1e-5)


def test_text_of_installed_packages(tmp_path: Path, examples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import moe_data

    roots = [tmp_path / "lib", tmp_path / "lib" / "site-packages"]
    for number in range(400):
        folder = roots[number % 2] / f"package{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.py").write_text(f"{number % 390}\n" * 3000)  # the last ten are copies
        (folder / f"{number}.so").write_bytes(b"\0" * 3000)
    monkeypatch.setattr(moe_data.sysconfig, "get_path", lambda name: str(roots[0]))
    monkeypatch.setattr(sys, "path", [str(roots[1]), str(tmp_path)])
    corpus = moe_data.Corpus.of_installed_packages()
    assert corpus.num_files == 390
    assert corpus.digest == moe_data.Corpus.of_installed_packages().digest
    assert corpus.validation.numel() > 0.04 * corpus.train.numel()
    text = {bytes(part.numpy().tobytes()) for part in (corpus.train, corpus.validation)}
    assert all(b"\0" not in part for part in text)
    part = moe_data.Corpus.of_installed_packages(max_bytes=corpus.train.numel())
    assert part.train.numel() + part.validation.numel() <= corpus.train.numel()
    with pytest.raises(FileNotFoundError, match="installed packages"):
        moe_data.Corpus.of_installed_packages(max_bytes=1000)


@pytest.mark.parametrize(
    "name, seeds",
    [
        ("training", {0, 1, 2}),
        ("training_recipes", {0, 1, 2}),
        ("training_large", {0, 1, 2}),
        ("training_large_one_gpu", {0}),
    ],
)
def test_document_shows_its_results(name: str, seeds: set[int], examples: None) -> None:
    import moe_report

    report = moe_report.load(ROOT / "docs" / f"{name}.json")
    assert moe_report.results(report) in (ROOT / "docs" / "training.md").read_text()
    assert {run.seed for run in report.runs} == seeds


def test_document_shows_gradient_errors(examples: None) -> None:
    import gradient_error

    report = gradient_error.load(ROOT / "docs" / "gradient_error.json")
    assert gradient_error.results(report) in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.parametrize("preset, weights, tokens", [("small", 5e5, 4e5), ("large", 3e8, 2e7)])
def test_presets_are_as_large_as_they_say(preset: str, weights: float, tokens: float, examples: None) -> None:
    import train_moe

    settings = train_moe.parse(["--preset", preset, "--recipes"])
    matrices = 4 * settings.hidden**2 + 3 * settings.experts * settings.hidden * settings.expert_hidden
    assert settings.layers * matrices >= weights
    assert settings.steps * settings.batch * settings.length >= tokens
    assert settings.recipes == ["bf16", "twin", "fp8_flow", "fp4", "fp4_all"]
    assert train_moe.parse(["--preset", preset, "--steps", "7"]).steps == 7


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--wires", "bf16", "fp3"], "'fp3'"),
        (["--hidden", "48", "--heads", "4"], "48"),
        (["--experts", "4", "--topk", "5"], "--topk is 5"),
        (["--heads", "3"], "--heads is 3"),
        (["--wires", "twin", "bf16"], "--wires begins with 'twin'"),
        (["--wires", "bf16", "bf16"], "each one once"),
        (["--steps", "0"], "0 is less than 1"),
        (["--out", "no/such/folder/x"], "there is no folder no/such/folder"),
        (["--save-trace", "no/such/folder/x"], "no/such/folder"),
        (["--recipes", "bf16", "mxfp4"], "'mxfp4'"),
        (["--recipes", "twin"], "--recipes begins with 'twin'"),
        (["--recipes", "bf16", "--wires", "bf16"], "not allowed with"),
        (["--recipes", "--expert-hidden", "48"], "--expert-hidden is 48"),
        (["--recipes", "--save-trace", "x"], "--save-trace"),
        (["--resume", "--save-trace", "x"], "--save-trace"),
        (["--preset", "huge"], "'huge'"),
        (["--learning-rate", "-1"], "-1 is not above 0"),
        (["--text", "books"], "'books'"),
        pytest.param(
            ["--device", "cuda"],
            "--device is cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which --device cuda takes"),
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    examples: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as error:
        run_here(EXAMPLE, arguments, monkeypatch)
    assert message in f"{error.value.code} {capsys.readouterr().err}"


def test_gradients_need_a_step_after_the_training(
    examples: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="--after is 9"):
        run_here(GRADIENTS, ["--after", "9", "--steps", "9"], monkeypatch)


@pytest.mark.mpi
@pytest.mark.skipif(not have_launcher("mpi"), reason="needs mpirun and mpi4py")
def test_experts_must_divide_over_the_ranks() -> None:
    code, output = run_command([*launch_command("mpi", 2), EXAMPLE, "--experts", "5"], timeout=60)
    assert code not in (0, None), output
    assert output.count("train_moe: ") == 1
    assert "num_experts is 5" in output


def test_seeds_that_not_all_have(examples: None) -> None:
    """Differences and shares compare runs of the same seed; a line says how many seeds each has."""
    import moe_report

    report = moe_report.load(ROOT / "docs" / "training_large.json")
    assert "Seeds" not in moe_report.results(report)
    of_second = ("bf16", "fp8_flow", "fp4")
    report.runs = [run for run in report.runs if run.seed == 0 or (run.seed == 1 and run.name in of_second)]
    first, twin = report.of("bf16"), report.of("twin")
    assert [run.seed for run in first] == [0, 1]
    assert [run.seed for run in twin] == [0]
    found = report.summary()["twin"]
    assert found["difference_percent"] == pytest.approx(100 * (twin[0].final_loss / first[0].final_loss - 1))
    for leg, share in found["relative_bytes"].items():
        assert share == pytest.approx(twin[0].bytes_per_token[leg] / first[0].bytes_per_token[leg])
    assert "Seeds: bf16 2, fp8_flow 2, fp4 2, fp4_all 1, twin 1." in moe_report.results(report)
