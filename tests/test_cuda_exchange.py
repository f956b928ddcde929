"""The GPU's way through an exchange, with kernels in the emulator: the bits of the CPU's way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import exchange_cases
import pytest
import torch
from cuda_targets import open_target
from test_exchange import on_threads
from thread_ranks import run_thread_ranks
from torch import Tensor

from fp4comm import codec, communicator, exchange, routing
from fp4comm.backends import cpu
from fp4comm.routing import SendPlan

# Of the cases, those whose steps differ most between the two; a real GPU runs all of them.
CASES = (
    "expert_layout_equals_reference",
    "fixed_capacity",
    "fp8_arrival",
    "gradients_equal_one_rank",
    "rank_layout_gradients",
    "cached_handle",
    "unused_experts_take_part_in_backward",
    "training_of_experts_alone",
)


@contextlib.contextmanager
def cpu_tensors_as_if_on_a_gpu() -> Iterator[None]:
    """All that asks where a tensor lies in order to choose a way takes the one for GPUs."""
    with open_target("emulated") as target, contextlib.ExitStack() as patches:
        backend = target.backend

        def backend_for(tensor: Tensor | None) -> ModuleType:
            return cpu if tensor is None else backend

        def plan_send(topk_idx: Tensor, num_experts: int, num_ranks: int, capacity: int | None = None) -> SendPlan:
            token_rows, counts, _ = backend.route(topk_idx, num_experts, num_ranks, capacity)
            most = len(topk_idx) * min(topk_idx.shape[1], num_ranks) if capacity is None else num_ranks * capacity
            return SendPlan(topk_idx, token_rows, counts, most, capacity, None)

        def numbers(comm: communicator.EPCommunicator, counts: Tensor | None) -> Tensor:
            shape = comm.num_ranks, 2 + comm.num_local_experts
            return torch.zeros(shape, dtype=torch.int64) if counts is None else counts

        for module in (exchange, routing, codec):
            patches.enter_context(mock.patch.object(module, "backend_for", backend_for))
        patches.enter_context(mock.patch.object(communicator, "plan_send", plan_send))
        patches.enter_context(mock.patch.object(communicator.EPCommunicator, "_numbers", numbers))
        yield


@pytest.mark.parametrize("case", CASES)
def test_emulated(case: str) -> None:
    with cpu_tensors_as_if_on_a_gpu():
        results = run_thread_ranks(exchange_cases.CASES[case], 3, timeout_secs=60)
    assert results == on_threads(case, 3)
