"""fp4comm as the expert parallelism of Hugging Face transformers, against models without any."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import transformers_models as models
from adapters.transformers_models import FAMILIES, FineTuning
from launch import ROOT, launch_command, run_command, run_ranks

from fp4comm import InvalidArgument, NotAvailable

HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAVE_TRANSFORMERS, reason="needs transformers (pip install transformers)")
ADAPTER = "fp4comm.adapters.transformers"

# Sums of a few hundred float32 products in another order, through two layers: some units of 6e-8. The parameters after
# three steps of AdamW add what it makes of that, at most the gradients' error over its eps, times the learning rate.
LOSSES, GRADIENTS, PARAMETERS = 1e-6, 5e-6, 5e-6


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpus", marks=pytest.mark.gpu)])
def two(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `on_two_ranks` found."""
    if request.param == "gpus" and importlib.import_module("torch").cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_gpus = request.param == "gpus"
    results: dict[str, Any] = run_ranks(models.on_two_ranks, 2, launcher="torchrun", timeout=200, on_gpus=on_gpus)[0]
    return results


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    """What `on_four_ranks` found."""
    results: dict[str, Any] = run_ranks(models.on_four_ranks, 4, launcher="torchrun", timeout=200)[0]
    return results


def check(differences: dict[str, float]) -> None:
    assert differences["losses"] < LOSSES
    assert differences["gradients"] < GRADIENTS
    assert differences.get("parameters", 0) < PARAMETERS


@needs_transformers
@pytest.mark.mpi
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_one_process(two: dict[str, Any], family: str) -> None:
    check(two[family])


@needs_transformers
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["fixed", "eager", "tensor parallel", "sharded"])
def test_other_ways_to_the_same(two: dict[str, Any], case: str) -> None:
    check(two[case])


@needs_transformers
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["groups of two", "tensor parallel", "ranks without rows"])
def test_four_ranks(four: dict[str, Any], case: str) -> None:
    check(four[case])


@needs_transformers
@pytest.mark.mpi
def test_bf16_wire_in_a_bf16_model(two: dict[str, Any]) -> None:
    """Only the weighted sum differs, which transformers' own rounds to BF16 (2**-9) at each addend, fp4comm once."""
    assert two["bf16"] < 2**-7


@needs_transformers
@pytest.mark.mpi
def test_fine_tuning_in_fp4(two: dict[str, Any]) -> None:
    stock, fp4 = two["fine-tuned all_to_all"], two["fine-tuned fp4comm"]
    assert isinstance(stock, FineTuning)
    assert stock.losses[-1] < 0.2 * stock.losses[0]
    assert fp4.distance(stock) < 0.005
    assert not stock.sent  # fp4comm had no part in it


@needs_transformers
@pytest.mark.mpi
def test_bytes_on_the_wire(two: dict[str, Any]) -> None:
    fp4: FineTuning = two["fine-tuned fp4comm"]
    assert fp4.share("dispatch") < 0.12  # a row per rank instead of four per rank, in 4.25 bits and its routing
    assert fp4.share() < 0.28


@needs_transformers
@pytest.mark.mpi
def test_table_of_the_documentation(two: dict[str, Any]) -> None:
    """Of one family, for a short task of real text; the distances from stock's curve are in percent."""
    rows = [row.strip("|").split("|") for row in two["table"].splitlines()[2:]]
    first, last, distances = ({row[2].strip(): row[column].strip() for row in rows} for column in (3, 4, 5))
    assert list(first) == ["all_to_all", "its twin", "fp4comm", "fp4comm fp8", "fp4comm mxfp4"]
    assert all(float(last[name]) < float(first[name]) for name in first)
    chance, fp4, fp8, mxfp4 = (float(distance.removesuffix("%")) for name, distance in distances.items() if distance)
    assert chance < 0.01
    assert chance <= fp8 < fp4 < 0.2
    assert fp8 < mxfp4 < 0.3


