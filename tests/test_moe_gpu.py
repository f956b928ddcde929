"""The MoE layer on a GPU: its GEMMs, the numbers of the CPU, and no wait for the device where shapes are fixed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp4comm import quantize_mxfp4
from fp4comm.moe import FP8Rows, MoELayer, Recipe
from fp4comm.moe.gemm import BlockGemms, Groups, RowGemms, ScaledGemms
from fp4comm.moe.shared import Lane

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"hidden": 512, "ffn_hidden": 256, "num_experts": 8, "num_topk": 2}
GROUP_ROWS = (64, 0, 144, 16, 256)


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")


def error(got: Tensor, want: Tensor) -> float:
    """Of the norm."""
    return float((got.float().cpu() - want.float().cpu()).norm() / want.float().cpu().norm())


def operands(gemms: Any, device: str) -> list[Tensor]:
    """What the three GEMMs of a matrix of experts give: rows, gradients of rows, gradient of the weights."""
    rng = torch.Generator().manual_seed(1)
    num_rows = sum(GROUP_ROWS)
    x, dy = torch.randn(num_rows, 512, generator=rng), torch.randn(num_rows, 384, generator=rng)
    weights = gemms.weights((torch.randn(len(GROUP_ROWS), 384, 512, generator=rng) / 16).to(device), torch.bfloat16)
    groups = Groups.of_sizes(GROUP_ROWS, device=device)
    rows = gemms.rows(x.to(device), torch.bfloat16), gemms.rows(dy.to(device), torch.bfloat16)
    columns = [gemms.columns(part, groups) for part in rows]
    row_scales = rows[0].scales * 2 if isinstance(rows[0], FP8Rows) else None  # of blocks, whose numbers may be larger
    return [
        gemms.multiply(rows[0], weights, groups, torch.bfloat16),
        gemms.multiply(rows[1], gemms.transposed(weights), groups, torch.bfloat16),
        gemms.weight_gradient(columns[1], columns[0], groups, torch.float32),
        gemms.payload_columns(
            quantize_mxfp4(x.to(device)), torch.arange(num_rows, device=device), row_scales, groups, torch.bfloat16
        ).dequantize(),
    ]


@pytest.mark.parametrize(
    "gemms, on_cpu",
    [
        (BlockGemms(), BlockGemms()),
        pytest.param(ScaledGemms(), BlockGemms(), marks=needs_hopper),
        (RowGemms(), RowGemms()),
        pytest.param(RowGemms(on_tensor_cores=True), RowGemms(), marks=needs_hopper),
    ],
    ids=["blocks", "blocks on tensor cores", "rows", "rows on tensor cores"],
)
def test_gemms_give_the_numbers_of_the_cpu(gemms: Any, on_cpu: Any) -> None:
    """Within the roundings of BF16, and of the sums of FP8 tensor cores, which keep fewer bits than float32."""
    for got, want in zip(operands(gemms, "cuda"), operands(on_cpu, "cpu"), strict=True):
        assert got.shape == want.shape
        assert error(got, want) < 3e-3


def make_layer(recipe: str | Recipe, device: str, **options: Any) -> MoELayer:
    layer = MoELayer(recipe=recipe, device=device, **{**SIZES, **options})
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * parameter.shape[-1] ** -0.5)
    return layer


def run(layer: MoELayer, device: str) -> list[Tensor]:
    """Result and gradients for tokens whose choices no rounding of the router changes."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(300, SIZES["hidden"], generator=rng).bfloat16().to(device).requires_grad_()
    idx = torch.rand(300, SIZES["num_experts"], generator=rng).argsort(dim=1)[:, :2].to(device)
    weights = torch.rand(300, 2, generator=rng).to(device).requires_grad_()
    out = layer.experts(x, idx, weights, layer.comm)
    out.backward(torch.randn(out.shape, generator=rng).bfloat16().to(device))
    return [out.detach(), x.grad, weights.grad, layer.experts.gate_up.grad, layer.experts.down.grad]


