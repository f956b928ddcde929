"""Bad input and bad ranks: a typed error on every rank, before anything is sent, and never a hang."""

from __future__ import annotations

import copy
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from launch import have_launcher, run_ranks
from thread_ranks import ThreadTransport, run_thread_ranks
from torch import Tensor

import fp4comm
from fp4comm.errors import ClosedError, InvalidArgument, TransportError
from fp4comm.routing import SendPlan, plan_send

HIDDEN, NUM_EXPERTS, NUM_TOKENS, NUM_TOPK = 64, 6, 5, 2


def good_arguments() -> dict[str, Any]:
    return {
        "x": torch.ones(NUM_TOKENS, HIDDEN),
        "topk_idx": torch.arange(NUM_TOKENS * NUM_TOPK).reshape(NUM_TOKENS, NUM_TOPK) % NUM_EXPERTS,
        "topk_weights": torch.ones(NUM_TOKENS, NUM_TOPK),
    }


def make(group: Any, **options: Any) -> fp4comm.EPCommunicator:
    sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "timeout_secs": 20.0}
    return fp4comm.EPCommunicator(group, **(sizes | options))


BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "x not a tensor": ({"x": [1.0]}, "x is a list"),
    "x as MXFP4": (
        {"x": fp4comm.quantize_mxfp4(torch.ones(NUM_TOKENS, HIDDEN))},
        "x is a MXFP4Tensor; accepted: a tensor or an FP8Tensor",
    ),
    "x dtype": ({"x": torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.float64)}, "x is of dtype torch.float64"),
    "x shape": (
        {"x": torch.ones(NUM_TOKENS, HIDDEN, 1)},
        r"x is of shape \[5, 64, 1\]; accepted: shape \[num_rows, 64\]",
    ),
    "x width": ({"x": torch.ones(NUM_TOKENS, 32)}, r"x is of shape \[5, 32\]"),
    "x device": ({"x": torch.ones(NUM_TOKENS, HIDDEN, device="meta")}, "x is on meta"),
    "idx missing": ({"topk_idx": None}, "topk_idx is a NoneType; accepted: a tensor, or None with handle="),
    "idx dtype": ({"topk_idx": torch.zeros(NUM_TOKENS, NUM_TOPK)}, "topk_idx is of dtype torch.float32"),
    "idx rows": (
        {"topk_idx": torch.zeros(4, NUM_TOPK, dtype=torch.int64)},
        r"topk_idx is of shape \[4, 2\].*x has 5 rows",
    ),
    "idx empty": (
        {"topk_idx": torch.zeros(NUM_TOKENS, 0, dtype=torch.int64)},
        r"topk_idx is of shape \[5, 0\].*num_topk at least 1",
    ),
    "idx too large": ({"topk_idx": torch.full((NUM_TOKENS, NUM_TOPK), 6)}, r"topk_idx\[0, 0\] is 6; accepted: 0 to 5"),
    "idx too small": ({"topk_idx": torch.full((NUM_TOKENS, NUM_TOPK), -2)}, r"topk_idx\[0, 0\] is -2"),
    "weights dtype": (
        {"topk_weights": torch.ones(NUM_TOKENS, NUM_TOPK, dtype=torch.bfloat16)},
        "topk_weights is of dtype torch.bfloat16; accepted: torch.float32",
    ),
    "weights shape": ({"topk_weights": torch.ones(NUM_TOKENS, 3)}, r"topk_weights is of shape \[5, 3\].*\[5, 2\]"),
    "layout": ({"layout": "ranks"}, "layout is 'ranks'; accepted: 'expert' or 'rank'"),
    "out": ({"out": torch.int8}, "out is torch.int8"),
    "handle": ({"handle": 7}, "handle is a int; accepted: the handle that dispatch returned"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_bad_dispatch_raises_on_all_ranks(name: str) -> None:
    """Only rank 1 is wrong; all ranks raise the same, and can go on."""
    changes, message = BAD_DISPATCHES[name]

    def run(group: ThreadTransport) -> str:
        comm = make(group)
        with pytest.raises(InvalidArgument, match=message) as caught:
            comm.dispatch(**(good_arguments() | (changes if comm.rank == 1 else {})))
        assert "rank 1: " in str(caught.value)
        assert not comm.traffic
        recv, handle = comm.dispatch(**good_arguments())
        comm.combine(recv.x, handle)
        return str(caught.value)

    assert len(set(run_thread_ranks(run, 3))) == 1


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda function: torch.func.grad(lambda given: function(given).sum()),
    "vmap": lambda function: lambda given: torch.vmap(function)(given[None]),
    "jvp": lambda function: lambda given: torch.func.jvp(function, (given,), (given,)),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own, on the way to jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_are_refused(transform: str) -> None:
    """Their tensors have no memory."""
    comm = make(None)
    arguments = good_arguments()
    recv, handle = comm.dispatch(**arguments)

    def dispatch(x: Tensor) -> Tensor:
        received: Any = comm.dispatch(**(arguments | {"x": x}))[0].x
        return received

    assert isinstance(recv.x, Tensor)
    for call, given in ((dispatch, arguments["x"]), (lambda y: comm.combine(y, handle), recv.x)):
        with pytest.raises(
            InvalidArgument, match=r"this call is in a transform of torch\.func; accepted: calls outside"
        ):
            TRANSFORMS[transform](call)(given)
    comm.combine(recv.x, handle)


def test_an_expert_named_twice_does_not_fit_a_fixed_size() -> None:
    """Where the fixed size relies on distinct experts: fewer local experts than choices. Else it is allowed."""

    def run(group: ThreadTransport) -> None:
        arguments = good_arguments() | {"topk_idx": torch.full((NUM_TOKENS, NUM_TOPK), 1)}
        with pytest.raises(InvalidArgument, match=r"topk_idx\[0\] is naming expert 1 more than once"):
            make(group, num_experts=2, num_max_tokens_per_rank=8).dispatch(**arguments)
        recv, _ = make(group, num_experts=4, num_max_tokens_per_rank=8).dispatch(**arguments)
        assert recv.num_recv_tokens_per_expert.sum() == (2 * NUM_TOKENS * NUM_TOPK if group.rank == 0 else 0)

    run_thread_ranks(run, 2)


def test_more_tokens_than_the_capacity() -> None:
    def run(group: ThreadTransport) -> None:
        comm = make(group, num_max_tokens_per_rank=4)
        with pytest.raises(InvalidArgument, match="x is 5 rows; accepted: at most num_max_tokens_per_rank=4"):
            comm.dispatch(**good_arguments())

    run_thread_ranks(run, 2)


BAD_COMBINES: dict[str, tuple[Callable[[fp4comm.Received, fp4comm.Handle], tuple[Any, ...]], dict[str, Any], str]] = {
    "rows": (lambda recv, handle: (recv.x[:-1], handle), {}, "y is of shape"),
    "dtype": (lambda recv, handle: (recv.x.double(), handle), {}, "y is of dtype torch.float64"),
    "width": (lambda recv, handle: (recv.x[:, :32], handle), {}, "y is of shape"),
    "handle": (lambda recv, handle: (recv.x, None), {}, "handle is a NoneType"),
    "apply_weights": (lambda recv, handle: (recv.x, handle), {"apply_weights": "yes"}, "apply_weights is 'yes'"),
}


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_bad_combine_raises_on_all_ranks(name: str) -> None:
    spoil, options, message = BAD_COMBINES[name]

    def run(group: ThreadTransport) -> None:
        comm = make(group)
        recv, handle = comm.dispatch(**good_arguments())
        with pytest.raises(InvalidArgument, match=message):
            comm.combine(*spoil(recv, handle), **options) if comm.rank == 1 else comm.combine(recv.x, handle)
        comm.combine(recv.x, handle)

    run_thread_ranks(run, 2)


def test_handles_are_checked() -> None:
    def run(group: ThreadTransport) -> None:
        comm, other = make(group), make(group)
        recv, handle = comm.dispatch(**good_arguments())
        with pytest.raises(InvalidArgument, match="handle is of another communicator"):
            other.combine(recv.x, handle)
        with pytest.raises(InvalidArgument, match="given together with a handle"):
            comm.dispatch(**good_arguments(), handle=handle)
        with pytest.raises(InvalidArgument, match="x is 2 rows; accepted: 5 rows"):
            comm.dispatch(torch.ones(2, HIDDEN), handle=handle)
        with pytest.raises(InvalidArgument, match="topk_idx is a Handle; accepted: a tensor, or None with handle="):
            comm.dispatch(torch.ones(NUM_TOKENS, HIDDEN), handle)
        by_rank, rank_handle = comm.dispatch(**good_arguments(), layout="rank")
        with pytest.raises(InvalidArgument, match="apply_weights is True"):
            comm.combine(by_rank.x, rank_handle, apply_weights=True)
        with pytest.raises(InvalidArgument, match="out is 'fp8_rows'; accepted: 'fp8_rows' in layout 'expert'"):
            comm.dispatch(torch.ones(NUM_TOKENS, HIDDEN), handle=rank_handle, out="fp8_rows")

    run_thread_ranks(run, 2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hidden": 48}, "hidden is 48; accepted: a positive multiple of 32"),
        ({"hidden": 64.0}, "hidden is 64.0"),
        ({"num_experts": 7}, "num_experts is 7; accepted: a positive multiple of the number of ranks, 2"),
        ({"num_experts": 2**17}, "num_experts is 131072; accepted: at most 32767 a rank, on 2 ranks"),
        ({"precision": "fp5"}, "precision is 'fp5'"),
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"num_max_tokens_per_rank": -1}, "num_max_tokens_per_rank is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"check_inputs": "no"}, "check_inputs is 'no'; accepted: True, False or None"),
    ],
)
def test_bad_sizes_on_one_rank_raise_on_all(options: dict[str, Any], message: str) -> None:
    def run(group: ThreadTransport) -> None:
        with pytest.raises(InvalidArgument, match=message):
            make(group, **(options if group.rank == 1 else {}))

    run_thread_ranks(run, 2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hidden": 128}, "the ranks disagree: hidden is 64 on ranks 0, 1, 128 on rank 2"),
        ({"num_experts": 12}, "num_experts is 6 on ranks 0, 1, 12 on rank 2"),
        ({"precision": "bf16"}, "the ranks disagree: precision of dispatch is .* on ranks 0, 1, .* on rank 2"),
        ({"num_max_tokens_per_rank": 9}, "num_max_tokens_per_rank is null on ranks 0, 1, 9 on rank 2"),
        ({"seed": 3}, "seed is 0 on ranks 0, 1, 3 on rank 2"),
        ({"expert_alignment": 4}, "expert_alignment is 1 on ranks 0, 1, 4 on rank 2"),
        ({"check_inputs": False}, "check_inputs is true on ranks 0, 1, false on rank 2"),
    ],
)
def test_ranks_that_disagree_at_construction(options: dict[str, Any], message: str) -> None:
    def run(group: ThreadTransport) -> None:
        with pytest.raises(InvalidArgument, match=message):
            make(group, **(options if group.rank == 2 else {}))

    run_thread_ranks(run, 3)


