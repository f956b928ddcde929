"""A Mixture-of-Experts layer: router, exchange, experts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..agreement import agree
from ..communicator import EPCommunicator
from ..errors import InvalidArgument, is_count, require
from ..transport import make_transport
from .experts import GroupedExperts
from .recipe import Recipe
from .router import Router, Routes
from .shared import SharedExperts, can_start

Result = TypeVar("Result")
_OF_LAST_FORWARD = ("num_tokens_per_expert", "balance")


def _outside_graphs(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function` as a break in the graphs of `torch.compile`, which would look into every message otherwise."""
    disabled: list[Callable[..., Result]] = []

    @wraps(function)
    def call(*args: Any) -> Result:
        if "torch._dynamo" not in sys.modules:  # to disable imports it, which takes 1.2 s; now nothing is compiled
            return function(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args)

    return call


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a group.

    Experts' parameters differ between ranks: their gradients are sums over all ranks' tokens already and must not be
    summed again. Those of the router and of the shared experts are replicated, and it is up to the training loop to add
    them up over the ranks. The constructor, forward and backward are collective.

    Args:
        group: what `EPCommunicator` takes; or the communicator of another layer of equal sizes and recipe
            (`layer.comm`), with which this one then shares it. A layer closes only a communicator that it has made.
        hidden: width of a token, a multiple of 32 (of 128 for block scales on Hopper).
        ffn_hidden: inner width of an expert, likewise.
        num_experts: over all ranks.
        num_topk: experts of a token.
        recipe: a `Recipe` or the name of one: "bf16", "fp8_flow", "fp4" (default), "fp4_all", "fp32".
        router: options of `Router`, e.g. `{"score": "sigmoid", "has_bias": True, "num_groups": 8}`.
        num_shared_experts: SwiGLU experts of the same width that every token goes to, replicated, in the dtype of the
            tokens.
        overlap_shared: whether a GPU computes shared experts on a stream of their own, beside dispatch and combine; the
            numbers are the same. On the CPU, and where `layer.shared` has hooks or has been replaced, they are called
            after the routed experts in any case.
        expert_alignment: each expert's rows are padded to a multiple of it; None = 16, or with block scales and
            num_max_tokens_per_rank 128.
        num_max_tokens_per_rank: see `EPCommunicator`.
        gemms: "auto", "emulated" or "tensor_cores", see `fp4comm.moe.gemm`.
        dtype: of the weights of experts: bfloat16 or float32.
        device: of the weights; None = that of the communicator, or torch's default for a single process.
        communicator_options: further arguments of `EPCommunicator`.

    Attributes:
        comm: the communicator.
        num_tokens_per_expert: int64 `[num_experts]`, choices of this rank's tokens in the last forward.
        balance: of the last forward, see `Routes`.

    Raises:
        InvalidArgument: on all ranks: arguments that are wrong, don't go together or differ between them.
    """

    num_tokens_per_expert: Tensor
    balance: Tensor

    def __init__(
        self,
        group: Any = None,
        *,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        num_topk: int,
        recipe: Recipe | str = "fp4",
        router: dict[str, Any] | None = None,
        num_shared_experts: int = 0,
        overlap_shared: bool = True,
        expert_alignment: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        gemms: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **communicator_options: Any,
    ) -> None:
        super().__init__()
        try:
            _check_options(communicator_options)
            self.recipe, self.overlap_shared = Recipe.of(recipe), overlap_shared
        except InvalidArgument as wrong:
            _refuse(group, communicator_options, wrong)
        self._owns_comm = not isinstance(group, EPCommunicator)
        given: dict[str, Any] = {
            "expert_alignment": expert_alignment,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
        }
        if isinstance(group, EPCommunicator):
            self.comm = group
        else:
            if expert_alignment is None:
                given["expert_alignment"] = self.recipe.expert_alignment(num_max_tokens_per_rank is not None)
            sizes = {"num_experts": num_experts, "hidden": hidden, **given}
            self.comm = EPCommunicator(group, precision=self.recipe.precision, **sizes, **communicator_options)
        device = self.comm.device if device is None else device
        error = None
        try:
            if not self._owns_comm:
                _check_shared(self.comm, self.recipe, hidden, num_experts, given, communicator_options)
            self.router = Router(hidden, num_experts, num_topk, device=device, **(router or {}))
            self.experts = GroupedExperts(self.comm, ffn_hidden, self.recipe, gemms=gemms, dtype=dtype, device=device)
            accepted = "an integer, at least 0"
            require(is_count(num_shared_experts, 0), "num_shared_experts", repr(num_shared_experts), accepted)
            width = num_shared_experts * ffn_hidden
            self.shared = SharedExperts(hidden, width, dtype=dtype, device=device) if width else None
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        facts = {"ffn_hidden": ffn_hidden, "num_topk": num_topk, "recipe": str(self.recipe), "router": str(router)}
        self._agree(facts | {"num_shared_experts": num_shared_experts}, error)

    def _agree(self, facts: dict[str, object], error: Exception | None) -> None:
        """Closes an own communicator and raises, on all ranks, if one has an error or other arguments."""
        try:
            agree(self.comm._transport, "MoELayer", facts, error)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LAST_FORWARD:
            raise AttributeError(f"{name} is that of the last forward; call the layer first")
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` bfloat16 or float32 -> the same shape and dtype. No tokens at all are fine."""
        self.experts.check_tokens(x, self.comm)  # before the router, which would fail on one rank alone
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.router(tokens)
        self.num_tokens_per_expert, self.balance = routes.num_tokens_per_expert, routes.balance
        if self.overlap_shared and tokens.is_cuda and can_start(self.shared):
            return self._both_at_once(tokens, routes).view(x.shape)
        out = self._routed(tokens, routes)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view(x.shape)

    @_outside_graphs
    def _routed(self, tokens: Tensor, routes: Routes) -> Tensor:
        out: Tensor = self.experts(tokens, routes.topk_idx, routes.topk_weights, self.comm)
        return out

    @_outside_graphs
    def _both_at_once(self, tokens: Tensor, routes: Routes) -> Tensor:
        """Routed and shared experts. The latter are enqueued first: dispatch may wait for the device."""
        assert isinstance(self.shared, SharedExperts)
        started = self.shared.start(tokens)
        try:
            out: Tensor = self.experts(tokens, routes.topk_idx, routes.topk_weights, self.comm)
        finally:
            started.join()  # also after an error: the tokens' memory must not be used again before
        return out + started.result()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A layer with parameters of its own that shares the communicator, which stays with this one to close."""
        detached = {name: self.__dict__[name].detach().clone() for name in _OF_LAST_FORWARD if name in self.__dict__}
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        rest = {name: value for name, value in self.__dict__.items() if name not in detached}
        copied.__dict__.update(deepcopy(rest, memo), _owns_comm=False, **detached)
        return copied

    def close(self) -> None:
        """Closes the communicator if this layer has made it. Collective; the layer can't be used afterwards."""
        if self._owns_comm:
            self.comm.close()


