"""What every rank does to test the torch.distributed backend: all cases in one process, which is slow to start."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fp4comm
from fp4comm.adapters import distributed
from fp4comm.adapters.distributed import CompressedGroup, Options

WIDTH = 1024
CASES: dict[str, Callable[[CompressedGroup], None]] = {}


def case(function: Callable[[CompressedGroup], None]) -> Callable[[CompressedGroup], None]:
    CASES[function.__name__] = function
    return function


def run_cases(_: dist.ProcessGroup) -> dict[str, str]:
    """The traceback of each case that failed on this rank."""
    torch.set_num_threads(1)
    distributed.register()
    group = dist.new_group(backend="fp4comm")
    failures = {}
    for name, function in CASES.items():
        group.traffic.clear()
        try:
            function(group)
        except Exception:  # the others may wait for it; their groups time out
            failures[name] = traceback.format_exc()
    dist.barrier()
    return failures


def rows(group: dist.ProcessGroup, source: int, target: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """What rank `source` sends to rank `target`: known to both, so that either can say what must arrive."""
    generator = torch.Generator().manual_seed(source * group.size() + target)
    return torch.randn(num_rows, WIDTH, generator=generator).to(dtype)


def through_wire(x: Tensor, wire: str = "mxfp4") -> Tensor:
    """What must arrive of rows of any number of dimensions."""
    flat = x.reshape(-1, x.shape[-1])
    packed = fp4comm.quantize_mxfp4(flat) if wire == "mxfp4" else fp4comm.quantize_fp8(flat)
    return packed.dequantize(x.dtype).view(x.shape)


def sizes(group: dist.ProcessGroup, source: int) -> list[int]:
    """Uneven, some of them 0."""
    return [(3 * source + 5 * target) % 4 for target in range(group.size())]


def sent(group: dist.ProcessGroup, source: int, num_rows: list[int], dtype: torch.dtype) -> Tensor:
    return torch.cat([rows(group, source, target, n, dtype) for target, n in enumerate(num_rows)])


def arriving(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """What the ranks send to this one when each sends `sizes`, and how many rows from each."""
    num_rows = [sizes(group, source)[group.rank()] for source in range(group.size())]
    parts = [rows(group, source, group.rank(), n, dtype) for source, n in enumerate(num_rows)]
    return torch.cat(parts), num_rows


@case
def uneven_splits_arrive_as_the_codec_rounds_them(group: CompressedGroup) -> None:
    outgoing = sizes(group, group.rank())
    for wire in ("mxfp4", "fp8"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with a_group(Options(wire)) as other:
                x = sent(group, group.rank(), outgoing, dtype)
                expected, incoming = arriving(group, dtype)
                output = torch.full_like(expected, torch.nan)
                dist.all_to_all_single(output, x, incoming, outgoing, group=other)
                assert torch.equal(output, through_wire(expected, wire)), (wire, dtype)


@case
def even_splits_of_three_dimensions(group: CompressedGroup) -> None:
    x = sent(group, group.rank(), [6] * group.size(), torch.bfloat16).view(-1, 3, WIDTH)
    output = torch.empty_like(x)
    dist.all_to_all_single(output, x, group=group)
    parts = [rows(group, source, group.rank(), 6, torch.bfloat16) for source in range(group.size())]
    assert torch.equal(output.view(-1, WIDTH), through_wire(torch.cat(parts)))


@case
def nothing_to_send_and_strided_input(group: CompressedGroup) -> None:
    nothing = torch.empty(0, WIDTH, dtype=torch.bfloat16)
    dist.all_to_all_single(nothing.clone(), nothing, group=group)
    num_ranks = group.size()
    is_first = group.rank() == 0
    x = torch.randn(2 * num_ranks, 2 * WIDTH)[:, ::2] if is_first else torch.empty(0, WIDTH)
    outgoing = [2] * num_ranks if is_first else [0] * num_ranks
    output = torch.empty(2, WIDTH)
    dist.all_to_all_single(output, x, [2] + [0] * (num_ranks - 1), outgoing, group=group)
    if is_first:
        assert torch.equal(output, through_wire(x[:2].contiguous()))


@case
def lists_of_tensors(group: CompressedGroup) -> None:
    for num_dims in (2, 3):
        shape = (2, WIDTH) if num_dims == 2 else (2, 1, WIDTH)
        inputs = [rows(group, group.rank(), r, 2, torch.float32).view(shape) for r in range(group.size())]
        outputs = [torch.empty(shape) for _ in inputs]
        dist.all_to_all(outputs, inputs, group=group)
        for source, output in enumerate(outputs):
            expected = through_wire(rows(group, source, group.rank(), 2, torch.float32))
            assert torch.equal(output.view(2, WIDTH), expected)


@case
def own_rows_are_rounded_like_all_others(group: CompressedGroup) -> None:
    own = dist.new_subgroups(1)[0].size()  # a group of one, of gloo
    assert own == 1
    alone, _ = dist.new_subgroups_by_enumeration([[r] for r in range(group.size())], backend="fp4comm")
    x = torch.randn(4, WIDTH)
    output = torch.empty_like(x)
    dist.all_to_all_single(output, x, group=alone)
    assert torch.equal(output, through_wire(x))
    assert not torch.equal(output, x)
    assert alone.traffic["mxfp4"] == 0


@case
def everything_else_passes_unchanged(group: CompressedGroup) -> None:
    num_ranks = group.size()
    others = [
        torch.arange(WIDTH * num_ranks).view(num_ranks, WIDTH),  # integers
        torch.randn(num_ranks * WIDTH),  # one dimension
        torch.randn(num_ranks, 128),  # narrow
        torch.randn(num_ranks, WIDTH + 16),  # no blocks of 32
        torch.randn(num_ranks, WIDTH, dtype=torch.float64),
    ]
    for x in others:
        output, expected = torch.empty_like(x), torch.empty_like(x)
        dist.all_to_all_single(output, x, group=group)
        dist.all_to_all_single(expected, x)
        assert torch.equal(output, expected)
    assert group.traffic["mxfp4"] == 0
    assert group.traffic["unchanged"] == sum(x.nbytes for x in others) * (num_ranks - 1) // num_ranks
    with a_group(Options("bf16")) as exact:
        x = torch.randn(num_ranks, WIDTH)
        output, expected = torch.empty_like(x), torch.empty_like(x)
        dist.all_to_all_single(output, x, group=exact)
        dist.all_to_all_single(expected, x)
        assert torch.equal(output, expected)


@case
def other_collectives_are_those_of_gloo(group: CompressedGroup) -> None:
    for number, collective in enumerate(COLLECTIVES):
        torch.manual_seed(10 * number + group.rank())
        x = torch.randn(2 * group.size(), WIDTH)
        assert torch.equal(collective(x.clone(), group), collective(x.clone(), dist.group.WORLD)), collective.__name__
    dist.barrier(group=group)
    facts: list[Any] = [None] * group.size()
    dist.all_gather_object(facts, {"rank": group.rank()}, group=group)
    assert [fact["rank"] for fact in facts] == list(range(group.size()))


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def _all_reduce_async(x: Tensor, group: Any) -> Tensor:
    work = dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    return x


def _broadcast(x: Tensor, group: Any) -> Tensor:
    dist.broadcast(x, group.size() - 1, group=group)
    return x


def _reduce(x: Tensor, group: Any) -> Tensor:
    dist.reduce(x, 0, group=group)
    return x if group.rank() == 0 else x[:0]


def _all_gather_into_tensor(x: Tensor, group: Any) -> Tensor:
    y = x.new_empty(len(x) * group.size(), WIDTH)
    dist.all_gather_into_tensor(y, x, group=group)
    return y


def _all_gather(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def _reduce_scatter_tensor(x: Tensor, group: Any) -> Tensor:
    y = x.new_empty(len(x) // group.size(), WIDTH)
    dist.reduce_scatter_tensor(y, x, group=group)
    return y


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    y = x.new_empty(len(x) // group.size(), WIDTH)
    dist.reduce_scatter(y, list(x.chunk(group.size())), group=group)
    return y


def _scatter_and_gather(x: Tensor, group: Any) -> Tensor:
    is_first = group.rank() == 0
    y = x.new_empty(2, WIDTH)
    dist.scatter(y, list(x.chunk(group.size())) if is_first else None, src=0, group=group)
    parts = [torch.empty_like(y) for _ in range(group.size())] if is_first else None
    dist.gather(2 * y, parts, dst=0, group=group)
    return torch.cat(parts) if parts else y


def _send_and_receive(x: Tensor, group: Any) -> Tensor:
    y = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (group.rank() + 1) % group.size(), group),
        dist.P2POp(dist.irecv, y, (group.rank() - 1) % group.size(), group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if group.rank() == 0:
        dist.send(x, 1, group=group)
    elif group.rank() == 1:
        dist.recv(x, 0, group=group)
    return y + x


def _functional_all_reduce(x: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x, "sum", group) + funcol.all_gather_tensor(x, 0, group)[: len(x)]


COLLECTIVES = [
    _all_reduce,
    _all_reduce_async,
    _broadcast,
    _reduce,
    _all_gather,
    _all_gather_into_tensor,
    _reduce_scatter,
    _reduce_scatter_tensor,
    _scatter_and_gather,
    _send_and_receive,
    _functional_all_reduce,
]


@case
def a_quarter_of_the_bytes_is_sent(group: CompressedGroup) -> None:
    x = torch.randn(8 * group.size(), WIDTH).bfloat16()
    dist.all_to_all_single(torch.empty_like(x), x, group=group)
    assert group.traffic["given"] == x.nbytes * (group.size() - 1) // group.size()
    assert 0 < group.traffic["mxfp4"] <= 0.28 * group.traffic["given"]


@case
def asynchronous_calls(group: CompressedGroup) -> None:
    x = torch.randn(2 * group.size(), WIDTH)
    expected = torch.empty_like(x)
    dist.all_to_all_single(expected, x)
    expected = through_wire(expected)
    outputs = [torch.empty_like(x) for _ in range(3)]
    works = [dist.all_to_all_single(output, x, group=group, async_op=True) for output in outputs]
    works[0].wait(timedelta(seconds=20))
    assert torch.equal(outputs[0], expected)
    assert works[0].is_completed()
    while not works[1].is_completed():
        pass
    assert torch.equal(outputs[1], expected)
    doubled = works[2].get_future().then(lambda done: 2 * done.value()[0])
    assert torch.equal(doubled.wait(), 2 * expected)
    assert works[2].is_completed()
    works[2].wait()
    assert torch.equal(outputs[2], expected)


def _check_functional(group: CompressedGroup, exchange: Callable[..., Tensor]) -> None:
    """`exchange(x, output sizes, input sizes)` and, where it has one, its gradient."""
    outgoing = sizes(group, group.rank())
    expected, incoming = arriving(group, torch.float32)
    x = sent(group, group.rank(), outgoing, torch.float32).requires_grad_()
    y = exchange(x, incoming, outgoing)
    assert torch.equal(y, through_wire(expected))
    if not y.requires_grad:
        return
    y.backward(expected)  # sends back what came, unrounded
    assert x.grad is not None
    assert torch.equal(x.grad, through_wire(x.detach()))


@case
def functional_collectives_and_their_gradients(group: CompressedGroup) -> None:
    _check_functional(group, lambda x, out, into: funcol.all_to_all_single(x.detach(), out, into, group))
    assert group.traffic["mxfp4"] > 0
    _check_functional(group, lambda x, out, into: funcol.all_to_all_single_autograd(x, out, into, group))
    _check_functional(group, lambda x, out, into: _AllToAll.apply(group, x, out, into))


@case
def device_meshes(group: CompressedGroup) -> None:
    override: Any = ("fp4comm", Options(min_width=WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("ep",), backend_override={"ep": override})
    theirs = mesh.get_group("ep")
    assert isinstance(theirs, CompressedGroup)
    assert theirs.options == override[1]
    exchange = funcol.all_to_all_single_autograd
    _check_functional(group, lambda x, out, into: exchange(x, out, into, mesh))
    _check_functional(group, lambda x, out, into: exchange(x, out, into, (mesh, 0)))
    assert theirs.traffic["mxfp4"] > 0
    assert theirs.traffic["unchanged"] == 0


@case
def compiled_functions(group: CompressedGroup) -> None:
    if group.size() > 2:
        return  # compiling is slow, and the same for any number of ranks

    @torch.compile(backend="aot_eager", fullgraph=True)
    def exchange(x: Tensor, out: list[int], into: list[int]) -> Tensor:
        return funcol.all_to_all_single_autograd(x * 1.0, out, into, group) * 1.0

    _check_functional(group, exchange)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def exchange_in_place(x: Tensor, out: list[int], into: list[int]) -> Tensor:
        y = x.new_empty(sum(out), WIDTH)
        dist.all_to_all_single(y, x * 1.0, out, into, group=group)
        return y * 1.0

    _check_functional(group, lambda x, out, into: exchange_in_place(x.detach(), out, into))


class _AllToAll(torch.autograd.Function):
    """As most MoE libraries have it."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor, out: list[int], into: list[int]) -> Tensor:
        ctx.group, ctx.out, ctx.into = group, out, into
        y = x.new_empty(sum(out), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), out, into, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _AllToAll.apply(ctx.group, grad, ctx.into, ctx.out), None, None