@needs_transformers
def test_texts() -> None:
    """Source code and English, which says "the" three times as often; the same sequences each time."""
    torch: Any = importlib.import_module("torch")
    code, prose = models.source_code(), models.prose()
    assert prose.count(b" the ") / len(prose) > 2 * code.count(b" the ") / len(code)
    one, again, other = (torch.stack(models.windows(prose, 2, 64, seed)) for seed in (0, 0, 1))
    assert one.shape == (2, models.NUM_SEQUENCES, 64)
    assert all(bytes(sequence.tolist()) in prose for sequence in one.flatten(0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@needs_transformers
@pytest.mark.mpi
def test_layers_share_a_communicator(two: dict[str, Any]) -> None:
    assert two["fine-tuned fp4comm"].num_communicators == 1


@needs_transformers
@pytest.mark.mpi
@pytest.mark.parametrize(
    "case, message",
    [
        ("hidden", "InvalidArgument: hidden_size is 80; accepted: a multiple of 32"),
        ("odd, sharded by hand", "num_experts is 7; accepted: a positive multiple of the number of ranks, 2"),
        ("odd", "Cannot evenly shard 7 experts across 2"),  # transformers sees that first
        ("twice", "InvalidArgument: model is sharded already"),
        ("eager", "InvalidArgument: experts_implementation is 'eager', with num_max_tokens_per_rank; accepted: "),
    ],
)
def test_mistakes_at_loading(two: dict[str, Any], case: str, message: str) -> None:
    assert message in two["errors"][case]


@needs_transformers
def test_mistakes_at_registering() -> None:
    adapter: Any = importlib.import_module(ADAPTER)
    with pytest.raises(InvalidArgument, match=r"precision is 'fp5'; accepted: .*'fp4'"):
        adapter.register(precision="fp5")
    with pytest.raises(InvalidArgument, match="option is 'hidden'; accepted: 'precision', 'check_inputs', "):
        adapter.register(hidden=64)
    with pytest.raises(InvalidArgument, match="name is 'all_to_all'; accepted: a name that transformers doesn't use"):
        adapter.register("all_to_all")


@needs_transformers
def test_mistakes_with_shard_experts() -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    adapter: Any = importlib.import_module(ADAPTER)
    with pytest.raises(InvalidArgument, match="model is a Linear without experts modules"):
        adapter.shard_experts(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match=r"num_max_tokens_per_rank .* transformers 5\.23 or newer"):
        adapter.shard_experts(torch.nn.Linear(2, 2), num_max_tokens_per_rank=8)
    model = transformers.AutoModelForCausalLM.from_config(models.tiny_config("mixtral"))
    model.set_experts_implementation("fp4comm")
    for _ in range(2):  # not sharded, and sharded
        with pytest.raises(
            InvalidArgument, match=r"experts_implementation is 'fp4comm'; accepted: .*shard_experts\(model, group\)"
        ):
            model(input_ids=models.texts(1, 0))
        if not hasattr(model, "sharded"):
            adapter.shard_experts(model)
            model.sharded = True


@needs_transformers
def test_sharded_models_are_independent() -> None:
    """Copies, models of the same configuration object, and kernels that are chosen later."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    adapter: Any = importlib.import_module(ADAPTER)
    config, ids = models.tiny_config("qwen3_moe"), models.texts(1, 0)
    first, second = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    with torch.no_grad():
        stock = [model(input_ids=ids).logits for model in (first, second)]
        adapter.shard_experts(first, precision="fp32")
        assert torch.equal(second(input_ids=ids).logits, stock[1])
        adapter.shard_experts(second, precision="fp32")
        for kernel in ("grouped_mm", "batched_mm", "eager"):
            config._experts_implementation = kernel
            for model, want in zip((first, second), stock, strict=True):
                assert torch.allclose(model(input_ids=ids).logits, want, atol=1e-5)
        copied = copy.deepcopy(first)
        for name, parameter in copied.named_parameters():
            if "experts" in name:
                parameter.zero_()
        assert torch.allclose(first(input_ids=ids).logits, stock[0], atol=1e-5)
        assert not torch.allclose(copied(input_ids=ids).logits, stock[0], atol=1e-2)
    with pytest.raises(TypeError, match=r"spread over a group can't be pickled; save its state_dict\(\)"):
        pickle.dumps(first)
    adapter.close()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "transformers.integrations.moe"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with pytest.raises(NotAvailable, match=r"pip install 'transformers>=5\.23'"):
        importlib.import_module(ADAPTER)


@needs_transformers
def test_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter: Any = importlib.import_module(ADAPTER)
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(NotAvailable, match=r"has no ep_implementation; needed: 5\.23 or newer"):
        adapter.register()


@needs_transformers
@pytest.mark.mpi
def test_program_of_the_documentation(tmp_path: Path) -> None:
    """The first Python block of docs/transformers.md, with a tiny model."""
    transformers: Any = importlib.import_module("transformers")
    code = (ROOT / "docs" / "transformers.md").read_text().split("```python\n")[1].split("```")[0]
    program, folder = tmp_path / "program.py", tmp_path / "model"
    program.write_text(code)
    transformers.AutoModelForCausalLM.from_config(models.tiny_config("qwen3_moe")).save_pretrained(folder)
    status, output = run_command([*launch_command("torchrun", 2), str(program), str(folder)], timeout=120)
    assert status == 0, output
    assert "bytes sent" in output