def test_integers_of_numpy_are_integers() -> None:
    run_thread_ranks(lambda group: make(group, seed=np.int64(3) if group.rank else 3), 2)


def test_ranks_that_disagree_in_a_call() -> None:
    def run(group: ThreadTransport) -> None:
        comm = make(group)
        arguments = good_arguments()
        with pytest.raises(InvalidArgument, match='layout is "expert" on rank 0, "rank" on rank 1'):
            comm.dispatch(**arguments, layout="rank" if comm.rank == 1 else "expert")
        with pytest.raises(InvalidArgument, match="gradient of x is false on rank 0, true on rank 1"):
            comm.dispatch(**(arguments | {"x": torch.ones(NUM_TOKENS, HIDDEN, requires_grad=comm.rank == 1)}))
        recv, handle = comm.dispatch(**arguments)
        with (
            torch.set_grad_enabled(comm.rank == 0),
            pytest.raises(InvalidArgument, match="grad mode is true on rank 0, false on rank 1"),
        ):
            comm.combine(recv.x, handle)
        with pytest.raises(InvalidArgument, match='operation is "combine" on rank 0, "dispatch" on rank 1'):
            comm.combine(recv.x, handle) if comm.rank == 0 else comm.dispatch(**arguments)
        recv, handle = comm.dispatch(**arguments)  # and go on
        comm.combine(recv.x, handle)

    run_thread_ranks(run, 2)


