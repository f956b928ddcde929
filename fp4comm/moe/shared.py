"""Shared experts, and their way beside the exchange of the routed ones on a GPU.

    caller's stream   router -> dispatch -> experts -> combine -> + -> out
    side stream            \\-> gate, up -> SwiGLU -> down -------/

Backward is the same picture from right to left. Three things make it so:

- Every piece of work on the side stream starts with a wait for the caller's stream (`Lane.fork`), and the caller's
  stream waits for it before anything reads its results (`Lane.join`). What it reads is kept alive until then, so memory
  of either stream may be freed and used again without a word to the allocator.
- To autograd all nodes are on the caller's stream: what a checkpoint computes again is computed there, gradients of
  parameters are added there, and a captured graph is joined.
- Among nodes that are ready, autograd takes the one that was made last. `_Shared` is made after the node of the routed
  experts, so that its backward is enqueued first, before the host is busy with theirs; `_Join`, made before both,
  waits for it last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_POOL_SIZE = 32  # of torch's streams, per device
_taken: set[tuple[int, int]] = set()


class SharedExperts(nn.Module):
    """A SwiGLU network that every token goes through."""

    def __init__(
        self, hidden: int, ffn_hidden: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn_hidden, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden]` -> the same shape and dtype."""
        gate, up = nn.functional.linear(x, self.gate_up.weight.to(x.dtype)).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down.weight.to(x.dtype))

    def start(self, x: Tensor) -> Started:
        """Enqueues `forward` beside what the current stream does next; the same bits, and the same gradients."""
        return Started(x, self.gate_up.weight, self.down.weight)


def can_start(shared: nn.Module | None) -> bool:
    """Whether it is `SharedExperts` as they are here: `start` calls neither hooks nor a subclass's `forward`."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    is_ours = type(shared) is SharedExperts and "forward" not in vars(shared)
    return is_ours and not any(getattr(shared, name) for name in hooks)


class Lane:
    """A stream beside the one that is current. Off GPUs there is none, and work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # that forked, and the side stream
        self._held: list[Tensor] = []

    @contextmanager
    def fork(self, *tensors: Tensor) -> Iterator[None]:
        """What is enqueued inside runs beside what follows, until `join`; `tensors` are what it reads."""
        self._held += tensors
        if self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        side = _side_stream(self._device.index, current.cuda_stream)
        self._streams = current, side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield

    def __del__(self) -> None:
        """What the side stream reads must not be freed before: after an error in backward nobody else has joined."""
        self.join()

    def join(self) -> None:
        """Has the stream that forked wait. Does nothing a second time."""
        if self._streams is not None:
            current, side = self._streams
            current.wait_stream(side)
        self._streams = None
        self._held.clear()


@cache
def _side_stream(device: int, current: int) -> torch.cuda.Stream:
    """One for each stream that forks. If callers shared it, work of one would wait behind that of another, which may
    wait for messages that the first has yet to send: ranks that are threads of one process would wait for ever."""
    for _ in range(_POOL_SIZE):  # torch hands out the same ones again and again
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream != current and (device, stream.cuda_stream) not in _taken:
            break
    _taken.add((device, stream.cuda_stream))
    return stream


class Started:
    """Shared experts under way: `join` before anything else may fail, then `result`."""

    def __init__(self, x: Tensor, gate_up: Tensor, down: Tensor) -> None:
        self.lane = Lane(x.device)
        device_type = x.device.type
        is_cast = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type) if is_cast else x.dtype
        self._inputs = _Join.apply(self.lane, x, gate_up, down)
        with torch.no_grad(), torch.autocast(device_type, enabled=False), self.lane.fork(x, gate_up, down):
            self.hidden = nn.functional.linear(x.to(self.dtype), gate_up.to(self.dtype))
            gate, up = self.hidden.chunk(2, dim=-1)
            self.y = nn.functional.linear(nn.functional.silu(gate) * up, down.to(self.dtype))

    def join(self) -> None:
        """What the current stream does from now on may read the result."""
        self.lane.join()

    def result(self) -> Tensor:
        """Differentiable in all inputs; to be called after the routed experts have been, see above."""
        out: Tensor = _Shared.apply(self, *self._inputs)
        return out


class _Join(torch.autograd.Function):
    """`(lane, *tensors) -> tensors`; backward waits for the lane, on which their gradients were computed."""

    @staticmethod
    def forward(ctx: Any, lane: Lane, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lane = lane
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.lane.join()
        return None, *grads


class _Shared(torch.autograd.Function):
    """`(started, x, gate_up, down) -> y`, where all has been computed."""

    @staticmethod
    def forward(ctx: Any, started: Started, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, started.hidden, gate_up, down)
        ctx.lane, ctx.dtype = started.lane, started.dtype
        return started.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = x, hidden, gate_up, down = ctx.saved_tensors
        needs_x, needs_gate_up, needs_down = ctx.needs_input_grad[1:]
        grad_x = grad_gate_up = grad_down = None
        with torch.autocast(x.device.type, enabled=False), ctx.lane.fork(grad, *saved):
            gate, up = hidden.chunk(2, dim=-1)
            silu = nn.functional.silu(gate)
            if needs_down:
                grad_down = (grad.t() @ (silu * up)).to(down.dtype)
            if needs_x or needs_gate_up:
                grad_act = grad @ down.to(ctx.dtype)
                grad_gate = torch.ops.aten.silu_backward(grad_act * up, gate)
                grad_hidden = torch.cat([grad_gate, grad_act * silu], dim=-1)
            if needs_gate_up:
                grad_gate_up = (grad_hidden.t() @ x.to(ctx.dtype)).to(gate_up.dtype)
            if needs_x:
                grad_x = (grad_hidden @ gate_up.to(ctx.dtype)).to(x.dtype)
        return None, grad_x, grad_gate_up, grad_down
