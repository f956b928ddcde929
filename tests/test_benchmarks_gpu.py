"""The benchmarks for GPUs: on a CPU that pretends to be one, and, where there is one, for real."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_runs import TINY, run_main, run_on_two_ranks
from cuda_targets import open_target

from benchmarks import (
    bandwidth,
    clocks,
    codec,
    codec_cases,
    common,
    cuda_codec,
    device,
    gate,
    plot,
    tables,
    timing,
    workload,
)
from benchmarks.cuda_cases import all_cases
from benchmarks.cuda_data import Data
from benchmarks.ranks import Ranks
from fp4comm.transport import LoopbackTransport

CPU = torch.device("cpu")


@pytest.mark.parametrize("module", [bandwidth, codec])
def test_no_gpu_is_a_wrong_option(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        run_main(module, monkeypatch, ["--device", "cuda"])
    assert stopped.value.code == 2
    assert "--device cuda: torch finds no CUDA device; accepted: auto, cpu" in capsys.readouterr().err


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto") == device.choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.choose_device("auto") == device.choose_device("cuda") == torch.device("cuda", 1)
    assert device.choose_device("cpu") == CPU
    assert device.gpu_facts(CPU) == {"device": "cpu"}


class FakeEvent:
    """An event of a device that does everything at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.time - self.time)


GPU_FACTS = {
    "device": "cuda",
    "gpu": "A GPU",
    "driver": "1.2",
    "cuda": "13.0",
    "cupy": "14.2",
    "nccl": "2.28.1",
}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000))
    for module in (bandwidth, cuda_codec):
        monkeypatch.setattr(module, "gpu_facts", lambda device: GPU_FACTS)
    monkeypatch.setattr(timing, "make_clock", clocks.GpuClock)


@pytest.mark.usefixtures("fake_gpu")
def test_bandwidth_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpus.jsonl"
    arguments = [*TINY, "--tokens", 7, "--standard", "--wires", "bf16,mxfp4", "--calls", 3, "--json", path]
    run_main(bandwidth, monkeypatch, arguments)
    run, *records = common.read_json_lines(path)
    assert GPU_FACTS.items() <= run.items()
    legs = [record for record in records if record["record"] == "leg"]
    configs = tables.unique(record["config"] for record in legs)
    cached = [bool(case.get("cached")) for case in (*bandwidth.STANDARD, bandwidth.HALF_SIZE)]
    assert [config["is_cached"] for config in configs] == cached
    assert [config["num_tokens"] for config in configs] == [7] * len(bandwidth.STANDARD) + [3]
    assert len(legs) == len(configs) * 2 * 3
    for record in legs:
        assert 0 < record["host_seconds"]["median"] < record["alone_seconds"]["median"]
        assert {"pack", "wire"} <= set(record["stage_seconds"]) or record["wire"] == "bf16/choice"
    output = capsys.readouterr().out
    assert "A GPU each, driver 1.2" in output
    assert max(map(len, output.split("\n\n", 1)[1].splitlines())) <= 120
    table = tables.make_table("gpus", tmp_path)
    assert len(re.findall(r"(?m)^\| (bf16|mxfp4|bf16/choice) \|", table)) == len(configs) * 3
    assert "| dispatch x choice |" in table


