"""The benchmarks run, refuse wrong options together, count bytes as the library does, and fail on wrong results."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.run
from benchmark_runs import QUICK, TINY, run_main, run_on_two_ranks
from launch import ROOT, launch_command, run_command
from thread_ranks import run_thread_ranks

import fp4comm
from benchmarks import bandwidth, codec, codec_cases, common, gate, legs, moe_layer, plot, tables, workload
from benchmarks.ranks import Ranks
from fp4comm.backends import cpu
from fp4comm.formats import WIRE_KINDS
from fp4comm.transport import Transport

CONFIG = workload.Config(num_ranks=1, num_tokens=12, hidden=256, num_topk=3, num_experts=6)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    idx = np.argsort(rng.random((10, 4)), axis=1)[:, :2].astype(np.int32)
    x_bits = rng.integers(0x3F00, 0x4000, (10, 64)).astype(np.uint16)
    path = tmp_path / "trace.npz"
    np.savez(path, x_bits=x_bits, topk_idx=idx, topk_weights=rng.random((10, 2), np.float32), num_experts=4)
    return path


def check_bandwidth_records(path: Path, num_cases: int, wires: Sequence[str]) -> list[dict[str, Any]]:
    run, *records = common.read_json_lines(path)
    assert run["benchmark"] == "bandwidth"
    assert {"command", "date", "cpu", "cores", "isa", "torch", "ranks", "transport"} <= run.keys()
    legs = [record for record in records if record["record"] == "leg"]
    names = [(record["wire"], record["leg"]) for record in legs]
    assert len(names) == num_cases * 2 * (len(wires) + 1)
    assert set(names) == {(wire, leg) for wire in (*wires, "bf16/choice") for leg in ("dispatch", "combine")}
    for record in legs:
        assert record["transport"] == run["transport"]
        assert record["num_sms"] is record["speedup_over_nccl"] is None
        seconds = record["seconds"]
        assert 0 < seconds["minimum"] <= seconds["median"] <= seconds["p95"]
        assert seconds["num_samples"] == 2
        assert record["logical_gbps"] == pytest.approx(record["rows"] * record["row_bytes"] / seconds["median"] / 1e9)
        assert record["remote_gbps"] <= record["logical_gbps"]
        assert set(record["stage_seconds"]) == (set() if "/" in record["wire"] else {"pack", "wire", "unpack"})
    assert [record["record"] for record in records[-1:]] == ["check_inputs"]
    return legs


# --- whole runs


@pytest.mark.mpi
def test_bandwidth_under_mpirun(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    wires = ["bf16", "fp8", "mxfp4", "fp32"]
    arguments = [*TINY, "--tokens", "5,9", "--wires", ",".join(wires), "--json", path]
    code, output = run_on_two_ranks("mpi", arguments)
    assert code == 0, output
    assert max(map(len, output.split("\n\n", 1)[1].splitlines())) <= 120
    legs = check_bandwidth_records(path, 2, wires)
    sqnr = {record["wire"]: record["sqnr_db"] for record in legs if record["leg"] == "dispatch"}
    assert sqnr["bf16"] is sqnr["fp32"] is None
    assert 10 < sqnr["mxfp4"] < sqnr["fp8"]


@pytest.mark.mpi
def test_bandwidth_under_torchrun_with_a_trace(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "out.jsonl"
    how = ["--trace", trace, "--tokens", 6, "--input", "fp8", "--layout", "rank", "--cached", *QUICK, "--json", path]
    code, output = run_on_two_ranks("torchrun", how)
    assert code == 0, output
    config = check_bandwidth_records(path, 1, ["bf16", "fp8", "mxfp4"])[0]["config"]
    assert (config["hidden"], config["num_topk"], config["num_experts"], config["trace"]) == (64, 2, 4, "trace.npz")
    assert (config["input"], config["output"], config["layout"], config["is_cached"]) == ("fp8", "fp8", "rank", True)


def test_bandwidth_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    arguments = [*TINY, "--tokens", 7, "--input", "fp32", "--skew", 1.5, "--wires", "mxfp4", "--json", path]
    run_main(bandwidth, monkeypatch, arguments)
    legs = check_bandwidth_records(path, 1, ["mxfp4"])
    assert all(record["sent_bytes"] == 0 and record["speedup_over_bf16"] is None for record in legs)
    output = capsys.readouterr().out
    assert "nothing is sent" in output
    assert "\n1 rank on " in output


@pytest.mark.mpi
def test_suites_under_mpirun(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    arguments = [*TINY, "--latency", "--transports", "mpi", "--json", path]
    code, output = run_on_two_ranks("mpi", arguments)
    assert code == 0, output
    assert max(map(len, output.split("\n\n", 1)[1].splitlines())) <= 120
    run, *records = common.read_json_lines(path)
    assert run["transport"] == "mpi"
    legs = [record for record in records if record["record"] == "leg"]
    assert len(legs) == 2 * 2 * len(bandwidth.LATENCY_TOKENS) * 3
    measured = [record for record in legs if "routing_seconds" in record]
    assert [record["config"]["num_tokens"] for record in measured] == [
        num for num in bandwidth.LATENCY_TOKENS for _ in range(2)
    ]
    assert all(record["config"]["has_capacity"] and record["leg"] == "dispatch" for record in measured)


def test_few_multiprocessors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured and written of them; a CPU, which has none, must be allowed them for that."""
    monkeypatch.setattr(bandwidth, "require_gpus", lambda *arguments: None)
    path = tmp_path / "out.jsonl"
    run_main(bandwidth, monkeypatch, [*TINY, "--tokens", 32, "--sms", "4,8", "--json", path])
    legs = [record for record in common.read_json_lines(path) if record["record"] == "leg"]
    limited = [(record["wire"], record["num_sms"], record["leg"]) for record in legs if record["num_sms"] is not None]
    assert limited == [("mxfp4", num, leg) for leg in ("dispatch", "combine") for num in (4, 8)]
    table = tables.make_table("out", tmp_path)
    assert "mxfp4 8 SMs" in table
    assert "\n1 rank on " in table


def test_every_configuration_is_measured_once() -> None:
    ranks = Ranks()
    words = ["--standard", "--sms", "8,132", "--latency", "--tokens", "8192,4096", "--wires", "bf16,mxfp4"]
    cases = bandwidth.make_cases(ranks, bandwidth.make_parser(ranks).parse_args(words))
    sizes = [case.workload.config.num_tokens for case in cases]
    num_standard = len(bandwidth.STANDARD)
    assert sizes == [8192] * num_standard + [4096] * num_standard + [2048] + [1, 8, 32, 128, 512] * 2
    assert len({case.workload.config for case in cases}) == len(cases)
    assert list(map(str, cases[0].variants)) == [
        "bf16 over loopback",
        "mxfp4 over loopback",
        "mxfp4 over loopback on 8 multiprocessors",
        "mxfp4 over loopback on 132 multiprocessors",
    ]


def test_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    run_main(codec, monkeypatch, ["--rows", 230, "--hidden", 160, *QUICK, "--json", path])
    run, *records = common.read_json_lines(path)
    assert (run["benchmark"], run["rows"], run["hidden"]) == ("codec", 230, 160)
    names = [record["name"] for record in records]
    assert len(names) == len(set(names)) > 40
    for record in records:
        median = record["seconds"]["median"]
        assert record["gelems"] == pytest.approx(record["elements"] / median / 1e9)
        assert record["share_of_copy"] == pytest.approx(record["gbps"] / record["copy_gbps"])
    assert max(map(len, capsys.readouterr().out.split("\n\n", 1)[1].splitlines())) <= 120


