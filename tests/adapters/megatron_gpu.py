"""What two ranks with a GPU each do with Megatron-Core: whole models under its data parallelism and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from adapters.megatron_host import adapter, configure, gpt_model, host, start
from adapters.megatron_models import loss_of, own_share, texts
from torch import nn

NUM_STEPS = 8
# Widths are such that FP8 GEMMs of Hopper take them; whatever Megatron fuses with other packages is off in `configure`.
SETTINGS: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "moe_ffn_hidden_size": 512,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "init_method_std": 0.05,
    "use_cpu_initialization": False,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
# Distances of loss curves as parts of the mean loss, at most. Estimates, as are the 0.7 and 0.1 in `compare`: they held
# on two H200, where the distances themselves were not recorded.
MOST = {"bf16": 0.02, "fp4": 0.05, "recipe bf16": 0.02, "recipe fp8_flow": 0.03, "recipe fp4": 0.05}


def options_of(name: str) -> dict[str, Any] | None:
    if name == "stock":
        return None
    kind, _, recipe = name.partition(" ")
    return {"recipe": recipe} if kind == "recipe" else {"precision": name}


def training(options: dict[str, Any] | None) -> tuple[list[float], list[float]]:
    """The mean losses of a few steps and norms of their gradients, for the stock layer if options are None."""
    start(dist.get_world_size())
    host("tensor_parallel.random").model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = configure(**SETTINGS)
    module = host("transformer.module").Float16Module(config, gpt_model(config, options).cuda())
    distributed, optimizers = host("distributed"), host("optimizer")
    grouped = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = distributed.DistributedDataParallel(config, grouped, module)
    model.broadcast_params()
    how = optimizers.OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
    )
    optimizer = optimizers.get_megatron_optimizer(how, [model])
    losses, norms = [], []
    for seed in range(NUM_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, texts(32, seed)[own_share()].cuda())
        loss.backward()
        model.finish_grad_sync()
        is_done, norm, _ = optimizer.step()
        assert is_done
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        norms.append(float(norm))
    check_operands(model)
    return losses, norms


def check_operands(model: Any) -> None:
    """After a step experts multiply by their weights as they are now, where the optimizer wrote unnoticed by torch."""
    experts = [module for module in model.modules() if hasattr(module, "forget_operands")]
    ids = texts(8, 100)[own_share()].cuda()
    with torch.no_grad():
        found = loss_of(model, ids) if experts else None
        for module in experts:
            module.forget_operands()
        assert found is None or torch.allclose(found, loss_of(model, ids), rtol=1e-4)


def compare(group: Any) -> None:
    """Stock "alltoall", fp4comm's dispatcher and fp4comm's experts learn alike; norms count experts of all ranks."""
    stock, stock_norms = training(None)
    assert stock[-1] < 0.7 * stock[0], stock
    for name, most in MOST.items():
        losses, norms = training(options_of(name))
        text = f"{name}: {losses}, gradients {norms}; stock: {stock}, gradients {stock_norms}"
        assert abs(losses[0] / stock[0] - 1) < most, text
        assert abs(norms[0] / stock_norms[0] - 1) < 0.1, text
        distance = sum(abs(one - two) for one, two in zip(losses, stock, strict=True)) / sum(stock)
        assert distance < most, text
    adapter().close()
