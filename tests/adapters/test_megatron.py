"""fp4comm as the token dispatcher of Megatron-Core, against its own dispatcher and against one process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import megatron_host
from adapters import megatron_models as models
from launch import ROOT, launch_command, run_command, run_ranks

from fp4comm import InvalidArgument, NotAvailable

HAVE_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not HAVE_MEGATRON, reason="needs Megatron-Core (pip install megatron-core)")
ADAPTER = "fp4comm.adapters.megatron"

# Sums of a few hundred float32 products in another order: some units of 6e-8; through three layers a few more.
LAYER, LOSSES, GRADIENTS = 3e-7, 1e-6, 2e-6


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    """What `on_two_ranks` found."""
    results: dict[str, Any] = run_ranks(models.on_two_ranks, 2, launcher="torchrun", timeout=200)[0]
    return results


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    """What `on_four_ranks` found."""
    results: dict[str, Any] = run_ranks(models.on_four_ranks, 4, launcher="torchrun", timeout=200)[0]
    return results


def check(differences: dict[str, dict[str, float]]) -> None:
    assert differences.keys() >= {"one process", "stock"}
    for found in differences.values():
        assert found["losses"] < LOSSES
        assert found["gradients"] < GRADIENTS


@needs_megatron
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["model", "recomputed model"])
def test_training_is_that_of_one_process_and_of_the_stock_dispatcher(two: dict[str, Any], case: str) -> None:
    check(two[case])


@needs_megatron
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["groups of two", "groups of two, with a recipe"])
def test_groups_of_two_among_four(four: dict[str, Any], case: str) -> None:
    check(four[case])


@needs_megatron
@pytest.mark.mpi
@pytest.mark.parametrize(
    "case",
    [
        "all experts chosen",
        "biases",
        "dropped tokens",
        "few experts",
        "fixed",
        "fixed, one expert each",
        "gated",
        "no rows",
        "no tokens",
        "one expert each",
        "quantizing experts",
        "recomputed",
        "shared experts",
        "tensor parallel",
        "weights on input",
    ],
)
def test_layer_is_that_of_the_stock_dispatcher(two: dict[str, Any], case: str) -> None:
    assert two["layers"][case] < LAYER


@needs_megatron
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["no rows", "plain", "tensor parallel", "tensor parallel, groups of two"])
def test_layer_on_four_ranks(four: dict[str, Any], case: str) -> None:
    assert four["layers"][case] < LAYER


@needs_megatron
@pytest.mark.mpi
def test_bf16_wire_of_a_bf16_layer(two: dict[str, Any]) -> None:
    """Sums of BF16 rows differ, which the stock dispatcher rounds (2**-9) at each addend and fp4comm once."""
    assert 0 < two["layers"]["bf16"] < 2**-7


@needs_megatron
@pytest.mark.mpi
def test_spec_of_a_partial(two: dict[str, Any]) -> None:
    assert two["partial"] < LAYER


@needs_megatron
@pytest.mark.mpi
def test_training_in_fp4(two: dict[str, Any]) -> None:
    stock, fp4 = two["trained"]["stock"], two["trained"]["fp4"]
    assert stock.losses[-1] < 0.5 * stock.losses[0]
    assert 0 < fp4.distance(stock) < 0.01
    assert not stock.sent  # fp4comm had no part in it
    assert fp4.num_communicators == 1  # of two layers


@needs_megatron
@pytest.mark.mpi
def test_bytes_on_the_wire(two: dict[str, Any]) -> None:
    fp4 = two["trained"]["fp4"]
    assert fp4.share("dispatch") < 0.21  # 4.25 bits of 16 and the routing, in a row for 1.6 choices
    assert fp4.share() < 0.5


@needs_megatron
@pytest.mark.mpi
@pytest.mark.parametrize(
    "case, message",
    [
        ("hidden", "hidden_size is 80; accepted: a multiple of 32"),
        ("flex", "moe_token_dispatcher_type is 'flex'; accepted: 'alltoall' here, or fp4comm.adapters.deep_ep"),
        ("padded", "moe_pad_expert_input_to_capacity is True; accepted: False"),
        ("shared overlap", "moe_shared_expert_overlap is True; accepted: False"),
        ("overlap", "overlap_moe_expert_parallel_comm is True; accepted: False"),
        ("graphs", "is []; accepted: some of 'attn', 'mamba', 'mlp', 'moe_router'"),
        ("group", "pg_collection.ep is a group of 1; accepted: a group of expert_model_parallel_size=2 ranks"),
        ("expert tensor parallel", "expert_tensor_parallel_size is 2; accepted: 1"),
        ("too many experts", "topk_idx[0, 0] is 8; accepted: 0 to 7, or -1"),
    ],
)
def test_mistakes(two: dict[str, Any], case: str, message: str) -> None:
    assert message in two["errors"][case]


@needs_megatron
def test_mistakes_in_a_spec() -> None:
    with_fp4comm = megatron_host.adapter().with_fp4comm
    spec = gpt_layer_spec(num_experts=8)
    with pytest.raises(InvalidArgument, match=r"precision is 'fp5'; accepted: .*'fp4'"):
        with_fp4comm(spec, precision="fp5")
    with pytest.raises(InvalidArgument, match="option is 'hidden'; accepted: 'precision', 'check_inputs', "):
        with_fp4comm(spec, hidden=64)
    with pytest.raises(InvalidArgument, match="spec is a ModuleSpec without MoE layers"):
        with_fp4comm(gpt_layer_spec(num_experts=None))


def gpt_layer_spec(num_experts: int | None) -> Any:
    with megatron_host.quick_import():
        return megatron_host.host("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(num_experts=num_experts)


@needs_megatron
def test_a_block_of_specs_is_copied_where_it_changes() -> None:
    block_of = megatron_host.host("transformer.transformer_block").TransformerBlockSubmodules
    dense, moe = gpt_layer_spec(num_experts=None), gpt_layer_spec(num_experts=8)
    block = block_of(layer_specs=[dense, moe, moe], layer_norm=None)
    stock = moe.submodules.mlp
    changed = megatron_host.adapter().with_fp4comm(block)
    assert block.layer_specs == [dense, moe, moe]
    assert moe.submodules.mlp is stock
    assert changed.layer_specs[0] is dense
    assert changed.layer_specs[1] is changed.layer_specs[2]
    layer_class = changed.layer_specs[1].submodules.mlp
    layer_class = layer_class.func if isinstance(layer_class, functools.partial) else layer_class.module
    assert issubclass(layer_class, megatron_host.host("transformer.moe.moe_layer").MoELayer)
    assert changed.layer_specs[1].submodules.self_attention is moe.submodules.self_attention


def test_without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with pytest.raises(NotAvailable, match=r"pip install 'megatron-core>=0\.16'"):
        importlib.import_module(ADAPTER)


@needs_megatron
def test_older_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_host.adapter()
    monkeypatch.setattr(importlib.import_module("megatron.core"), "__version__", "0.12.3")
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with pytest.raises(NotAvailable, match=r"needs Megatron-Core 0\.16 or newer .*; this is 0\.12\.3"):
        importlib.import_module(ADAPTER)


@needs_megatron
@pytest.mark.mpi
def test_program_of_the_documentation(tmp_path: Path) -> None:
    """The program of docs/megatron.md with the recipe, after stand-ins for what Megatron does on CUDA devices."""
    blocks = [block.split("```")[0] for block in (ROOT / "docs" / "megatron.md").read_text().split("```python\n")[1:]]
    code = next(block for block in blocks if "adapter.close()" in block)
    with_recipe = next(block for block in blocks if "recipe=" in block)
    code = code.replace("adapter.close()", f"{with_recipe}adapter.close()")
    program = tmp_path / "program.py"
    program.write_text(f"from adapters import megatron_host\n\nmegatron_host.stand_in()\n{code}")
    status, output = run_command([*launch_command("torchrun", 2), str(program)], timeout=120)
    assert status == 0, output
    assert "bytes sent" in output
    assert "ffn_hidden=256) loss" in output
