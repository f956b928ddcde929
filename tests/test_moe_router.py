"""The router of `fp4comm.moe`: choices, weights and their gradients, load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp4comm.errors import InvalidArgument
from fp4comm.moe import Router

HIDDEN, NUM_EXPERTS, NUM_TOPK = 32, 12, 4
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, as it is": {"normalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "DeepSeek-V2": {"num_groups": 4, "num_topk_groups": 2, "normalize": False},
    "DeepSeek-V3": {"score": "sigmoid", "has_bias": True, "num_groups": 4, "num_topk_groups": 2, "scale": 2.5},
}


def make_router(way: str, num_tokens: int = 40) -> tuple[Router, Tensor]:
    """A router, with a bias that matters where it has one, and tokens."""
    torch.manual_seed(5)
    router = Router(HIDDEN, NUM_EXPERTS, NUM_TOPK, **WAYS[way])
    if router.bias is not None:
        router.bias.copy_(torch.randn(NUM_EXPERTS) * 0.2)
    return router, torch.randn(num_tokens, HIDDEN)


def choose(router: Router, scores: list[float]) -> list[int]:
    """The experts of one token, the plain way."""
    bias = [0.0] * NUM_EXPERTS if router.bias is None else router.bias.tolist()
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    size = NUM_EXPERTS // router.num_groups
    groups = [range(start, start + size) for start in range(0, NUM_EXPERTS, size)]
    counted = 1 if router.bias is None else 2
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:counted]))
    allowed = [expert for group in groups[: router.num_topk_groups] for expert in group]
    return sorted(allowed, key=lambda expert: -biased[expert])[:NUM_TOPK]


@pytest.mark.parametrize("way", WAYS)
def test_choices_and_weights(way: str) -> None:
    router, x = make_router(way)
    routes = router(x)
    logits = x.double() @ router.weight.double().t()
    scores = logits.softmax(dim=1) if router.score == "softmax" else logits.sigmoid()
    for token, all_scores in enumerate(scores.tolist()):
        experts = choose(router, all_scores)
        assert routes.topk_idx[token].tolist() == experts
        chosen = torch.tensor([all_scores[expert] for expert in experts])
        chosen = chosen / chosen.sum() if router.normalize else chosen
        torch.testing.assert_close(routes.topk_weights[token], chosen * router.scale, rtol=1e-5, atol=1e-6)
    load = torch.bincount(routes.topk_idx.flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(routes.num_tokens_per_expert, load)


@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: str) -> None:
    """As autograd finds them in float64 for the same choices."""
    router, x = make_router(way)
    x.requires_grad_()
    routes = router(x)
    factors = torch.randn(routes.topk_weights.shape)
    ((routes.topk_weights * factors).sum() + 3 * routes.balance).backward()

    exact_x, weight = (value.detach().double().requires_grad_() for value in (x, router.weight))
    logits = exact_x @ weight.t()
    scores = logits.softmax(dim=1) if router.score == "softmax" else logits.sigmoid()
    weights = scores.gather(1, routes.topk_idx)
    weights = weights / weights.sum(dim=1, keepdim=True) if router.normalize else weights
    shares = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
    balance = NUM_EXPERTS * (routes.num_tokens_per_expert / routes.topk_idx.numel() * shares).sum()
    ((weights * router.scale * factors).sum() + 3 * balance).backward()
    torch.testing.assert_close(routes.balance.double(), balance, rtol=1e-5, atol=0)
    for got, want in ((x.grad, exact_x.grad), (router.weight.grad, weight.grad)):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def test_balance_is_1_for_an_even_load_and_more_for_an_uneven_one() -> None:
    router = Router(4, 4, 1)
    with torch.no_grad():
        router.weight.copy_(10 * torch.eye(4))
    assert router(torch.eye(4)).balance.item() == pytest.approx(1, rel=1e-3)
    assert router(torch.eye(4)[[0, 0, 0, 1]]).balance.item() > 2


def test_bias_evens_the_load() -> None:
    torch.manual_seed(6)
    router = Router(HIDDEN, NUM_EXPERTS, NUM_TOPK, score="sigmoid", has_bias=True)
    x = torch.randn(500, HIDDEN) + torch.randn(HIDDEN)  # some experts fit all tokens
    before = router(x).num_tokens_per_expert
    for _ in range(150):
        router.update_bias(router(x).num_tokens_per_expert, rate=1e-2)
    after = router(x).num_tokens_per_expert
    assert after.sum() == before.sum()
    assert after.float().std() < 0.1 * before.float().std()
    assert "bias" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_no_tokens_and_bfloat16() -> None:
    router, x = make_router("DeepSeek-V3")
    routes = router(x[:0].requires_grad_())
    assert routes.topk_idx.shape == routes.topk_weights.shape == (0, NUM_TOPK)
    assert routes.num_tokens_per_expert.sum() == 0
    (routes.topk_weights.sum() + routes.balance).backward()
    assert not router.weight.grad.any()
    small = x.bfloat16().requires_grad_()
    again = router(small)  # in float32: as for the same numbers there
    assert torch.equal(again.topk_weights, router(small.float()).topk_weights)
    again.topk_weights.sum().backward()
    assert small.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"score": "tanh"}, "score is 'tanh'"),
        ({"num_groups": 5}, "num_groups is 5"),
        ({"num_groups": 4, "num_topk_groups": 5}, "num_topk_groups is 5"),
        ({"num_topk": 7, "num_groups": 4, "num_topk_groups": 2}, "num_topk is 7; accepted: 1 to 6"),
        ({"num_topk": 1, "num_groups": 12, "num_topk_groups": 2, "has_bias": True}, "groups of at least two"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Router(HIDDEN, NUM_EXPERTS, **{"num_topk": NUM_TOPK, **wrong})


def test_bias_update_needs_a_bias() -> None:
    with pytest.raises(InvalidArgument, match="has_bias"):
        Router(HIDDEN, NUM_EXPERTS, NUM_TOPK).update_bias(torch.zeros(NUM_EXPERTS))