@pytest.mark.parametrize("options", [{"gemms": "emulated"}, {"num_max_tokens_per_rank": 320}, {"gemms": "auto"}])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow", "fp4"])
def test_experts_give_the_numbers_of_the_cpu(recipe: str, options: dict[str, Any]) -> None:
    """A number beside a threshold of FP8 may fall on the other side, since sums between are made in another order."""
    want = run(make_layer(recipe, "cpu"), "cpu")
    layer = make_layer(recipe, "cuda", **options)
    for got, expected in zip(run(layer, "cuda"), want, strict=True):
        assert error(got, expected) < 0.01


def fill_new_memory(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """What `torch.empty` and `empty_like` return on a GPU holds such bytes from now on."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def filled(*args: Any, allocate: Callable[..., Tensor] = allocate, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.view(torch.uint8).fill_(byte).view(tensor.dtype) if tensor.is_cuda and tensor.ndim else tensor

        monkeypatch.setattr(torch, name, filled)


@pytest.mark.parametrize(
    "recipe", ["bf16", "fp8_flow", "fp4", "fp4_all", pytest.param(Recipe(scaling="block"), id="blocks")]
)
def test_places_that_stay_empty_have_no_say(recipe: str | Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their memory held before; there is room for four times as many tokens as there are."""
    want = run(make_layer(recipe, "cpu"), "cpu")
    results = []
    for byte in (0xFF, 0):  # 0xFF is NaN in every format
        with monkeypatch.context() as patched:
            layer = make_layer(recipe, "cuda", num_max_tokens_per_rank=1200)
            fill_new_memory(patched, byte)
            results.append(run(layer, "cuda"))
    assert all(map(torch.equal, *results))
    assert all(bool(result.isfinite().all()) for result in results[0])
    if recipe != "fp4_all":  # in which one threshold more of MXFP4 is 2 % of the norm
        for got, expected in zip(results[0], want, strict=True):
            assert error(got, expected) < 0.01


@contextmanager
def no_waiting() -> Iterator[None]:
    """Meanwhile every wait for the device that torch knows of raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow", "fp4", "fp4_all"])
def test_fixed_shapes_never_wait_for_the_device(recipe: str) -> None:
    layer = make_layer(recipe, "cuda", num_max_tokens_per_rank=320, num_shared_experts=1)
    x = torch.randn(300, SIZES["hidden"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    layer(x).backward(upstream)  # kernels are compiled, operands made
    with no_waiting():
        layer(x).backward(upstream)


PAUSE_CYCLES = 20_000_000  # some 10 ms: longer than all the rest of a small layer


def hold_up_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the side stream come late, so that whatever does not wait for it reads what is not there yet."""
    fork = Lane.fork

    @contextmanager
    def late(lane: Lane, *tensors: Tensor) -> Iterator[None]:
        with fork(lane, *tensors):
            torch.cuda._sleep(PAUSE_CYCLES)
            yield

    monkeypatch.setattr(Lane, "fork", late)


def layer_results(
    layer: MoELayer, forward: Callable[[Tensor], Tensor] | None = None, is_late: bool = False
) -> list[Tensor]:
    """Result and gradients of everything that the layer has. The memory of tokens and of the result's gradient is
    NaN until they are there, which `is_late` delays, and free for others once the layer has done with it."""
    rng = torch.Generator().manual_seed(4)
    leaf = torch.randn(300, SIZES["hidden"], generator=rng).bfloat16().cuda().requires_grad_()
    upstream = torch.randn(leaf.shape, generator=rng).bfloat16().cuda()
    layer.zero_grad()

    def prepare() -> None:
        torch.full_like(leaf, float("nan"))
        if is_late:
            torch.cuda._sleep(PAUSE_CYCLES)

    prepare()
    out = (forward or layer)(leaf * 2) * 2
    prepare()
    out.backward(upstream)
    assert leaf.grad is not None
    return [
        out.detach(),
        leaf.grad,
        *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("late", ["nobody", "caller", "side"])
@pytest.mark.parametrize("capacity", [None, 320])
def test_shared_experts_beside_the_exchange_change_nothing(
    capacity: int | None, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a bit, whichever stream is late; also in checkpoints and without gradients."""
    options: dict[str, Any] = {"num_max_tokens_per_rank": capacity, "num_shared_experts": 2}
    layer = make_layer("fp4", "cuda", overlap_shared=False, **options)
    expected = layer_results(layer)
    assert len(expected) == 7
    layer.overlap_shared = True
    if late == "side":
        hold_up_side(monkeypatch)
    ways: list[Callable[[Tensor], Tensor]] = [layer, layer, lambda x: checkpoint(layer, x, use_reentrant=False)]
    for way in ways:
        assert all(map(torch.equal, layer_results(layer, way, late == "caller"), expected))
    with torch.no_grad():
        x = torch.randn(300, SIZES["hidden"], device="cuda", dtype=torch.bfloat16)
        found = layer(x)
        layer.overlap_shared = False
        assert torch.equal(found, layer(x))


def test_shared_experts_run_while_the_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are done while the caller's stream is still held up after the fork, forward and backward."""
    layer = make_layer("fp4", "cuda", num_max_tokens_per_rank=320, num_shared_experts=1)
    layer_results(layer)  # kernels are compiled, operands made
    torch.cuda.synchronize()
    fork, spans = Lane.fork, []

    @contextmanager
    def timed(lane: Lane, *tensors: Tensor) -> Iterator[None]:
        done, held_up = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        caller = torch.cuda.current_stream()
        with fork(lane, *tensors):
            with torch.cuda.stream(caller):
                torch.cuda._sleep(PAUSE_CYCLES)
                held_up.record()
            yield
            done.record()
        spans.append((done, held_up))

    monkeypatch.setattr(Lane, "fork", timed)
    layer_results(layer)
    torch.cuda.synchronize()
    assert len(spans) == 2
    assert all(done.elapsed_time(held_up) > 0 for done, held_up in spans)


def test_shared_experts_in_a_graph() -> None:
    """Forward and backward are captured with both streams, and replayed for tokens that came later."""
    options: dict[str, Any] = {"num_max_tokens_per_rank": 320, "num_shared_experts": 1}
    layer = make_layer("fp4", "cuda", **options)
    x = torch.randn(300, SIZES["hidden"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    wanted = (x, *layer.parameters())

    def step() -> list[Tensor]:
        out = layer(x * 2)
        return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=warm_up):
        captured = step()
    layer.overlap_shared = False
    for seed in (1, 2):
        with torch.cuda.stream(warm_up):  # on which autograd has its nodes
            with torch.no_grad():
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            wanted_now = step()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, wanted_now))


def test_a_step_of_an_optimizer_in_a_graph() -> None:
    """Operands of weights that have changed are made in the graph."""
    layers = [make_layer("fp4", "cuda", num_max_tokens_per_rank=320) for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.experts.parameters(), lr=torch.tensor(0.1), fused=True) for layer in layers]
    x = torch.randn(300, SIZES["hidden"], device="cuda", dtype=torch.bfloat16)

    def step(index: int) -> Tensor:
        out: Tensor = layers[index](x)
        out.float().square().mean().backward()
        optimizers[index].step()
        optimizers[index].zero_grad(set_to_none=False)
        return out.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in (0, 1):
            step(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(0)
    for _ in range(3):
        with torch.cuda.stream(stream):
            graph.replay()
            want = step(1)
        torch.cuda.synchronize()
        assert torch.equal(captured, want)


def requested_bytes() -> int:
    """Of all tensors on the device, without what the allocator adds: up to a MiB for each."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@needs_hopper
def test_memory_of_what_is_kept() -> None:
    """Memory that forward leaves allocated is what the function says, but for the routing, which all recipes have."""
    from fp4comm.moe import activation_bytes

    kept, expected = {}, {}
    for recipe in ("fp8_flow", "fp4"):
        layer = make_layer(recipe, "cuda")
        x = torch.randn(4096, SIZES["hidden"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        torch.cuda.synchronize()
        before = requested_bytes()
        out = layer.experts(x, *layer.router(x)[:2], layer.comm)
        kept[recipe] = requested_bytes() - before - out.nbytes
        del out  # and with it what is kept, which would be freed during the next one
        rows = sum(-(-count // 16) * 16 for count in layer.router(x).num_tokens_per_expert.tolist())
        sizes = {name: SIZES[name] for name in ("num_topk", "hidden", "ffn_hidden")}
        expected[recipe] = activation_bytes(recipe, num_rows=rows, num_recv_tokens=4096, **sizes).total
    assert kept["fp8_flow"] - kept["fp4"] == pytest.approx(expected["fp8_flow"] - expected["fp4"], rel=0.05)
