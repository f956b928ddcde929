"""DeepEP's interface over fp4comm, against what DeepEP's own results would be."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from adapters import deep_ep_cases, deep_ep_elastic_cases, deep_ep_megatron
from launch import ROOT, launch_command, run_command, run_ranks

from fp4comm import InvalidArgument, NotAvailable
from fp4comm.adapters import deep_ep
from fp4comm.adapters.deep_ep import Buffer, Config, ElasticBuffer, EventHandle, EventOverlap

CASES = (*deep_ep_cases.CASES, *deep_ep_elastic_cases.CASES)
HAVE_MEGATRON = deep_ep_megatron.HAVE_MEGATRON
needs_megatron = pytest.mark.skipif(not HAVE_MEGATRON, reason="needs Megatron-Core (pip install megatron-core)")


@pytest.fixture(scope="module")
def both() -> list[tuple[dict[str, str], dict[str, Any]]]:
    """What failed of the cases, and what Megatron does, of each rank."""
    return run_ranks(deep_ep_megatron.on_two_ranks, 2, launcher="torchrun", timeout=200)


@pytest.fixture(scope="module")
def two(both: list[tuple[dict[str, str], dict[str, Any]]]) -> list[dict[str, str]]:
    return [failures for failures, _ in both]


@pytest.fixture(scope="module")
def megatron(both: list[tuple[dict[str, str], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [results for _, results in both]


@pytest.fixture(scope="module")
def four() -> list[dict[str, str]]:
    return run_ranks(deep_ep_cases.run_cases, 4, launcher="torchrun", timeout=120)


@pytest.fixture(scope="module")
def two_of_mpi() -> list[dict[str, str]]:
    return run_ranks(deep_ep_cases.run_mpi_cases, 2, launcher="mpi", timeout=120)


def check(failures: list[dict[str, str]], case: str) -> None:
    for rank, of_rank in enumerate(failures):
        assert case not in of_rank, f"rank {rank}: {of_rank[case]}"
        stopped = next(iter(of_rank), None)
        assert stopped is None or CASES.index(stopped) > CASES.index(case), f"not run, since {stopped} failed"


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(two: list[dict[str, str]], case: str) -> None:
    check(two, case)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(four: list[dict[str, str]], case: str) -> None:
    check(four, case)


@pytest.mark.mpi
@pytest.mark.parametrize("case", deep_ep_cases.MPI_CASES)
def test_two_ranks_of_mpi(two_of_mpi: list[dict[str, str]], case: str) -> None:
    check(two_of_mpi, case)


@pytest.mark.gpu
@pytest.mark.mpi
def test_on_gpus() -> None:
    """All cases, with a GPU for each rank."""
    num_ranks = min(torch.cuda.device_count(), 2)
    failures = run_ranks(deep_ep_cases.run_cases, num_ranks, launcher="torchrun", timeout=300, on_gpus=True)
    assert failures == [{}] * num_ranks


@needs_megatron
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["exact", "one-sided"])
def test_megatron_is_exact(megatron: list[dict[str, Any]], case: str) -> None:
    for of_rank in megatron:
        assert set(of_rank[case]) == {"output", "x", "router", "experts"}
        assert max(of_rank[case].values()) < 1e-6


@needs_megatron
@pytest.mark.mpi
def test_megatron_trains_in_fp4(megatron: list[dict[str, Any]]) -> None:
    for of_rank in megatron:
        exact, fp4 = of_rank["losses fp32"], of_rank["losses fp4"]
        assert exact != fp4
        assert exact[-1] < 0.2 * exact[0]
        assert fp4[-1] < 0.2 * fp4[0]
        assert set(of_rank["traffic fp4"]) == {"dispatch", "combine", "grad_dispatch", "grad_combine"}
        assert of_rank["traffic fp4"]["dispatch"] < 0.3 * of_rank["traffic fp32"]["dispatch"]


@needs_megatron
@pytest.mark.mpi
def test_install_after_megatron(megatron: list[dict[str, Any]]) -> None:
    for of_rank in megatron:
        assert of_rank["late"].startswith("megatron.core.transformer.moe.fused_a2a has been imported without deep_ep")
        assert "accepted: fp4comm.adapters.deep_ep.install() before that import" in of_rank["late"]


LAYOUT = "num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None num_tokens_per_expert=None"
ASYNC = "previous_event=None async_finish=False allocate_on_comm_stream=False"
LOW_LATENCY_END = "async_finish=False return_recv_hook=False"
ELASTIC = "previous_event=None previous_event_before_epilogue=None async_with_compute_stream=False"
ELASTIC_END = f"num_sms=0 num_qps=0 {ELASTIC} allocate_on_comm_stream=False"
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (
        Buffer.__init__,
        "self group num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24 "
        "allow_nvlink_for_low_latency_mode=True allow_mnnvl=False explicitly_destroy=False enable_shrink=False "
        "comm=None",
    ),
    (Buffer.get_dispatch_layout, f"self topk_idx num_experts {ASYNC}"),
    (
        Buffer.dispatch,
        f"self x handle=None {LAYOUT} topk_idx=None topk_weights=None expert_alignment=1 num_worst_tokens=0 "
        f"config=None {ASYNC}",
    ),
    (Buffer.combine, f"self x handle topk_weights=None bias=None config=None {ASYNC}"),
    (
        Buffer.low_latency_dispatch,
        "self x topk_idx num_max_dispatch_tokens_per_rank num_experts cumulative_local_expert_recv_stats=None "
        f"dispatch_wait_recv_cost_stats=None use_fp8=True round_scale=False use_ue8m0=False {LOW_LATENCY_END}",
    ),
    (
        Buffer.low_latency_combine,
        f"self x topk_idx topk_weights handle use_logfmt=False zero_copy=False {LOW_LATENCY_END} out=None "
        "combine_wait_recv_cost_stats=None",
    ),
    (Buffer.clean_low_latency_buffer, "self num_max_dispatch_tokens_per_rank hidden num_experts"),
    (Buffer.get_low_latency_rdma_size_hint, "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts"),
    (Buffer.get_next_low_latency_combine_buffer, "self handle"),
    (Buffer.low_latency_update_mask_buffer, "self rank_to_mask mask=False"),
    (Buffer.low_latency_query_mask_buffer, "self mask_status"),
    (Buffer.low_latency_clean_mask_buffer, "self"),
    (Buffer.get_local_buffer_tensor, "self dtype size=None offset=0 use_rdma_buffer=False"),
    (Buffer.get_dispatch_config, "num_ranks"),
    (Buffer.get_combine_config, "num_ranks"),
    (Buffer.set_num_sms, "new_num_sms"),
    (Buffer.capture, ""),
    (Buffer.is_sm90_compiled, ""),
    (Buffer.get_comm_stream, "self"),
    (Buffer.destroy, "self"),
    (
        Config,
        "num_sms=20 num_max_nvl_chunked_send_tokens=6 num_max_nvl_chunked_recv_tokens=256 "
        "num_max_rdma_chunked_send_tokens=6 num_max_rdma_chunked_recv_tokens=256",
    ),
    (EventOverlap, "event=None extra_tensors=None"),
    (EventOverlap.current_stream_wait, "self release_handle=False"),
    (EventHandle, ""),
    (
        ElasticBuffer.__init__,
        "self group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 "
        "use_fp8_dispatch=False deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True "
        "prefer_overlap_with_compute=True "
        "sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 explicitly_destroy=False",
    ),
    (
        ElasticBuffer.get_buffer_size_hint,
        "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False allow_hybrid_mode=True "
        "allow_multiple_reduction=True",
    ),
    (
        ElasticBuffer.dispatch,
        "self x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None "
        f"num_max_tokens_per_rank=None expert_alignment=None {ELASTIC_END} handle=None do_handle_copy=True "
        "do_cpu_sync=None do_expand=False do_zero_padding=False use_tma_aligned_col_major_sf=False",
    ),
    (ElasticBuffer.combine, f"self x handle topk_weights=None bias=None {ELASTIC_END}"),
    (ElasticBuffer.barrier, "self use_comm_stream=True with_cpu_sync=False sequential=True"),
    (
        ElasticBuffer.get_theoretical_num_sms,
        "self num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=200 sm_write_gbs=50",
    ),
    (ElasticBuffer.get_theoretical_num_qps, "self num_sms"),
    (ElasticBuffer.capture, ""),
]


@pytest.mark.parametrize("function, arguments", SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_arguments_are_those_of_deep_ep(function: Callable[..., Any], arguments: str) -> None:
    """Names, order and defaults, as of version 2.1.0."""
    parameters = inspect.signature(function).parameters.values()
    texts = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(texts) == arguments


def test_configs() -> None:
    for config in (Buffer.get_dispatch_config(2), Buffer.get_combine_config(144)):
        assert config.num_sms == Buffer.num_sms
        hints = [config.get_nvl_buffer_size_hint(bytes_of_row, 8) for bytes_of_row in (1024, 2048)]
        assert 0 < hints[0] < hints[1]
        assert config.get_rdma_buffer_size_hint(1024, 8) == 0
        assert config.get_rdma_buffer_size_hint(1024, 16) > 0
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 8 * 128 * 7168
    with pytest.raises(InvalidArgument, match="new_num_sms is 7; accepted: an even number"):
        Buffer.set_num_sms(7)


def test_events_on_the_cpu() -> None:
    calls: list[int] = []
    overlap = Buffer.capture()
    overlap.register_hook_after_wait(lambda: calls.append(1))
    with overlap(release_handle=True):
        assert not calls
    assert calls == [1]
    assert overlap.event is None
    ElasticBuffer.capture().current_stream_wait()
    with pytest.raises(AssertionError, match="the call was not asynchronous"):
        EventOverlap().current_stream_wait()


def test_mistakes_at_making_a_buffer() -> None:
    with pytest.raises(InvalidArgument, match="group is a NoneType; accepted: a torch ProcessGroup or an mpi4py"):
        Buffer(None)
    with pytest.raises(InvalidArgument, match="group is a int"):
        ElasticBuffer(4)
    with pytest.raises(InvalidArgument, match="group is without this process"):
        Buffer(FakeGroup(-1))
    with pytest.raises(NotAvailable, match="can't go on without a rank"):
        Buffer(FakeGroup(0), enable_shrink=True)
    with pytest.raises(InvalidArgument, match=r"precision is 'fp5'; accepted: .*'fp4'"):
        deep_ep.configure(precision="fp5")
    with pytest.raises(InvalidArgument, match="option is 'hidden'; accepted: 'precision', 'check_inputs'"):
        deep_ep.configure(hidden=64)


def test_mistakes_in_a_layout() -> None:
    buffer = Buffer(FakeGroup(0))
    with pytest.raises(InvalidArgument, match=r"topk_idx\[1, 0\] is 8; accepted: 0 to 7, or -1 for none"):
        buffer.get_dispatch_layout(torch.tensor([[3], [8]]), 8)
    with pytest.raises(InvalidArgument, match=r"topk_idx is of shape \[2\]; accepted: \[num_tokens, num_topk\]"):
        buffer.get_dispatch_layout(torch.tensor([3, 4]), 8)


class FakeGroup:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 1


@pytest.fixture
def clean_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing called deep_ep before, nor after."""
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    deep_ep.uninstall()
    deep_ep.configure()


