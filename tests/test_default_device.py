"""What is computed on the CPU stays there, whatever device torch makes tensors on by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fp4comm


@pytest.fixture
def default_device() -> Iterator[None]:
    """A default that holds no numbers: whatever is made on it by accident fails."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("capacity", [None, 8])
def test_dispatch_and_combine(layout: str, capacity: int | None) -> None:
    x = torch.ones(6, 64, device="cpu", requires_grad=True)
    idx = torch.arange(12, device="cpu").view(6, 2) % 4
    weights = torch.ones(6, 2, device="cpu", requires_grad=True)
    with fp4comm.EPCommunicator(None, num_experts=4, hidden=64, num_max_tokens_per_rank=capacity) as comm:
        recv, handle = comm.dispatch(x, idx, weights, layout=layout)
        out = comm.combine(recv.x, handle)
        out.sum().backward()
    assert torch.equal(out, x * (1 if layout == "rank" else 2))
    assert x.grad.device.type == weights.grad.device.type == "cpu"


@pytest.mark.usefixtures("default_device")
def test_codec() -> None:
    x = torch.ones(3, 128, device="cpu")
    packed = fp4comm.quantize_mxfp4(x)
    assert torch.equal(packed.dequantize(torch.float32), x)
    assert torch.equal(packed.to_fp8_columns().dequantize(), x)
    rows, columns = packed.to_fp8_rows_and_columns()
    assert torch.equal(rows.dequantize(torch.float32), columns.dequantize())
    assert torch.equal(packed.to_mxfp4_columns().dequantize(), x)