class Named(LoopbackTransport):
    """A transport of one rank with the name of another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


@pytest.mark.usefixtures("fake_gpu")
def test_transports_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def use_device(self: Ranks, wanted: str, names: Any = None) -> None:
        self.transports = {name: Named(name) for name in names}
        self.transport = self.transports["nccl"]

    monkeypatch.setattr(Ranks, "use_device", use_device)
    monkeypatch.setattr(bandwidth, "require_gpus", lambda *_: None)
    path, picture = tmp_path / "gpus.jsonl", tmp_path / "latency.svg"
    suites = ["--standard", "--latency", "--sms", "8,16", "--transports", "nccl,peer"]
    run_main(bandwidth, monkeypatch, [*TINY, "--tokens", 2000, *suites, "--calls", 2, "--json", path])
    run, *records = common.read_json_lines(path)
    assert run["transport"] == "nccl, peer"
    assert [record["transport"] for record in records if record["record"] == "check_inputs"] == ["nccl", "peer"]
    legs = [record for record in records if record["record"] == "leg"]
    first = [record for record in legs if record["config"] == legs[0]["config"] and record["leg"] == "dispatch"]
    by_name = {(leg["transport"], leg["wire"], leg["num_sms"]): leg for leg in first}
    assert len(by_name) == len(first) == 2 * 3 + 2 + 1
    times = {name: leg["seconds"]["median"] for name, leg in by_name.items()}
    limited, choice = by_name["peer", "mxfp4", 8], by_name["nccl", "bf16/choice", None]
    assert limited["speedup_over_bf16"] == times["peer", "bf16", None] / times["peer", "mxfp4", 8]
    assert limited["speedup_over_nccl"] == times["nccl", "mxfp4", None] / times["peer", "mxfp4", 8]
    assert limited["speedup_over_per_choice"] == choice["seconds"]["median"] / times["peer", "mxfp4", 8]
    assert choice["speedup_over_nccl"] is None
    assert max(map(len, capsys.readouterr().out.split("\n\n", 1)[1].splitlines())) <= 120

    table = tables.make_table("gpus", tmp_path)
    assert table.count("| transport | wire | MB sent |") == len(bandwidth.STANDARD) + 1
    assert table.count("| dispatch x nccl |") == len(bandwidth.STANDARD) + 1
    assert table.count("| multiprocessors |") == 1
    assert len(re.findall(r"(?m)^\| (8|16) \| ", table)) == 2 + 2 * 5  # multiprocessors; 8 tokens, twice
    assert table.count("| tokens | transport | wire |") == 2
    assert "\n1, 8, 32, 128, 512 tokens per rank x 256, " in table
    assert table.count("What new routes add to a dispatch") == 2
    assert tables.make_table("gpus:2-3", tmp_path).count("tokens per rank") == 2
    pytest.importorskip("matplotlib")
    run_main(plot, monkeypatch, [path, picture])
    assert "mxfp4, peer" in picture.read_text()


def test_a_wrong_wire_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    check = gate.Gate.check

    def wrong(self: gate.Gate, variant: workload.Variant) -> tuple[str | None, dict[str, float | None]]:
        return ("mxfp4 is wrong", {}) if variant.wire == "mxfp4" else check(self, variant)

    monkeypatch.setattr(gate.Gate, "check", wrong)
    with pytest.raises(SystemExit) as stopped:
        run_main(bandwidth, monkeypatch, [*TINY, "--tokens", 7, "--json", path])
    assert stopped.value.code == 1
    records = common.read_json_lines(path)
    assert {record["wire"] for record in records if record["record"] == "leg"} == {"bf16", "fp8", "bf16/choice"}
    assert [record["problem"] for record in records if record["record"] == "failure"] == ["mxfp4 is wrong"]
    assert "mxfp4" not in tables.make_table("out", tmp_path)


@pytest.mark.usefixtures("fake_gpu")
def test_codec_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(codec, "choose_device", lambda wanted: SimpleNamespace(type="cuda"))
    real_run = cuda_codec.run
    monkeypatch.setattr(cuda_codec, "run", lambda options, device: real_run(options, CPU))
    monkeypatch.setattr(cuda_codec.Loop, "_capture", lambda self: None)
    monkeypatch.setattr(cuda_codec, "count_launches", lambda function: 1)
    path = tmp_path / "gpu.jsonl"
    size = ["--rows", 40, "--hidden", 96, "--check-rows", 30]
    run_main(codec, monkeypatch, [*size, "--repeats", 1, "--warmup-secs", 0, "--json", path])
    run, *records = common.read_json_lines(path)
    assert (run["device"], run["rows"], run["hidden"]) == ("cuda", 40, 96)
    assert [record["name"] for record in records] == [case.name for case in all_cases()]
    for record in records:
        assert record["calls"] % record["sets"] == 0
        assert record["share_of_copy"] == pytest.approx(record["gbps"] / record["copy_gbps"])
    assert max(map(len, capsys.readouterr().out.split("\n\n", 1)[1].splitlines())) <= 120
    assert tables.make_table("gpu", tmp_path).count("\n| ") == len(records) + 1


@pytest.mark.usefixtures("fake_gpu")
def test_a_wrong_kernel_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = cuda_codec.Bench(CPU, 40, 64, 30, 0, common.Budget(0.0, 0.0, 1))
    case = next(case for case in all_cases() if case.name == "BF16 -> MXFP4")
    assert bench.problem(case) is None
    bench.checked.source(codec_cases.Kind.BF16).data[3, 5] = 100.0
    problem = bench.problem(case)
    assert problem is not None
    assert problem.startswith("result 0 differs from the CPU's in ")


def test_sums_of_stages_and_rows_of_calls(fake_gpu: None) -> None:
    clock = clocks.GpuClock(Ranks(), 3)
    calls: list[int] = []
    with clock.stages() as stage:

        def call() -> int:
            with stage("pack"):
                time.sleep(0.002)
            with stage("pack"):
                calls.append(len(calls))
            return calls[-1]

        assert clock.call("dispatch", call) == 2
    times = clock.take()
    assert times.keys() == {"dispatch", "pack"}
    assert 0.002 <= times["pack"] <= times["dispatch"]
    clock.call("combine", lambda: calls.append(-1))
    assert clock.take().keys() == {"combine", "combine.alone", "combine.host"}
    assert len(calls) == 3 + 1 + 3


@pytest.mark.parametrize("hidden, num_rows", [(32, 5), (160, 150)])
def test_cases_of_a_gpu_are_the_same_on_a_copy_of_the_data(hidden: int, num_rows: int) -> None:
    original = Data(CPU, num_rows, hidden, 0)
    copy = Data(CPU, num_rows, hidden, 0, original)
    for case in all_cases():
        job, same = case.build(original), case.build(copy)
        job.run()
        same.run()
        assert cuda_codec.difference(same.outputs(), job.outputs()) is None, case.name
        assert job.num_bytes >= sum(part.nbytes for part in job.outputs()) // 2 > 0 or case.is_latency, case.name


@pytest.mark.parametrize(
    "name",
    [
        "FP8 -> MXFP4",
        "MXFP4 -> FP8 rows + columns, 1 group",
        "pack for 2 ranks: BF16 -> MXFP4, routing",
        "unpack for experts: MXFP4 -> FP8",
        "MoE: unpack for experts, MXFP4 -> FP8 rows",
        "sum over 2 ranks: MXFP4 -> BF16",
        "route: tokens to 2 ranks",
        "read routing, expert layout",
    ],
)
def test_cases_on_emulated_kernels(name: str) -> None:
    case = next(case for case in all_cases() if case.name == name)
    with open_target("emulated") as target:
        on_gpu = Data(CPU, 40, 96, 0)
        on_gpu.backend = target.backend
        got = case.build(on_gpu)
        before = target.num_launches()
        got.run()
        assert target.num_launches() - before == (2 if case.is_latency else 1)
    wanted = case.build(Data(CPU, 40, 96, 0, on_gpu))
    wanted.run()
    assert cuda_codec.difference(got.outputs(), wanted.outputs()) is None


def test_how_results_may_differ() -> None:
    wanted = [torch.ones(100)]
    got = [torch.ones(100)]
    got[0][7] += 0.01
    assert "differs from the CPU's in" in str(cuda_codec.difference(got, wanted))
    assert cuda_codec.difference(got, wanted, max_error=2e-3) is None
    assert "1.0e-03 of its norm" in str(cuda_codec.difference(got, wanted, max_error=9e-4))
    got[0][7] = torch.nan
    assert "nan of its norm" in str(cuda_codec.difference(got, wanted, max_error=2e-3))


@pytest.mark.gpu
def test_codec_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    size = ["--device", "cuda", "--rows", 1024, "--hidden", 512, "--check-rows", 200]
    run_main(codec, monkeypatch, [*size, "--repeats", 2, "--warmup-secs", 0, "--json", path])
    run, *records = common.read_json_lines(path)
    assert run["gpu"] == torch.cuda.get_device_name()
    assert {record["record"] for record in records} == {"conversion"}
    assert all(record["launches"] > 0 for record in records if not record["name"].startswith("fill"))


@pytest.mark.gpu
def test_bandwidth_on_gpus(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    suites = ["--standard", "--latency", "--sms", "8,32"]
    code, output = run_on_two_ranks(
        "torchrun", [*TINY, "--device", "cuda", "--tokens", 64, *suites, "--json", path], timeout=280
    )
    assert code == 0, output
    run, *records = common.read_json_lines(path)
    assert run["transport"] == "nccl, peer"
    legs = [record for record in records if record["record"] == "leg" and "/" not in record["wire"]]
    for record in legs:
        can_be_captured = record["config"]["is_cached"] or record["config"]["has_capacity"]
        assert ("graph_seconds" in record) == can_be_captured
