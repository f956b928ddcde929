"""fp4comm as the token dispatcher of torchtitan's MoE layers, against its own dispatcher and one process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import torchtitan_models as models
from adapters.torchtitan_models import ADAPTER
from launch import ROOT, launch_command, run_command, run_ranks

from fp4comm import InvalidArgument, NotAvailable

HAVE_TORCHTITAN = all(importlib.util.find_spec(name) for name in ("torchtitan", "spmd_types", "triton"))
needs_torchtitan = pytest.mark.skipif(not HAVE_TORCHTITAN, reason="needs torchtitan (pip install torchtitan)")
EXACT = 1e-6  # sums of float32 products in another order


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `on_ranks` found, on rank 0."""
    results: dict[str, Any] = run_ranks(models.on_ranks, 2, launcher="torchrun", timeout=150)[0]
    return results


@needs_torchtitan
@pytest.mark.mpi
@pytest.mark.parametrize("case", ["stock", "one rank", "fixed", "padded", "compiled", "typechecked"])
def test_exact_wire_is_torchtitans_own_result(found: dict[str, Any], case: str) -> None:
    """Outputs and all gradients; with fixed capacity, with padding for FP8 GEMMs, and compiled as one graph."""
    assert found[case] < EXACT


@needs_torchtitan
@pytest.mark.mpi
def test_selective_checkpointing(found: dict[str, Any]) -> None:
    assert found["checkpointed"] < EXACT
    assert found["saved"] < EXACT
    assert (found["dispatches checkpointed"], found["dispatches saved"]) == (2, 1)


@needs_torchtitan
@pytest.mark.mpi
def test_fp4(found: dict[str, Any]) -> None:
    """A row of MXFP4 is 17 to 18 dB from its numbers; results are a few of them."""
    assert 0.01 < found["fp4"]["y"] < 0.2
    assert found["fp4"]["x"] < 0.2
    assert found["num_communicators"] == 1


@needs_torchtitan
@pytest.mark.mpi
def test_bytes_on_the_wire(found: dict[str, Any]) -> None:
    assert found["share of dispatch"] < 0.28


@needs_torchtitan
@pytest.mark.mpi
@pytest.mark.parametrize(
    "case, message",
    [
        ("precision", "precision is 'fp5'; accepted: "),
        ("option", "option is 'hidden'; accepted: 'precision', 'check_inputs', "),
        ("tokens", "x is 96 rows; accepted: at most num_max_tokens_per_rank=8"),
        ("hidden", "hidden is 80; accepted: a positive multiple of 32"),
        ("type", "seed is '1'; accepted: "),
        ("list", "seed is [1]; accepted: a single value"),
    ],
)
def test_mistakes(found: dict[str, Any], case: str, message: str) -> None:
    assert message in found["errors"][case]


@needs_torchtitan
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, by what torchtitan calls
def test_other_dispatchers_are_refused() -> None:
    """Not left as they are, with a warning, as torchtitan does with overrides that fit nothing."""
    config = models.layer_config()
    dispatchers: Any = importlib.import_module("torchtitan.models.common.token_dispatcher")
    other = dispatchers.MinimalAsyncEPTokenDispatcher.Config(num_experts=8, top_k=2)
    config.routed_experts.token_dispatcher = other
    with pytest.raises(InvalidArgument, match=r"token dispatcher is MinimalAsync\S+ accepted: AllToAll"):
        models.apply(config, precision="fp4")


@needs_torchtitan
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
def test_nothing_changes_without_expert_parallelism() -> None:
    x = models.tokens(0)
    stock = models.step(models.layer(models.layer_config()), x)
    assert models.distance(models.step(models.layer(models.layer_config(precision="fp4")), x), stock) < EXACT


def test_without_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchtitan", "torchtitan.config"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with pytest.raises(NotAvailable, match=r"pip install 'torchtitan>=0\.3'"):
        importlib.import_module(ADAPTER)


@needs_torchtitan
@pytest.mark.mpi
def test_program_of_the_documentation(tmp_path: Path) -> None:
    """The first Python block of docs/torchtitan.md."""
    code = (ROOT / "docs" / "torchtitan.md").read_text().split("```python\n")[1].split("```")[0]
    program = tmp_path / "program.py"
    program.write_text(code)
    status, output = run_command([*launch_command("torchrun", 2), str(program)], timeout=120)
    assert status == 0, output
    assert "AllToAllTokenDispatcher.Config -> Dispatcher.Config with precision='mxfp4'" in output
    assert "dispatch=mxfp4" in output
    assert "bytes sent" in output
