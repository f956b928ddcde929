"""The experts of a rank: grouped SwiGLU networks, forward and backward, in one piece with the exchange of their rows.

    forward     x -> dispatch -> gate, up -> silu(gate) * up * weight -> down -> combine -> out
    backward    grad_x <- grad_combine <- ... and weight gradients ... <- grad_dispatch <- grad_out

One autograd function spans all of it, since torch can't pass gradients of FP8 rows from one function to the next:
tokens go to the GEMMs as they arrive, and gradients likewise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..autograd import dispatch_gradients
from ..backends import Rows
from ..codec import FP8Tensor, MXFP4Tensor
from ..communicator import EPCommunicator
from ..errors import InvalidArgument, require
from ..fp8_rows import FP8Rows
from ..memory import empty
from ..received import Received
from ..routing import Routing
from . import swiglu
from .gemm import C, Gemms, Groups, R, W, gemms_for
from .recipe import Recipe
from .weights import Cached, version

DTYPES = (torch.bfloat16, torch.float32)
F = TypeVar("F", bound=Callable[..., Any])


class GroupedExperts(nn.Module):
    """SwiGLU experts of one rank.

    Args:
        comm: brings tokens, and says which experts are here; its precision is that of the recipe.
        ffn_hidden: inner width of an expert.
        recipe: how they compute and what they keep.
        gemms: see `gemm.gemms_for`.
        dtype: of the weights: bfloat16 or float32. Optimizers change these; GEMMs read what is made of them once after
            each change.
        device: of the weights; None = that of the communicator.

    Attributes:
        gate_up: `[num_local_experts, 2 * ffn_hidden, hidden]`, gates first.
        down: `[num_local_experts, hidden, ffn_hidden]`.
    """

    def __init__(
        self,
        comm: EPCommunicator,
        ffn_hidden: int,
        recipe: Recipe,
        *,
        gemms: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require(ffn_hidden > 0 and ffn_hidden % 32 == 0, "ffn_hidden", ffn_hidden, "a multiple of 32")
        require(dtype in DTYPES, "dtype", dtype, " or ".join(map(str, DTYPES)))
        self.recipe, self.ffn_hidden, self.hidden = recipe, ffn_hidden, comm.hidden
        self.first_expert = comm.rank * comm.num_local_experts
        where = comm.device if device is None else device
        shape = (comm.num_local_experts, 2 * ffn_hidden, comm.hidden)
        self.gate_up = nn.Parameter(torch.empty(shape, dtype=dtype, device=where))
        self.down = nn.Parameter(
            torch.empty((shape[0], comm.hidden, ffn_hidden), dtype=dtype, device=self.gate_up.device)
        )
        self._gemms_name, self._gemms_by_device = gemms, dict[torch.device, Any]()
        self._alignment, self._has_capacity = comm.expert_alignment, comm.num_max_tokens_per_rank is not None
        _ = self.gemms  # raises now what it would raise later
        self._operands: dict[str, Cached[Any]] = {}
        self.reset_parameters()

    @property
    def gemms(self) -> Any:
        """How the experts multiply where their weights are now."""
        device = self.gate_up.device
        if device not in self._gemms_by_device:
            widths = (self.hidden, self.ffn_hidden)
            sizes = (device, widths, self._alignment, self._has_capacity, self.gate_up.shape[0])
            self._gemms_by_device[device] = gemms_for(self.recipe, self._gemms_name, *sizes)
        return self._gemms_by_device[device]

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draws the weights uniformly, as `nn.Linear` does. Those of an expert don't depend on the number of ranks.

        Args:
            seed: equal on all ranks, or experts of two ranks may be alike; None = one of torch's random numbers.
        """
        if self.gate_up.is_meta:
            return
        seed = int(torch.randint(2**48, (), device="cpu")) if seed is None else seed
        for local in range(self.gate_up.shape[0]):
            generator = torch.Generator(self.gate_up.device).manual_seed(seed + self.first_expert + local)
            for weights in (self.gate_up[local], self.down[local]):
                bound = weights.shape[1] ** -0.5
                weights.uniform_(-bound, bound, generator=generator)

    def forget_operands(self) -> None:
        """To be called after weights were changed through `.data` or by a collective, which torch does not notice."""
        self._operands.clear()

    def _operands_of(self, name: str, weights: Tensor, dtype: torch.dtype) -> _Operands[Any, Any, Any]:
        """What GEMMs read of weights, made anew if they have changed.

        Args:
            name: "gate_up" or "down".
            weights: those of a call, which need not be the module's of this moment.
            dtype: of the tokens.
        """
        key = name if self.gemms.arrives_as else f"{name}.{dtype}"  # FP8 is the same for tokens of all dtypes
        cached = self._operands.setdefault(key, Cached(partial(_Operands[Any, Any, Any], self.gemms, dtype)))
        operands: _Operands[Any, Any, Any] = cached.of(weights)
        return operands

    def _load_from_state_dict(self, *args: Any) -> None:
        """Sharded weights get a new version, but not what is gathered of them."""
        super()._load_from_state_dict(*args)
        self.forget_operands()

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made of the weights."""
        return {**self.__dict__, "_operands": {}}

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, comm: EPCommunicator) -> Tensor:
        """What the experts of all ranks make of this rank's tokens. Collective, as is its backward.

        Args:
            x: `[num_tokens, hidden]` bfloat16 or float32; num_tokens may be 0.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 = none.
            topk_weights: float32 of that shape.
            comm: that of the constructor.

        Returns:
            `[num_tokens, hidden]`, dtype of x. Differentiable in x, topk_weights and the weights of the experts.

        Raises:
            InvalidArgument: see `EPCommunicator.dispatch`; x is of another dtype or width. On all ranks likewise.
            RuntimeError: in backward, if the weights were changed in place since forward.
        """
        self.check_tokens(x, comm)
        inputs = (x, topk_weights, self.gate_up, self.down)
        keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        out: Tensor = _RoutedExperts.apply(*inputs, topk_idx, self, comm, keeps)
        return out

    def check_tokens(self, x: Tensor, comm: EPCommunicator) -> None:
        """Raises what is wrong with them, on all ranks as a dispatch does."""
        is_tensor = isinstance(x, Tensor)
        if is_tensor and x.dtype in DTYPES and x.ndim > 0 and x.shape[-1] == self.hidden:
            return
        found = f"{list(x.shape)} of {x.dtype}" if is_tensor else type(x).__name__
        accepted = f"[..., {self.hidden}] of {' or '.join(map(str, DTYPES))}"
        comm._refuse(InvalidArgument(f"x is {found}; accepted: {accepted}"))

    def extra_repr(self) -> str:
        num_experts, _, hidden = self.gate_up.shape
        return f"{num_experts} experts from {self.first_expert}, hidden={hidden}, ffn_hidden={self.ffn_hidden}"


class _Operands(Generic[R, W, C]):
    """Weights and their transposes as GEMMs read them; the latter only once they are asked for."""

    def __init__(self, gemms: Gemms[R, W, C], dtype: torch.dtype, weights: Tensor) -> None:
        self._gemms: Gemms[R, W, C] = gemms
        self.straight: W = gemms.weights(weights, dtype)
        self._transposed: W | None = None

    @property
    def transposed(self) -> W:
        if self._transposed is None:
            self._transposed = self._gemms.transposed(self.straight)
        return self._transposed


def _without_autocast(function: F) -> F:
    """Of an autograd function: formats are those of the recipe."""

    @wraps(function)
    def call(ctx: Any, first: Tensor, *args: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(ctx, first, *args)

    return cast(F, call)


class _RoutedExperts(torch.autograd.Function):
    """`(x, topk_weights, gate_up, down, topk_idx, experts, comm, keeps) -> out`, from dispatch to combine.

    x, topk_weights, gate_up and down are there for their gradients; keeps = whether backward may follow.
    """

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        topk_idx: Tensor,
        experts: GroupedExperts,
        comm: EPCommunicator,
        keeps: bool,
    ) -> Tensor:
        gemms, recipe, dtype = experts.gemms, experts.recipe, x.dtype
        out = gemms.arrives_as or dtype
        needs_rows = keeps and (x.requires_grad or topk_weights.requires_grad)
        facts = {"a gradient of the layer": keeps, "gradient of x or topk_weights": needs_rows}
        received, handle = comm._dispatch(
            x.detach(), topk_idx, topk_weights.detach(), None, None, out, facts, zeroes_rest=False
        )
        kept_rows = _tensors_to_keep(received, recipe) if keeps else []  # at once: others may write there later
        groups, row_weights = Groups.of(handle.routing), received.topk_weights
        of_gate_up, of_down = experts._operands_of("gate_up", gate_up, dtype), experts._operands_of("down", down, dtype)
        hidden_rows = gemms.multiply(received.x, of_gate_up.straight, groups, dtype)
        act = swiglu.forward_rows(hidden_rows, row_weights, gemms, groups.end)
        y = gemms.multiply(act, of_down.straight, groups, dtype)
        if keeps:
            kept_act = _tensors_of(act) if recipe.keeps_act else []
            weights = _KeptWeights(gate_up, down, of_gate_up, of_down)
            ctx.save_for_backward(hidden_rows, row_weights, *weights.temporary(gate_up, down), *kept_rows, *kept_act)
            ctx.num_kept_rows, ctx.routing, ctx.experts, ctx.comm = len(kept_rows), handle.routing, experts, comm
            ctx.weights = weights
        return comm.combine(y, handle, apply_weights=False)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        experts, comm, routing = ctx.experts, ctx.comm, ctx.routing
        hidden_rows, row_weights, *kept = ctx.saved_tensors
        (gate_up, of_gate_up), (down, of_down) = ctx.weights.of_forward(kept, experts, hidden_rows.dtype)
        gemms, dtype, groups = experts.gemms, hidden_rows.dtype, Groups.of(routing)
        needs_x, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad[:4]

        grad_y = _receive_gradients(comm, grad_out, routing, gemms)
        grad_act = gemms.multiply(grad_y, of_down.transposed, groups, dtype)
        act = _rows_from(kept[ctx.num_kept_rows :])
        grad_hidden, grad_row_weights, made = swiglu.backward_rows(
            hidden_rows, row_weights, grad_act, gemms, needs_down and act is None, groups.end
        )
        act = made if act is None else act
        del grad_act, made
        grad_down = grad_gate_up = grad_x = grad_topk_weights = None
        if needs_down:
            columns = gemms.columns(grad_y, groups), gemms.columns(act, groups)
            grad_down = gemms.weight_gradient(*columns, groups, down.dtype)
            del columns
        del grad_y, act
        if needs_gate_up:
            x_columns = _kept_columns(kept[: ctx.num_kept_rows], experts, groups, dtype)
            grad_columns = gemms.columns(grad_hidden, groups)
            grad_gate_up = gemms.weight_gradient(grad_columns, x_columns, groups, gate_up.dtype)
            del x_columns, grad_columns
        if needs_x or needs_weights:
            grad_rows = gemms.multiply(grad_hidden, of_gate_up.transposed, groups, dtype)
            wanted = grad_row_weights if needs_weights else None
            grad_x, grad_topk_weights = dispatch_gradients(comm._exchange, routing, grad_rows, wanted, dtype)
        return grad_x if needs_x else None, grad_topk_weights, grad_gate_up, grad_down, None, None, None, None


class _KeptWeights:
    """The weights of a forward, for its backward, and what was made of them if that is still there: an autograd context
    lives as long as the loss, and must not hold two bytes for each weight.

    Temporary weights are saved as tensors, so that torch frees them after backward; parameters live in any case.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, *operands: _Operands[Any, Any, Any]) -> None:
        self._parameters = [weights if weights.is_leaf else None for weights in (gate_up, down)]
        self._versions = [version(weights) for weights in (gate_up, down)]
        self._operands = [weakref.ref(each) for each in operands]

    def temporary(self, *weights: Tensor) -> list[Tensor]:
        """What must be saved, to be the first of `kept`."""
        return [each for each, parameter in zip(weights, self._parameters, strict=True) if parameter is None]

    def of_forward(
        self, kept: list[Tensor], experts: GroupedExperts, dtype: torch.dtype
    ) -> list[tuple[Tensor, _Operands[Any, Any, Any]]]:
        """Both weights with their operands; takes its own from `kept`."""
        found = []
        for name, parameter, before, operands in zip(
            ("gate_up", "down"), self._parameters, self._versions, self._operands, strict=True
        ):
            if parameter is not None and version(parameter) != before:  # what torch has saved it checks itself
                raise RuntimeError("weights of experts were changed in place between forward and backward")
            weights, made = kept.pop(0) if parameter is None else parameter, operands()
            found.append((weights, experts._operands_of(name, weights, dtype) if made is None else made))
        return found