def _check_options(options: dict[str, Any]) -> None:
    require("precision" not in options, "precision", "given", "recipe, which has the formats of all legs")
    known = inspect.signature(EPCommunicator).parameters
    for name in options:
        require(name in known, "argument", repr(name), "those of MoELayer and of EPCommunicator")


def _refuse(group: Any, options: dict[str, Any], error: InvalidArgument) -> NoReturn:
    """Raises an error of this rank on all ranks, which are about to agree about their communicators or layers."""
    if isinstance(group, EPCommunicator):
        transport, is_own = group._transport, False
    else:
        given = {name: options[name] for name in ("transport", "timeout_secs") if name in options}
        transport = make_transport(group, **given)
        is_own = transport is not group
    try:
        agree(transport, "MoELayer", {}, error)
    finally:
        if is_own:
            transport.close()
    raise AssertionError("the error has been raised")


def _check_shared(
    comm: EPCommunicator,
    recipe: Recipe,
    hidden: int,
    num_experts: int,
    given: dict[str, Any],
    options: dict[str, Any],
) -> None:
    for name, value in given.items():
        own = getattr(comm, name)
        require(value is None or value == own, name, value, f"{own}, that of the communicator, or None")
    require(not options, "communicator_options", sorted(options), "none together with a communicator, which has them")
    require(comm.hidden == hidden, "hidden", hidden, f"{comm.hidden}, that of the communicator")
    require(comm.num_experts == num_experts, "num_experts", num_experts, f"{comm.num_experts}, as the communicator")
    accepted = f"one with the legs of the communicator, {comm.precision}"
    require(comm.precision == recipe.legs, "recipe", recipe, accepted)
