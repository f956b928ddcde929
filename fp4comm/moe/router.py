"""The router: which experts each token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import require

SCORES = ("softmax", "sigmoid")
_LEAST_SUM = 1e-20  # of the scores of a token's experts: sigmoids may all be 0


class Routes(NamedTuple):
    """What a router decides.

    Attributes:
        topk_idx: int64 `[num_tokens, num_topk]`, distinct in a row.
        topk_weights: float32 of the same shape; differentiable.
        num_tokens_per_expert: int64 `[num_experts]`, of these tokens.
        balance: scalar, 1 if the load is even and more if it is not; differentiable. Times a small factor it is the
            auxiliary loss of Switch Transformer and its successors.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor
    balance: Tensor


class Router(nn.Module):
    """Scores every expert for every token, in float32, and takes the best.

    Args:
        hidden: width of a token.
        num_experts: over all ranks.
        num_topk: experts of a token.
        score: "softmax" over all experts, or "sigmoid" of each.
        has_bias: whether choices (not weights) count a bias per expert, by which `update_bias` balances the load
            without an auxiliary loss.
        num_groups: experts form so many groups of equal size ...
        num_topk_groups: ... of which a token takes the best so many, and its experts from these. The score of a group
            is the sum of its two best experts with a bias (DeepSeek-V3), else its best (DeepSeek-V2).
        normalize: divide the weights of a token by their sum.
        scale: a factor of all weights.
        dtype, device: of the weight.

    Attributes:
        weight: `[num_experts, hidden]`.
        bias: float32 `[num_experts]`, whatever the module is converted to; saved with the state but not trained. None
            without.

    Raises:
        InvalidArgument: numbers that don't fit together.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        score: str = "softmax",
        has_bias: bool = False,
        num_groups: int = 1,
        num_topk_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require(score in SCORES, "score", repr(score), " or ".join(map(repr, SCORES)))
        divides = num_groups >= 1 and num_experts % num_groups == 0
        require(divides, "num_groups", num_groups, f"a divisor of num_experts={num_experts}")
        require(1 <= num_topk_groups <= num_groups, "num_topk_groups", num_topk_groups, f"1 to {num_groups}")
        most = num_experts // num_groups * num_topk_groups
        require(1 <= num_topk <= most, "num_topk", num_topk, f"1 to {most}, the experts of the groups that are taken")
        fits = not (has_bias and num_topk_groups < num_groups) or num_experts // num_groups >= 2
        require(fits, "num_groups", num_groups, "groups of at least two experts, as has_bias is set")
        self.num_experts, self.num_topk, self.score = num_experts, num_topk, score
        self.num_groups, self.num_topk_groups = num_groups, num_topk_groups
        self.normalize, self.scale = normalize, scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if has_bias else None
        self.register_buffer("bias", bias)
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """As any module is moved or converted, but for the bias, whose steps BF16 would lose: it stays float32."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype != torch.float32:
            has_numbers = before.dtype == torch.float32 and not (before.is_meta or self.bias.is_meta)
            self.bias = before.to(self.bias.device) if has_numbers else self.bias.float()
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weight as `nn.Linear` does; the bias is zero."""
        bound = self.weight.shape[1] ** -0.5
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Routes:
        """The routes of `x` `[num_tokens, hidden]`, of any float dtype; num_tokens may be 0."""
        logits: Tensor = _Logits.apply(x, self.weight)
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        topk_idx = self.choose(scores.detach())
        topk_weights = scores.gather(1, topk_idx)
        if self.normalize:
            topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        load = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        load.scatter_add_(0, topk_idx.flatten(), torch.ones_like(topk_idx).flatten())  # bincount would wait for a GPU
        return Routes(topk_idx, topk_weights * self.scale, load, self._balance(scores, load))

    def choose(self, scores: Tensor) -> Tensor:
        """int64 `[num_tokens, num_topk]`, the experts for scores `[num_tokens, num_experts]`."""
        scores = scores if self.bias is None else scores + self.bias
        if self.num_topk_groups < self.num_groups:
            grouped = scores.unflatten(1, (self.num_groups, -1))
            of_group = grouped.amax(dim=-1) if self.bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
            best = of_group.topk(self.num_topk_groups, dim=-1).indices
            is_left_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
            scores = grouped.masked_fill(is_left_out[:, :, None], float("-inf")).flatten(1)
        return scores.topk(self.num_topk, dim=-1).indices

    def _balance(self, scores: Tensor, load: Tensor) -> Tensor:
        """The mean score of each expert times its share of the choices, summed and brought to 1 for an even load."""
        num_tokens = max(scores.shape[0], 1)
        shares = scores if self.score == "softmax" else scores / (scores.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        load_shares = load.float() / (num_tokens * self.num_topk)
        with torch.autocast(scores.device.type, enabled=False):
            return self.num_experts * (load_shares @ (shares.sum(dim=0) / num_tokens))

    @torch.no_grad()
    def update_bias(self, num_tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
        """Raises the bias of experts with less than the mean load by `rate` and lowers that of those with more.

        Args:
            num_tokens_per_expert: `[num_experts]` of a step, summed over all ranks that hold a copy of the router.
            rate: the paper on DeepSeek-V3 takes 0.001, and 0 at the end.

        Raises:
            InvalidArgument: the router has no bias.
        """
        require(self.bias is not None, "router", "without a bias", "one made with has_bias=True")
        assert self.bias is not None
        load = num_tokens_per_expert.to(self.bias)
        self.bias.add_(torch.sign(load.mean() - load), alpha=rate)

    def extra_repr(self) -> str:
        groups = f", the best {self.num_topk_groups} of {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"top {self.num_topk} of {self.num_experts} by {self.score}{groups}"


class _Logits(torch.autograd.Function):
    """`x @ weight.T` in float32, keeping x as it is instead of a float32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ weight.float().t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            grad_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
            grad_weight = (grad.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight
