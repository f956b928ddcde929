"""The benchmark of the MoE layer: every recipe beside plain PyTorch, on two ranks and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import QUICK
from launch import ROOT, launch_command, run_command

from benchmarks import common, moe_layer, moe_overlap, moe_plot, moe_report, moe_shapes, moe_variants, tables
from benchmarks.ranks import Ranks
from fp4comm import InvalidArgument

SIZES = ["--hidden", "256", "--width", "128", "--experts", "8", "--topk", "2", "--tokens", "16"]
PUBLISHED = ROOT / "benchmarks" / "results" / "moe_layer_h200_deepseek-v3.jsonl"


@pytest.mark.mpi
def test_moe_layer(tmp_path: Path) -> None:
    path, picture = tmp_path / "moe.jsonl", tmp_path / "moe.svg"
    options = ["-m", "benchmarks.moe_layer", *SIZES, *QUICK, "--json", str(path), "--plot", str(picture)]
    code, output = run_command([*launch_command("torchrun", 2), *options], timeout=120)
    assert code == 0, output
    run, *records = common.read_json_lines(path)
    assert run["benchmark"] == "moe_layer"
    assert run["shapes"] == ["custom"]
    assert [record["name"] for record in records] == [moe_variants.PLAIN, *moe_variants.RECIPES]
    by_name = {record["name"]: record for record in records}
    noise = {name: min(r for r in record["sqnr_db"] if r is not None) for name, record in list(by_name.items())[1:]}
    assert noise["bf16"] > 35  # BF16 sums in another order
    assert 15 < noise["fp8_flow"] < 30
    assert 5 < noise["fp4"] < 20
    assert all(record["seconds"]["step"]["minimum"] > 0 for record in records)
    assert picture.stat().st_size > 1000


@pytest.mark.mpi
def test_one_rank_and_some_recipes(tmp_path: Path) -> None:
    path = tmp_path / "moe.jsonl"
    options = ["-m", "benchmarks.moe_layer", *SIZES, *QUICK, "--recipes", "fp4", "--json", str(path)]
    one_thread = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it for several ranks
    code, output = run_command([*launch_command("torchrun", 1), *options], timeout=120, env=one_thread)
    assert code == 0, output
    run, *records = common.read_json_lines(path)
    assert run["ranks"] == 1
    assert [record["name"] for record in records] == [moe_variants.PLAIN, "fp4"]
    assert output.index("measuring custom: 16 tokens and ") < output.index("custom, 16 tokens per rank x 256")


@pytest.mark.mpi
def test_moe_overlap(tmp_path: Path) -> None:
    path = tmp_path / "overlap.jsonl"
    options = ["-m", "benchmarks.moe_overlap", *SIZES, *QUICK, "--recipes", "bf16,fp4", "--graph", "--json", str(path)]
    code, output = run_command([*launch_command("torchrun", 2), *options], timeout=120)
    assert code == 0, output
    run, *records = common.read_json_lines(path)
    assert run["benchmark"] == "moe_overlap"
    assert [(record["recipe"], record["way"]) for record in records] == [
        (recipe, way) for recipe in ("bf16", "fp4") for way in ("without", "after", "beside")
    ]
    assert {record["shared"] for record in records} == {1}
    assert all(record["seconds"]["training"]["minimum"] > 0 for record in records)
    assert output.index("measuring custom: 16 tokens and ") < output.index("custom: 16 tokens x 256")
    assert "custom: 16 tokens x 256, 2 of 8 experts and 1 shared, width 128" in output
    assert "hidden)" not in output  # nothing overlaps on a CPU


def test_a_cpu_has_no_multiprocessors() -> None:
    options = moe_overlap.make_parser().parse_args(["--sms", "8"])
    with pytest.raises(InvalidArgument, match="--sms is given, but rows lie on the CPU"):
        moe_overlap.run(Ranks(), options)


def test_what_overlap_hides() -> None:
    """Of the time that shared experts add; alone it is the host that counts."""
    seconds = {
        "without": {"forward": 2e-3, "training": 7e-3, "training.alone": 9e-3, "training.host": 4e-3},
        "after": {"forward": 3e-3, "training": 9e-3, "training.alone": 10e-3, "training.host": 5e-3},
        "beside": {"forward": 2.25e-3, "training": 9.5e-3, "training.alone": 9.5e-3, "training.host": 6e-3},
    }
    records = [
        {"recipe": "fp4", "way": way, "seconds": {key: {"median": value} for key, value in times.items()}}
        for way, times in seconds.items()
    ]
    header, rows = moe_overlap.table(records)
    assert header == ["recipe", "shared experts", "forward", "with backward", "with backward, alone", "launching it"]
    assert rows[2] == ["fp4", "beside", "2.25 (75 % hidden)", "9.50 (-25 % hidden)", "9.50", "6.00"]
    assert rows[1] == ["fp4", "after", "3.00", "9.00", "10.0", "5.00"]


@pytest.mark.gpu
def test_memory_on_one_gpu(tmp_path: Path) -> None:
    """The peak holds what is kept, and less than all with gradients; every kernel of our own has a part."""
    path = tmp_path / "moe.jsonl"
    sizes = ["--hidden", "1024", "--width", "512", "--experts", "8", "--topk", "2", "--tokens", "4096"]
    options = ["-m", "benchmarks.moe_layer", *sizes, "--repeats", "1", "--warmup-secs", "0", "--json", str(path)]
    code, output = run_command([*launch_command("torchrun", 1), *options], timeout=300)
    assert code == 0, output
    gradients = 8 * 3 * 1024 * 512 * 2
    for record in common.read_json_lines(path)[1:]:
        kept, peak, with_gradients = (record[f"{which}_bytes"] for which in ("kept", "peak", "peak_with_gradients"))
        assert 0 < kept < peak <= with_gradients <= peak + 1.05 * gradients + 2**20
        assert record["kernel_seconds"]["GEMMs"] > 0


def test_shapes_and_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    everything = moe_layer.parse(["--shape", "all", "--tokens", "64"]).shapes
    assert list(everything) == list(moe_shapes.SHAPES)
    assert (everything["deepseek-v2-lite"].width, everything["deepseek-v2-lite"].num_tokens) == (1408, 64)
    some = moe_layer.parse(["--shape", "qwen3-30b-a3b,deepseek-v3"]).shapes
    assert [sizes.hidden for sizes in some.values()] == [2048, 7168]
    own = moe_layer.parse(["--shape", "qwen3-30b-a3b", "--width", "96"]).shapes
    assert (own["custom"].hidden, own["custom"].width, own["custom"].num_topk) == (2048, 96, 8)
    for wrong, message in ((["--shape", "all", "--topk", "2"], "one --shape"), (["--recipes", "fp2"], "'fp2' is not")):
        with pytest.raises(SystemExit):
            moe_layer.parse(wrong)
        assert message in capsys.readouterr().err


def test_parts_of_a_step() -> None:
    names = {
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exchange",
        "pack_tokens": "packing",
        "route_place": "exchange",
        "expand_rows": "unpacking",
        "quantize_rows": "rows",
        "mxfp4_to_fp8_columns": "columns",
        "gemm_columns": "columns",
        "swiglu_backward": "SwiGLU",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>": "SwiGLU",
        "nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_NNT": "GEMMs",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>": "GEMMs",
        "void at::native::indexFuncLargeIndex<float, long>": "rest",
    }
    assert {name: moe_report.part_of(name) for name in names} == names


def test_every_own_kernel_has_a_part() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu"))]
    kernels = [kernel for source in sources for kernel in own_kernels(source)]
    assert len(kernels) > 15
    assert {moe_report.part_of(kernel) for kernel in kernels} <= set(moe_report.PARTS) - {"rest", "GEMMs"}


def own_kernels(source: str) -> list[str]:
    """Names of the kernels that a file defines."""
    heads = [part.partition("{")[0] for part in source.split('extern "C" __global__')[1:]]
    return [
        head.replace("__launch_bounds__(", "").split("(")[-2 if head.count("(") > 1 else 0].split()[-1]
        for head in heads
    ]


def test_peak_bytes() -> None:
    """Of a trace in which a gradient takes memory that was free again, and a block goes that was there before."""

    def event(action: str, addr: int, size: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size}

    trace = [
        event("segment_alloc", 0, 1000),
        event("free_requested", 7),
        event("alloc", 1, 100),
        event("alloc", 2, 40),
        event("free_requested", 2),
        event("free_completed", 2),
        event("alloc", 2, 50),  # a gradient, alive at the end
        event("alloc", 3, 20),
        event("free_requested", 1),
    ]
    assert moe_variants.peak_bytes(trace, []) == 170
    assert moe_variants.peak_bytes(trace, [2]) == 140
    assert moe_variants.peak_bytes(trace, [2, 3, 9]) == 140
    assert moe_variants.peak_bytes([], [2]) == 0


def example_run() -> list[dict[str, Any]]:
    """The records of a published run, for two shapes."""
    run, *records = common.read_json_lines(PUBLISHED)
    return [run, *({**record, "shape": shape} for shape in ("deepseek-v3", "qwen3-30b-a3b") for record in records)]


def test_tables_and_plots_of_several_shapes(tmp_path: Path) -> None:
    run, *records = example_run()
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (run, *records)))
    table = tables.make_table("two", tmp_path)
    assert [line.partition(",")[0] for line in table.splitlines() if line.endswith("width 2048:")] == [
        "deepseek-v3",
        "qwen3-30b-a3b",
    ]
    assert table.count("| kept MiB | peak MiB |") == table.count("| conversions |") == 2
    fp4 = next(record for record in records if record["name"] == "fp4")
    weights, step = fp4["kernel_seconds"]["weights"], fp4["seconds"]["step"]["median"]
    assert f"({100 * weights / step:.1f} %) |" in table
    text = moe_report.text(records)
    assert text.count(moe_report.KERNELS) == 2
    picture = tmp_path / "two.png"
    moe_plot.plot([run, *records], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