@case
def a_moe_layer_trains_as_over_gloo(group: CompressedGroup) -> None:
    exact, compressed = train(dist.group.WORLD), train(group)
    assert exact[-1] < 0.3 * exact[0], exact
    assert abs(compressed[-1] - exact[-1]) < 0.02 * exact[0], (exact, compressed)
    assert group.traffic["mxfp4"] == 160 / 1024 * group.traffic["given"]  # of float32 rows: 136 bytes, padded to 160
    assert group.traffic["unchanged"] > 0  # the counts


def train(group: Any, num_steps: int = 30) -> list[float]:
    """Losses of a layer of 8 experts, top-2, that is to imitate a fixed network."""
    torch.manual_seed(0)
    hidden, num_experts, num_tokens = 256, 8, 32
    teacher = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden))
    router = torch.nn.Linear(hidden, num_experts, bias=False)
    experts = [
        torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden))
        for _ in range(num_experts)
    ]
    num_local = num_experts // group.size()
    local = torch.nn.ModuleList(experts[group.rank() * num_local : (group.rank() + 1) * num_local])
    optimizer = torch.optim.Adam([*local.parameters(), *router.parameters()], lr=4e-3)
    torch.manual_seed(1 + group.rank())
    data = torch.randn(2 * num_tokens, hidden)
    losses = []
    for step in range(num_steps):
        x = data[step % 2 * num_tokens :][:num_tokens]
        loss = (moe(x, router, local, group) - 4 * teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in router.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / group.size())
    return losses