@pytest.mark.usefixtures("clean_modules")
def test_install() -> None:
    deep_ep.install(precision="bf16", num_sms=24)
    module = importlib.import_module("deep_ep")
    assert importlib.util.find_spec("deep_ep") is not None
    assert module.Buffer is Buffer
    assert module.topk_idx_t == torch.int64
    assert module.__version__.startswith("2.1.0")
    for name in ("deep_ep.utils", "deep_ep.utils.event"):
        assert importlib.import_module(name).EventHandle is EventHandle
        assert importlib.util.find_spec(name) is not None
    assert importlib.import_module("deep_ep.buffers.elastic").ElasticBuffer is ElasticBuffer
    assert importlib.import_module("deep_ep.buffers").legacy.Buffer is Buffer
    assert not hasattr(module, "HybridEPBuffer")  # programs ask for it by import
    deep_ep.install()
    deep_ep.uninstall()
    assert importlib.util.find_spec("deep_ep") is None


@pytest.mark.usefixtures("clean_modules")
def test_install_beside_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("Buffer = 'the real one'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"deep_ep is there already \(.*__init__.py\); .* install\(force=True\)"):
        deep_ep.install()
    deep_ep.install(force=True)
    assert importlib.import_module("deep_ep").Buffer is Buffer
    deep_ep.uninstall()
    assert importlib.import_module("deep_ep").Buffer == "the real one"
    with pytest.raises(InvalidArgument, match="deep_ep is there already"):
        deep_ep.install()


@pytest.mark.usefixtures("clean_modules")
def test_install_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = ModuleType("a_caller")
    vars(caller)["HAVE_DEEP_EP"] = False
    monkeypatch.setitem(sys.modules, "a_caller", caller)
    with pytest.raises(InvalidArgument, match="a_caller has been imported without deep_ep"):
        deep_ep.install()
    assert "deep_ep" not in sys.modules


@pytest.mark.mpi
def test_program_of_the_documentation(tmp_path: Path) -> None:
    """The first Python block of docs/deep_ep.md."""
    program = tmp_path / "program.py"
    program.write_text((ROOT / "docs" / "deep_ep.md").read_text().split("```python\n")[1].split("```")[0])
    status, output = run_command([*launch_command("torchrun", 2), str(program)], timeout=120)
    assert status == 0, output
    assert output.count("bytes sent") == 2