def test_handles_of_different_dispatches() -> None:
    """Also where their sizes are the same, so that rows would arrive and be those of other tokens."""

    def run(group: ThreadTransport) -> None:
        comm = make(group)
        handles = [comm.dispatch(**good_arguments())[1] for _ in range(2)]
        recv, again = comm.dispatch(torch.ones(NUM_TOKENS, HIDDEN), handle=handles[0])
        own = handles[comm.rank]
        with pytest.raises(InvalidArgument, match='handle is "of dispatch 1" on rank 0, "of dispatch 2" on rank 1'):
            comm.combine(recv.x, own)
        with pytest.raises(InvalidArgument, match='a handle is "of dispatch 1" on rank 0, "of dispatch 2" on rank 1'):
            comm.dispatch(torch.ones(NUM_TOKENS, HIDDEN), handle=own)
        comm.combine(recv.x, handles[0] if comm.rank else again)

    run_thread_ranks(run, 2)


def test_weights_that_were_changed() -> None:
    """Forward and backward would multiply by different ones."""
    comm = make(None)
    recv, handle = comm.dispatch(**good_arguments())
    recv.topk_weights.mul_(2)
    with pytest.raises(
        InvalidArgument, match=r"recv.topk_weights is changed in place; accepted: .* apply_weights=False"
    ):
        comm.combine(recv.x, handle)
    comm.combine(recv.x, handle, apply_weights=False)
    with torch.inference_mode():
        recv, handle = comm.dispatch(**good_arguments())
        comm.combine(recv.x, handle)