def test_codec_with_a_forced_isa(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(codec, monkeypatch, ["--small", "--isa", "scalar", "--only", "BF16 -> FP8", *QUICK])
    output = capsys.readouterr().out
    assert "kernels scalar" in output
    assert output.count("BF16 -> FP8") == 2 + 1  # the conversions, and the command


# --- wrong options


@pytest.mark.mpi
def test_all_ranks_refuse_wrong_options() -> None:
    code, output = run_on_two_ranks("mpi", ["--experts", "9", "--device", "cpu"])
    assert code == 2, output
    assert output.count("error: 9 experts, --topk 8 on 2 ranks") == 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--tokens", "4,0"], "0 is not a positive integer"),
        (["--wires", "bf16,fp5"], "'fp5' is not one of fp32, bf16, fp8, mxfp4"),
        (["--layout", "both"], "invalid choice: 'both'"),
        (["--hidden", "48"], "hidden is 48; accepted: a positive multiple of 32"),
        (["--topk", "9", "--experts", "8"], "at least as many as --topk"),
        (["--trace", "none.npz"], "accepted: an npz file with x_bits, topk_idx, topk_weights, num_experts"),
        (["--trace", "TRACE", "--hidden", "64", "--skew", "1"], "--hidden, --skew with --trace: the trace has its own"),
        (["--secs", "nan"], "not a number of at least 0"),
        (["--standard", "--cached"], "--standard with --cached"),
        (["--sms", "8", "--capacity"], "--sms with --cached, --capacity or --trace"),
        (["--sms", "8", "--device", "cpu"], "--sms is given, but rows lie on the CPU; accepted: with rows on GPUs"),
        (["--experts", "4", "--topk", "5", "--device", "cpu"], "4 experts, --topk 5 on 1 rank; accepted"),
        (["--sms", "8,0"], "0 is not a positive integer"),
        (["--transports", "nccl,ucx"], "'ucx' is not one of loopback, mpi"),
        (["--transports", "nccl", "--device", "cpu"], "--transports nccl: not available here; accepted: loopback"),
    ],
)
def test_wrong_options(
    wrong: list[str],
    message: str,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_main(bandwidth, monkeypatch, [str(trace) if word == "TRACE" else word for word in wrong])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --- bytes and workload


@pytest.mark.parametrize("hidden", [32, 96, 160, 7168])
@pytest.mark.parametrize("num_topk", [1, 3, 8])
@pytest.mark.parametrize("wire", list(WIRE_KINDS))
def test_row_bytes_are_those_of_the_wire(wire: str, num_topk: int, hidden: int) -> None:
    config = replace(CONFIG, hidden=hidden, num_topk=num_topk)
    kind = WIRE_KINDS[wire]
    assert config.row_bytes(wire, "dispatch") == cpu.row_layout(kind, hidden, num_topk).row_bytes
    assert config.row_bytes(wire, "combine") == cpu.row_layout(kind, hidden, 0).row_bytes
    assert replace(config, is_cached=True).row_bytes(wire, "dispatch") == cpu.row_layout(kind, hidden, 0).row_bytes


def measured_and_counted(transport: Transport, wire: str) -> None:
    config = replace(CONFIG, num_ranks=transport.num_ranks)
    batch, x = (work := workload.Workload(config)).batch(transport.rank, 0), work.x(transport.rank)
    comm = fp4comm.EPCommunicator(
        transport, num_experts=config.num_experts, hidden=config.hidden, precision=fp4comm.Precision(wire, wire)
    )
    rows = config.rows_to_rank(batch.topk_idx)
    sent = int(rows.sum() - rows[transport.rank])
    received, handle = comm.dispatch(x, batch.topk_idx, batch.topk_weights)
    assert comm.traffic["dispatch"] == sent * config.row_bytes(wire, "dispatch")
    comm.dispatch(x, handle=handle)
    cached = replace(config, is_cached=True)
    sent_in_all = sent * (config.row_bytes(wire, "dispatch") + cached.row_bytes(wire, "dispatch"))
    assert comm.traffic["dispatch"] == sent_in_all
    comm.combine(received.x, handle)
    arrived = len(received.topk_idx) - int(rows_from(transport, rows)[transport.rank])
    assert comm.traffic["combine"] == arrived * config.row_bytes(wire, "combine")


def rows_from(transport: Transport, rows: torch.Tensor) -> torch.Tensor:
    return transport.all_to_all(rows[:, None]).flatten()


@pytest.mark.parametrize("wire", list(WIRE_KINDS))
def test_counted_bytes_are_the_traffic(wire: str) -> None:
    run_thread_ranks(measured_and_counted, 3, wire)


def test_routes_are_distinct_experts_and_fresh_every_round() -> None:
    work = workload.Workload(replace(CONFIG, num_tokens=200, num_experts=64))
    first, again, second = work.batch(1, 0), work.batch(1, 0), work.batch(1, 1)
    assert torch.equal(first.topk_idx, again.topk_idx)
    assert torch.equal(first.topk_weights, again.topk_weights)
    assert not torch.equal(first.topk_idx, second.topk_idx)
    assert all(len(set(row)) == 3 for row in first.topk_idx.tolist())


def test_skew_makes_some_experts_popular() -> None:
    shares = []
    for skew in (0.0, 1.0, 2.0):
        work = workload.Workload(replace(CONFIG, num_tokens=2000, num_experts=64, skew=skew))
        counts = torch.bincount(work.batch(0, 0).topk_idx.flatten(), minlength=64)
        shares.append(int(counts.max()) / int(counts.sum()))
    assert shares[0] < 0.03 < shares[1] < shares[2]


def test_a_trace_is_replayed_in_order(trace: Path) -> None:
    recorded = workload.Trace.load(trace)
    config = replace(CONFIG, num_ranks=2, num_tokens=3, hidden=64, num_topk=2, num_experts=4)
    work = workload.Workload(config, recorded)
    for rank, index, rows in ((0, 0, [0, 1, 2]), (1, 0, [3, 4, 5]), (0, 1, [6, 7, 8]), (1, 1, [9, 0, 1])):
        assert torch.equal(work.batch(rank, index).topk_idx, recorded.topk_idx[rows])
    x = work.x(1)
    assert isinstance(x, torch.Tensor)
    assert torch.equal(x, recorded.x[3:6])


# --- the gates fail when something is wrong


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("input_format, output", [("bf16", "bf16"), ("fp8", "fp8"), ("fp32", "bf16")])
def test_the_gate_finds_a_wrong_codec(
    layout: str, input_format: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, layout=layout, input=input_format, output=output)
    small = gate.Gate(Ranks(), workload.Workload(config))
    for wire in WIRE_KINDS:
        assert small.check(workload.Variant("loopback", wire))[0] is None
    assert small.check_per_choice() is None
    through_wire = gate.reference.through_wire
    monkeypatch.setattr(gate.reference, "through_wire", lambda wire: through_wire(wire, "floor"))
    wrong = gate.Gate(Ranks(), workload.Workload(config))
    problem, _ = wrong.check(workload.Variant("loopback", "mxfp4"))
    assert problem == "dispatch of mxfp4 over loopback on rank 0 differs from the reference exchange"


def test_the_codec_check_finds_a_wrong_byte() -> None:
    rowsets = codec_cases.Rowsets(30, 64, 0)
    case = codec_cases.conversion(rowsets, rowsets.source(codec_cases.Kind.BF16), codec_cases.Kind.MXFP4)
    assert case.problem() is None
    rowsets.target(codec_cases.Kind.MXFP4).data[29, 31] ^= 1
    assert case.check() == "the numbers differ from the oracle's"


# --- the script for a node


NODE = [str(ROOT / "benchmarks" / "node.sh")]


def node_commands(num_gpus: int, out: Path) -> list[list[str]]:
    """What the script would run."""
    code, output = run_command([*NODE, "--dry-run", str(out)], timeout=60, env={"GPUS": str(num_gpus)})
    assert code == 0, output
    assert not out.exists()
    return [shlex.split(line) for line in output.splitlines()]


def check_options(module: str, options: list[str], num_ranks: int) -> None:
    """The program's own parser takes them, and the sizes fit that many ranks."""
    if module == "benchmarks.bandwidth":
        gpus = {"num_ranks": num_ranks, "device": torch.device("cuda"), "transports": {"nccl": None, "peer": None}}
        ranks: Any = SimpleNamespace(leave=pytest.fail, **gpus)
        parsed = bandwidth.make_parser(ranks).parse_args(options)
        assert bandwidth.make_cases(ranks, parsed)
    elif module == "benchmarks.legs":
        assert legs.make_parser().parse_args(options).experts % num_ranks == 0
    else:
        assert module == "benchmarks.moe_layer"
        assert all(sizes.num_experts % num_ranks == 0 for sizes in moe_layer.parse(options).shapes.values())


@pytest.mark.parametrize("num_gpus, expected", [(2, {2}), (3, {2}), (4, {4}), (7, {4}), (8, {4, 8})])
def test_node_runs_what_the_programs_take(num_gpus: int, expected: set[int], tmp_path: Path) -> None:
    found: dict[str, set[int]] = {}
    whole = node_commands(num_gpus, tmp_path / "out")
    starts = [command[: command.index("-m")] for command in whole]
    commands = [command[command.index("-m") + 1 :] for command in whole]
    for start, (module, *options) in zip(starts, commands, strict=True):
        num_ranks = int(start[start.index("-n") + 1]) if "-n" in start else 1
        if module == "torch.distributed.run":
            launch = torch.distributed.run.get_args_parser().parse_args(options)
            assert launch.standalone
            assert launch.module
            num_ranks, module, options = int(launch.nproc_per_node), launch.training_script, launch.training_script_args
        if module == "pytest":
            assert (ROOT / options[-1]).is_file()
        elif module == "benchmarks.plot":
            assert any(options[0] in command for command in commands[: commands.index([module, *options])])
        else:
            check_options(module, options, num_ranks)
            found.setdefault(module, set()).add(num_ranks)
    layer = {"benchmarks.moe_layer": {max(expected)}}
    assert found == {"benchmarks.bandwidth": expected, "benchmarks.legs": expected, **layer}


@pytest.mark.parametrize("program, code", [("true", 0), ("false", 1)])
def test_node_goes_on_after_a_failure(program: str, code: int, tmp_path: Path) -> None:
    everything = node_commands(2, tmp_path / "none")
    env = {"GPUS": "2", "PYTHON": program, "MPIRUN": program}
    found, output = run_command([*NODE, str(tmp_path / "out")], timeout=60, env=env)
    assert found == code, output
    assert len(list((tmp_path / "out" / "logs").iterdir())) == len(everything)
    assert output.count("exit status 1, see") == code * len(everything)


def test_node_keeps_to_its_time(tmp_path: Path) -> None:
    """A step that hangs is stopped when all of the time is over, and nothing is started after that."""
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    env = {"GPUS": "2", "PYTHON": "true", "MPIRUN": str(hanging), "NODE_SECS": "6"}
    code, output = run_command([*NODE, str(tmp_path / "out")], timeout=50, env=env)
    assert code == 1, output
    assert "bandwidth_ep2_rank: stopped after" in output
    assert "tests: no time left" in output


def test_node_refuses_what_it_can_not_do(tmp_path: Path) -> None:
    for options, gpus, message in (
        ([], "1", "1 GPUs; accepted: at least two"),
        (["--fast"], "2", "--fast; accepted: --dry-run"),
        (["a", "b"], "2", "one OUT_DIR"),
    ):
        code, output = run_command([*NODE, *options], timeout=60, env={"GPUS": gpus})
        assert code == 2, output
        assert message in output


@pytest.mark.mpi
def test_legs(tmp_path: Path) -> None:
    """Forward and backward of every wire, in both layouts; deviations are those of the wire."""
    path = tmp_path / "legs.jsonl"
    command = [*launch_command("torchrun", 2), "-m", "benchmarks.legs", *TINY, "--tokens", "6", "--json", str(path)]
    code, output = run_command(command, timeout=90)
    assert code == 0, output
    run, *records = common.read_json_lines(path)
    assert run["benchmark"] == "legs"
    assert len(records) == 2 * 3 * len(legs.LEGS)
    for record in records:
        assert record["seconds"]["minimum"] > 0
        assert record["raw_seconds"]["minimum"] > 0
        assert record["sent_bytes"] > 0
        low, high = {"bf16": (200, 201), "fp8": (22, 45), "mxfp4": (10, 25)}[record["wire"]]
        assert low <= (200 if record["sqnr_db"] is None else record["sqnr_db"]) < high, record


# --- helpers


def test_summary() -> None:
    assert common.Summary.of([3.0]) == common.Summary(3.0, 3.0, 3.0, 1)
    assert common.Summary.of([4.0, 1.0, 2.0, 3.0]) == common.Summary(2.5, 4.0, 1.0, 4)
    hundred = common.Summary.of([float(value) for value in range(100, 0, -1)])
    assert hundred == common.Summary(50.5, 95.0, 1.0, 100)
    with pytest.raises(ValueError, match="no samples"):
        common.Summary.of([])


def test_variants_take_turns() -> None:
    order: list[tuple[str, int]] = []

    def variant(name: str) -> Callable[[int], common.Times]:
        def run(index: int) -> common.Times:
            order.append((name, index))
            return {"secs": float(len(order))}

        return run

    times = common.measure({name: variant(name) for name in "abc"}, common.Budget(0.0, 0.0, 2))
    assert order == [(name, index) for index, names in enumerate(("abc", "bca", "cab")) for name in names]
    assert {name: [sample["secs"] for sample in samples] for name, samples in times.items()} == {
        "a": [6.0, 8.0],  # round 0 was the warm-up
        "b": [4.0, 9.0],
        "c": [5.0, 7.0],
    }


def test_numbers_and_tables() -> None:
    values = [None, 0, 0.00049, 0.0123, 1.2345, 45.678, 999.4, 12345.6]
    assert [common.number(value) for value in values] == ["-", "0", "0.000", "0.012", "1.23", "45.7", "999", "12,346"]
    text = common.format_table(["name", "n"], [["a", "1"], ["long name", "23"]])
    assert text == "name        n\n---------  --\na           1\nlong name  23"


def test_documents_follow_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    arguments = ["--rows", 8, "--hidden", 32, "--only", "BF16 -> FP8", *QUICK, "--json", results / "codec-here.jsonl"]
    run_main(codec, monkeypatch, arguments)
    readme.write_text("Before\n<!-- table:codec-here -->\nold\n<!-- /table -->\nAfter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", results)
    for options, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        with pytest.raises(SystemExit) as stopped:
            run_main(tables, monkeypatch, options)
        assert stopped.value.code == code
    lines = readme.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("Before", "After")
    assert sum(line.startswith("| BF16 -> FP8") for line in lines) == 2
    readme.write_text("<!-- table:none -->\n<!-- /table -->\n")
    with pytest.raises(SystemExit, match=r"README.md: table 'none': there is no none.jsonl"):
        run_main(tables, monkeypatch, [])


def test_tables_and_plot_of_a_bandwidth_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "sizes.jsonl", tmp_path / "sizes.svg"
    run_main(bandwidth, monkeypatch, [*TINY, "--tokens", "2,4", "--wires", "bf16,mxfp4", "--json", source])
    text = tables.make_table("sizes", tmp_path)
    assert len(re.findall(r"(?m)^\| (bf16|mxfp4|bf16/choice) \|", text)) == 2 * 3
    assert json.loads(source.read_text().splitlines()[0])["command"] in text
    run_main(plot, monkeypatch, [source, picture])
    assert "mxfp4" in picture.read_text()
