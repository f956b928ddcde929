"""fp4comm's experts in Megatron-Core's layers, against its own experts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from adapters import megatron_host
from adapters import megatron_recipes as recipes
from launch import run_ranks

from fp4comm import InvalidArgument

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs Megatron-Core (pip install megatron-core)"
)

# Sums of a few hundred float32 products in another order: some units of 6e-8; through three layers a few more.
LAYER, LOSSES, GRADIENTS = 1e-6, 1e-6, 2e-6
# Distances of a layer's results, at most: half a unit of the least exact number on their way, in its norm.
BF16, FP8, MXFP4 = 2**-6, 0.15, 0.4


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    """What `on_two_ranks` found."""
    results: dict[str, Any] = run_ranks(recipes.on_two_ranks, 2, launcher="torchrun", timeout=200)[0]
    return results


@pytest.mark.mpi
@pytest.mark.parametrize("case", ["model", "model alone", "recomputed model"])
def test_training_is_that_of_megatrons_experts(two: dict[str, Any], case: str) -> None:
    for name in ("one process", "stock"):
        assert two[case][name]["losses"] < LOSSES
        assert two[case][name]["gradients"] < GRADIENTS


@pytest.mark.mpi
@pytest.mark.parametrize(
    "case",
    [
        "all experts chosen",
        "alone",
        "dropped tokens",
        "few experts",
        "fixed",
        "no rows",
        "no tokens",
        "one expert each",
        "plain",
        "recomputed",
        "shared experts",
        "tensor parallel",
    ],
)
def test_layer_is_that_of_megatrons_experts(two: dict[str, Any], case: str) -> None:
    assert two["layers"][case] < LAYER


@pytest.mark.mpi
@pytest.mark.parametrize("recipe, most", [("bf16", BF16), ("fp8_flow", FP8), ("fp4", MXFP4), ("fp4_all", MXFP4)])
def test_recipes_of_a_bf16_layer(two: dict[str, Any], recipe: str, most: float) -> None:
    assert 0 < two["layers"][recipe] < most


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["fp8_flow", "fp4", "fp4 alone"])
def test_training_with_fp8_rows(two: dict[str, Any], name: str) -> None:
    runs = two["trained"]
    assert runs["stock"].losses[-1] < 0.5 * runs["stock"].losses[0]
    assert 0 < runs[name].distance(runs["stock"]) < 0.02
    assert runs[name].num_communicators == 1  # of two layers


@pytest.mark.mpi
def test_bytes_on_the_wire(two: dict[str, Any]) -> None:
    runs = two["trained"]
    assert runs["fp4"].share("dispatch") < 0.21  # as without a recipe
    assert runs["fp4"].share() < runs["fp8_flow"].share() < 0.55


@pytest.mark.mpi
def test_payload_is_what_is_kept(two: dict[str, Any]) -> None:
    kept = two["kept"]
    fused, unfused = kept["SequentialMLP, fused SwiGLU"], kept["SequentialMLP"]
    assert kept["fp4comm fp4"] < kept["fp4comm fp8_flow"] < kept["fp4comm bf16"] < unfused
    assert kept["fp4comm fp4"] < fused < unfused


@pytest.mark.mpi
def test_weights_start_as_megatrons(two: dict[str, Any]) -> None:
    assert two["first weights"]


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["SequentialMLP", "TEGroupedMLP", "GroupedMLP", "back", "view"])
def test_states_of_megatrons_experts(two: dict[str, Any], layout: str) -> None:
    assert two["layouts"][layout]


@pytest.mark.mpi
def test_distributed_checkpoints(two: dict[str, Any]) -> None:
    assert len(two["checkpoints"]) == 4
    assert not [name for name, is_read in two["checkpoints"].items() if not is_read]


@pytest.mark.mpi
@pytest.mark.parametrize("reader", ["stock", "fp4comm"])
def test_optimizer_states_of_the_other_kind(two: dict[str, Any], reader: str) -> None:
    assert two["optimizer states"][reader] < 1e-4


@pytest.mark.mpi
@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_gradients_of_megatrons_data_parallelism(two: dict[str, Any], expert_parallel: int) -> None:
    assert two["data parallel"][expert_parallel] < GRADIENTS


@pytest.mark.mpi
@pytest.mark.parametrize(
    "what",
    ["kept", "same", "twice", "evaluated before a step", "evaluated after it", "twice after an evaluation"],
)
def test_operands_are_made_again_after_a_step(two: dict[str, Any], what: str) -> None:
    assert two["follows weights"][what]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "case, message",
    [
        ("activation", "activation_func is gelu; accepted: torch.nn.functional.silu"),
        ("bias", "add_bias_linear is True; accepted: False: experts have no biases"),
        ("clamp", "activation_func_clamp_value is 7.0; accepted: None"),
        ("dtype", "params_dtype is torch.float16; accepted: torch.bfloat16 or torch.float32"),
        ("fp8", "fp8 is 'hybrid'; accepted: None: the recipe says how experts compute; or with_fp4comm without"),
        ("latent", "moe_latent_size is 32; accepted: None"),
        ("no gate", "gated_linear_unit is False; accepted: True: experts are SwiGLU networks"),
        ("offset", "glu_linear_offset is 1.0; accepted: 0.0"),
        ("on input", "moe_apply_probs_on_input is True; accepted: False"),
        ("recomputed", "recompute_modules is ['moe_act']; accepted: others: the recipe says what experts keep"),
        ("singletons", "singleton_local_shards is True; accepted: False"),
        ("wgrad", "delay_wgrad_compute is True; accepted: False"),
        ("width", "moe_ffn_hidden_size is 48; accepted: a multiple of 32"),
    ],
)
def test_mistakes(two: dict[str, Any], case: str, message: str) -> None:
    assert message in two["errors"][case]


def test_mistakes_in_a_spec() -> None:
    adapter = megatron_host.adapter()
    with megatron_host.quick_import():
        specs = megatron_host.host("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec(num_experts=8)
    with pytest.raises(InvalidArgument, match="recipe is 'fp8'; accepted: a Recipe or one of 'bf16', 'fp8_"):
        adapter.with_fp4comm(spec, recipe="fp8")
    with pytest.raises(InvalidArgument, match="precision is 'fp4'; accepted: None with a recipe"):
        adapter.with_fp4comm(spec, precision="fp4", recipe="fp4")
    with pytest.raises(InvalidArgument, match="gemms is 'emulated'; accepted: 'auto' without a recipe"):
        adapter.with_fp4comm(spec, gemms="emulated")
    with pytest.raises(InvalidArgument, match="layout is 'MLP'; accepted: 'SequentialMLP' or 'TEGroupedMLP' or"):
        adapter.stock_state_dict(spec, "MLP")