def moe(x: Tensor, router: torch.nn.Module, experts: torch.nn.ModuleList, group: Any) -> Tensor:
    """Sort by expert, exchange counts and rows, compute, and all the way back."""
    weights, idx = torch.softmax(router(x), dim=-1).topk(2)
    order = idx.flatten().argsort(stable=True)
    counts = torch.bincount(idx.flatten(), minlength=group.size() * len(experts))
    their_counts = torch.empty_like(counts)
    dist.all_to_all_single(their_counts, counts, group=group)
    into = counts.view(group.size(), -1).sum(1).tolist()
    out = their_counts.view(group.size(), -1).sum(1).tolist()
    received = _AllToAll.apply(group, x[order // 2], out, into)
    expert = torch.arange(len(experts)).repeat(group.size()).repeat_interleave(their_counts)
    by_expert = expert.argsort(stable=True)
    parts = received[by_expert].split(torch.bincount(expert, minlength=len(experts)).tolist())
    results = torch.cat([module(part) for module, part in zip(experts, parts, strict=True)])
    results = torch.zeros_like(results).index_copy(0, by_expert, results)
    home = _AllToAll.apply(group, results, into, out)
    home = home * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // 2, home)


@case
def mistakes_say_what_to_do(group: CompressedGroup) -> None:
    n = group.size()
    x = torch.randn(2 * n, WIDTH)
    wrong: list[tuple[str, Tensor, Tensor, Any, Any]] = [
        ("input_split_sizes is .* whose sum is the first extent", torch.empty_like(x), x, [2] * n, [1] * n),
        ("output_split_sizes is .* one per rank", torch.empty_like(x), x, [2] * (n - 1), [2] * n),
        ("first extent for input_split_sizes=None is .*a multiple of", torch.empty_like(x), x[1:], None, None),
        ("output is of shape .*accepted: .n, 1024.", torch.empty(2 * n, WIDTH + 32), x, None, None),
        ("output is of strides .*accepted: contiguous", torch.empty(2 * n, 2 * WIDTH)[:, ::2], x, None, None),
    ]
    for message, output, tensor, out, into in wrong:
        with pytest.raises(fp4comm.InvalidArgument, match=message):
            dist.all_to_all_single(output, tensor, out, into, group=group)
    with pytest.raises(fp4comm.InvalidArgument, match=f"outputs is 1 tensors; accepted: {n}, one per rank"):
        dist.all_to_all([torch.empty(2, WIDTH)], list(x.chunk(n)), group=group)
    mixed = [torch.empty(2, WIDTH + (32 if r else 0)) for r in range(n)]
    with pytest.raises(fp4comm.InvalidArgument, match=r"outputs\[1\] is .*accepted: torch.float32, rows of 1024"):
        dist.all_to_all(mixed, list(x.chunk(n)), group=group)
    with pytest.raises(fp4comm.InvalidArgument, match="pg_options is a dict; accepted: fp4comm"):
        dist.new_group(backend="fp4comm", pg_options={"wire": "fp8"})


@case
def ranks_that_disagree_all_raise(group: CompressedGroup) -> None:
    options = Options("fp8" if group.rank() == group.size() - 1 else "mxfp4")
    with pytest.raises(fp4comm.InvalidArgument, match=f'"fp8".* on rank {group.size() - 1} of the group and .*"mxfp4"'):
        dist.new_group(backend="fp4comm", pg_options=options)


class a_group:
    """A group with options, for a while."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __enter__(self) -> CompressedGroup:
        self._group = dist.new_group(backend="fp4comm", pg_options=self._options)
        return self._group

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        dist.destroy_process_group(self._group)