def _tensors_to_keep(received: Received, recipe: Recipe) -> list[Tensor]:
    """What backward needs of the received tokens: float rows, FP8 rows, or the payload and how to take its rows."""
    if recipe.keeps == "rows":
        return _tensors_of(received.x)
    payload, source_rows = received.payload, received.source_rows
    assert source_rows is not None, "layout 'expert' has them"
    row_scales = [received.x.scales] if isinstance(received.x, FP8Rows) else []
    return [payload.packed, payload.scales, source_rows, *row_scales]


def _tensors_of(rows: Tensor | FP8Tensor | FP8Rows) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else [rows.data, rows.scales]


def _rows_from(kept: Sequence[Tensor]) -> Any:
    """The reverse of `_tensors_of`; None if nothing was kept."""
    if not kept:
        return None
    if len(kept) == 1:
        return kept[0]
    return FP8Rows(*kept) if kept[1].ndim == 1 else FP8Tensor(*kept)


def _kept_columns(kept: Sequence[Tensor], experts: GroupedExperts, groups: Groups, dtype: torch.dtype) -> Any:
    """What weight gradients read of the received tokens."""
    if experts.recipe.keeps == "rows":
        return experts.gemms.columns(_rows_from(kept), groups)
    packed, scales, source_rows, *row_scales = kept
    payload = MXFP4Tensor(packed, scales)
    return experts.gemms.payload_columns(payload, source_rows, row_scales[0] if row_scales else None, groups, dtype)


def _receive_gradients(comm: EPCommunicator, grad_out: Tensor, routing: Routing, gemms: Any) -> Any:
    """Sends the gradients of the layer's results to the experts; the rows that GEMMs read there."""
    exchange, leg = comm._exchange, "grad_dispatch"
    send = exchange.pack_again(leg, Rows.of(grad_out), routing)
    arrived = exchange.to_experts(leg, send, routing.sizes)
    dtype, num_rows = grad_out.dtype, routing.num_rows
    # What is turned back after a rotation has no block scales that FP8 could take over.
    is_rotated = gemms.arrives_as is not None and exchange.precision.leg(leg).hadamard
    rows = empty((num_rows, comm.hidden), dtype, grad_out.device) if is_rotated else None
    rows = gemms.empty_rows(num_rows, comm.hidden, grad_out.device, dtype) if rows is None else rows
    exchange.unpack(leg, arrived, Rows.of(rows) if isinstance(rows, Tensor) else rows._rows, routing)
    exchange.settle(arrived)
    return gemms.rows(rows, dtype) if is_rotated else rows