def test_rotated_rows_do_not_become_columns() -> None:
    comm = make(None, precision=fp4comm.Precision(dispatch=fp4comm.Leg("mxfp4", hadamard=True)))
    recv, _ = comm.dispatch(**good_arguments())
    with pytest.raises(
        InvalidArgument, match="to_fp8_columns: the received rows are rotated; accepted: a dispatch leg"
    ):
        recv.to_fp8_columns()


def test_another_error_on_one_rank_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank out of memory must not leave the others waiting."""

    def run(group: ThreadTransport) -> None:
        comm = make(group)
        if comm.rank == 1:
            too_many = {name: torch.cat([value, value]) for name, value in good_arguments().items()}
            with pytest.raises(MemoryError):
                comm.dispatch(**too_many)
        else:
            with pytest.raises(TransportError, match="rank 1: no memory") as caught:
                comm.dispatch(**good_arguments())
            assert caught.value.ranks == (1,)

    def plan_or_fail(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, capacity: int | None) -> SendPlan:
        if len(topk_idx) > NUM_TOKENS:
            raise MemoryError("no memory")
        return plan_send(topk_idx, num_experts, num_ranks, capacity)

    monkeypatch.setattr(fp4comm.communicator, "plan_send", plan_or_fail)
    run_thread_ranks(run, 2)


def test_wrong_groups_and_transports() -> None:
    with pytest.raises(InvalidArgument, match=r"accepted: at most 32767 a rank, on 1 rank$"):
        make(None, num_experts=2**17)
    with pytest.raises(InvalidArgument, match="group is a str; accepted: None, an mpi4py"):
        make("world")
    with pytest.raises(InvalidArgument, match="transport is 'smoke-signals'; accepted: 'auto'"):
        make(None, transport="smoke-signals")
    with pytest.raises(InvalidArgument, match="type NoneType goes with 'loopback'; accepted: 'auto'; a group"):
        make(None, transport="mpi")
    for wrong in (0, -1.0, float("nan"), "5", [1]):
        with pytest.raises(InvalidArgument, match=re.escape(f"timeout_secs is {wrong!r}; accepted: a number of sec")):
            make(None, timeout_secs=wrong)


def test_precision_is_checked() -> None:
    with pytest.raises(InvalidArgument, match="grad_combine is 'fp16'; accepted: 'fp32', 'bf16', 'fp8', 'mxfp4'"):
        fp4comm.Precision(grad_combine="fp16")
    with pytest.raises(InvalidArgument, match="combine is 8; accepted: the name of a wire format or a Leg"):
        fp4comm.Precision(combine=8)
    with pytest.raises(InvalidArgument, match="scale_mode is 'ceil'; accepted: 'floor', 'even', 'rceil'"):
        fp4comm.Leg("mxfp4", scale_mode="ceil")
    with pytest.raises(InvalidArgument, match="stochastic and hadamard go with the wire 'mxfp4', not with 'fp8'"):
        fp4comm.Leg("fp8", stochastic=True)


def test_copies_of_a_module_share_the_communicator() -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.comm = make(None)
    assert copy.deepcopy(module).comm is module.comm
    for spoil in (pickle.dumps, copy.copy):
        with pytest.raises(
            TypeError, match=r"an EPCommunicator can't be pickled or copied.*make a communicator in each"
        ):
            spoil(module.comm)


def test_a_closed_communicator_says_so() -> None:
    comm = make(None)
    comm.close()
    comm.close()
    with pytest.raises(ClosedError, match="closed"):
        comm.dispatch(**good_arguments())


def fail_to_call(group: Any) -> tuple[float, tuple[int, ...], str]:
    """The last rank never dispatches; the others time out and name it, and stay broken."""
    comm = make(group, timeout_secs=1.0)
    absent = comm.num_ranks - 1
    if comm.rank == absent:
        time.sleep(4)
        return 0.0, (), ""
    start = time.monotonic()
    with pytest.raises(TransportError, match=f"{absent}") as caught:
        comm.dispatch(**good_arguments())
    waited = time.monotonic() - start
    with pytest.raises(ClosedError):
        comm.dispatch(**good_arguments())
    time.sleep(2)  # let the others find out by themselves
    return waited, caught.value.ranks, str(caught.value)


def fail_to_join(group: Any) -> str:
    """The last rank never makes a communicator."""
    if group.Get_rank() == group.Get_size() - 1:
        time.sleep(4)
        return ""
    with pytest.raises(TransportError) as caught:
        make(group, timeout_secs=1.0)
    time.sleep(3)
    return str(caught.value)


@pytest.mark.mpi
def test_a_rank_that_never_joins() -> None:
    if not have_launcher("mpi"):
        pytest.skip("mpi is not installed")
    first, _ = run_ranks(fail_to_join, 2, launcher="mpi", timeout=40)
    assert "rank 0 waited 1 s for the other ranks to join it over MPI" in first


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_rank_that_never_calls_is_named(launcher: str) -> None:
    if not have_launcher(launcher):
        pytest.skip(f"{launcher} is not installed")
    results = run_ranks(fail_to_call, 3, launcher=launcher, timeout=40)
    for waited, ranks, message in results[:-1]:
        assert 0.9 < waited < 10
        assert ranks == (2,)
        assert "2" in message
