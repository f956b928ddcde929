"""What every transport between two GPUs must do with messages and numbers; run on two ranks of MPI."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4comm.errors import ClosedError
from fp4comm.transport import make_transport


def on_own_gpu(group: Any) -> Any:
    """The group, after its rank has taken its GPU; ranks take them in turn."""
    torch.cuda.set_device(group.Get_rank() % torch.cuda.device_count())
    return group


def messages_of_any_size(group: Any, name: str, largest: int) -> None:
    """Over the transport of that name, messages of up to `largest` bytes."""
    transport = make_transport(on_own_gpu(group), name, 30.0)
    for sizes in ((0, 0), (1, 3), (0, 5), (1 << 20, 33), (7, largest)):
        for device in ("cpu", transport.device):
            outgoing = [_bytes_of(transport.rank, other, sizes, device) for other in range(2)]
            incoming = [torch.zeros_like(_bytes_of(other, transport.rank, sizes, device)) for other in range(2)]
            transport.exchange(outgoing, incoming, "dispatch")
            for other in range(2):
                assert torch.equal(incoming[other], _bytes_of(other, transport.rank, sizes, device))
    numbers = torch.arange(6).view(2, 3) + 10 * transport.rank
    finish = transport.begin_all_to_all([numbers, numbers[:, :1].to(transport.device)])
    expected = [[3 * transport.rank + 10 * other + n for n in (0, 1, 2, 0)] for other in range(2)]
    assert finish().tolist() == expected
    assert transport.all_gather_bytes(b"x" * transport.rank) == [b"", b"x"]
    transport.close()
    with pytest.raises(ClosedError):
        transport.exchange(outgoing, incoming, "dispatch")


def _bytes_of(source: int, target: int, sizes: tuple[int, int], device: Any) -> torch.Tensor:
    """What rank `source` sends to rank `target`: as many bytes as `sizes` has for the sum of the two."""
    size = sizes[(source + target) % 2]
    return (torch.arange(size) * 7 + 3 * source + 5 * target).to(torch.uint8).to(device)
