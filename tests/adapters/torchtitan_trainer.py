"""A few steps of torchtitan's own Trainer on two ranks without a GPU, with its dispatcher and with fp4comm's.

    torchrun --nproc-per-node 2 tests/adapters/torchtitan_trainer.py

prints a table in Markdown: losses, and bytes sent between the ranks. `--variants`, `--steps`, `--backend` and
`--compile` choose; all other arguments go to torchtitan's command line. The model is torchtitan's `qwen3_moe_debug`, of
316 million parameters; each training takes about two minutes on two cores.

Needs torchtitan 0.3 with all that it requires (datasets, tensorboard, torchdata, torch_checkpointing, ...) and triton,
which it imports also where there is no GPU.

torchtitan is made for accelerators; this stands in for one here:

- `use_cpu`: torch doesn't name the processor as an accelerator, and `torch.cpu` lacks functions that `torch.cuda` has.
- `DenseAttention`: FlexAttention has no backward on processors.
- `LoopedExperts`, and parameters in float32: products of BF16 take processors up to a hundred times as long.
- `adapt`: gloo can't scale while it sums, as FSDP asks for.
- a tokenizer and a text are made here (`assets`): nothing is fetched.
- each training has processes and a group of its own: torchtitan keeps its meshes as long as a process lives.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = "fp4comm.adapters.torchtitan"
TOKENS, EXCHANGES = f"{ADAPTER}.token_dispatcher", f"{ADAPTER}.save_exchanges"
VARIANTS = {
    "torchtitan": [],
    "its twin": [],
    "fp4comm fp32": [TOKENS + '={"precision": "fp32"}'],
    "fp4comm": [TOKENS],
    "fp4comm, saved": [TOKENS, EXCHANGES],
    "fp4comm mxfp4, saved": [TOKENS + '={"precision": "mxfp4"}', EXCHANGES],
}
NUDGE = {"its twin": 1e-6}  # all weights of the twin are larger by that part: what chance does
VOCABULARY = 1024


def use_cpu() -> None:
    """Lets torchtitan take the processor for its device; to be called before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # it asks torch, which names accelerators only
    nothing: Any = lambda *_, **__: None  # noqa: E731  a def would need a name and a docstring for nothing
    for name, function in {  # what `torch.cuda` has and `torch.cpu` hasn't; torchtitan logs what they return
        "empty_cache": nothing,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": nothing,
    }.items():
        setattr(torch.cpu, name, function)
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    utils.set_pg_timeouts = nothing  # shorter timeouts after the first step, by a function that torch 2.13 hasn't


use_cpu()
config: Any = importlib.import_module("torchtitan.config")
attention: Any = importlib.import_module("torchtitan.models.common.attention")
moe: Any = importlib.import_module("torchtitan.models.common.moe")


class DenseAttention(attention.FlexAttention):  # type: ignore[misc]
    """FlexAttention, which has no backward on processors, with the whole matrix of scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(attention.FlexAttention.Config):  # type: ignore[misc]
        pass

    # torchtitan finds the layouts of q, k and v by these names
    def forward(self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, **options: Any) -> Any:
        num_sequences, length = q_BLNH.shape[:2]
        allowed = create_mask(attention_masks.mask_mod, num_sequences, 1, length, length, device="cpu")
        q, k, v = (heads.transpose(1, 2) for heads in (q_BLNH, k_BLNH, v_BLNH))
        options = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed, **options).transpose(1, 2)


@config.override(target=attention.FlexAttention.Config)  # type: ignore[untyped-decorator]
def dense_attention(original: Any) -> Any:
    """The override that puts DenseAttention in place."""
    return config.derive(original, DenseAttention.Config)


class LoopedExperts(moe.GroupedExperts):  # type: ignore[misc]
    """Experts one after the other in float32: grouped products of BF16 take processors twenty times as long."""

    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):  # type: ignore[misc]
        pass

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        counts = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
        rows = A.float().split([*counts, A.shape[0] - sum(counts)])
        products = [mine @ weights for mine, weights in zip(rows, B_t.float(), strict=False)]
        return torch.cat([*products, rows[-1].new_zeros(rows[-1].shape[0], B_t.shape[2])]).to(A.dtype)


@config.override(target=moe.GroupedExperts.Config)  # type: ignore[untyped-decorator]
def looped_experts(original: Any) -> Any:
    """The override that puts LoopedExperts in place."""
    return config.derive(original, LoopedExperts.Config)


class CountedExchanges(TorchDispatchMode):
    """Counts the bytes of rows that torchtitan's own all-to-alls send to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops._c10d_functional.all_to_all_single.default and args[0].is_floating_point():
            rows, _, splits, _ = args
            num_values = rows.shape[1] * (sum(splits) - splits[dist.get_rank()])
            self.sent["all"] += num_values * rows.element_size()
            self.sent["as BF16"] += num_values * 2
        return function(*args, **(kwargs or {}))


@dataclass
class Training:
    """Losses by step, and bytes that all ranks sent, by leg."""

    losses: list[float]
    sent: Counter[str]

    def distance(self, other: Training) -> float:
        """The mean distance of the losses, as a part of their mean."""
        pairs = list(zip(self.losses, other.losses, strict=True))
        return sum(abs(mine - its) for mine, its in pairs) / sum(its for _, its in pairs)


@contextmanager
def assets() -> Iterator[list[str]]:
    """Arguments for a tokenizer and a text, made of the licence of this project: nothing is fetched."""
    from tokenizers import ByteLevelBPETokenizer

    paragraphs = (ROOT / "LICENSE").read_text().split("\n\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_HOME"] = str(folder / "cache")  # of the package datasets
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(paragraphs, VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        (folder / "text").mkdir()
        (folder / "text" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in paragraphs))
        yield [
            f"--hf_assets_path={folder}",
            f"--dataloader.dataset_path={folder / 'text'}",
            f"--dump_folder={folder / 'output'}",
        ]


def train(variant: str, arguments: list[str]) -> Training:
    """Trains the model once. Collective; to be called in a process of its own, since torchtitan keeps its meshes."""
    join_ranks(variant)
    importlib.import_module("torchtitan.tools.logging").init_logger()
    stand_ins = [f"{__name__}.dense_attention", f"{__name__}.looped_experts"]
    with assets() as paths:
        chosen = [*arguments, *paths, "--override.imports", *stand_ins, *VARIANTS[variant]]
        trainer = config.ConfigManager().parse_args(chosen).build()
        adapt(trainer, NUDGE.get(variant, 0.0))
        losses: list[float] = []
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        counted = CountedExchanges()
        is_counted = not VARIANTS[variant] and "--compile.enable" not in arguments  # a compiler doesn't like modes
        with counted if is_counted else nullcontext():
            trainer.train()
        trainer.close()
    training = Training(losses, sum_over_ranks(sent_by_fp4comm() + counted.sent))
    dist.destroy_process_group()
    return training


def join_ranks(name: str) -> None:
    """Makes the process group, with keys of its own in the store of torchrun, where those of earlier ones remain."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)


def adapt(trainer: Any, nudge: float) -> None:
    """Makes a trainer's model run with gloo, and its weights larger by a part."""
    for model in trainer.model_parts:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo can't scale while it sums
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + nudge)


def sent_by_fp4comm() -> Counter[str]:
    """Bytes by leg, of the communicators that the adapter made for this training."""
    adapter: Any = importlib.import_module(ADAPTER)
    sent: Counter[str] = sum((comm.traffic for comm in adapter.communicators()), Counter())
    adapter.close()
    sent["all"] = sum(sent.values())
    return sent


def sum_over_ranks(mine: Counter[str]) -> Counter[str]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return sum(everyones, Counter())


def table(trainings: dict[str, Training]) -> str:
    """A column for each training; distances and parts are of the first one."""
    first = next(iter(trainings.values()))
    rows = [["step", *trainings], ["---", *("---:" for _ in trainings)]]
    for step, losses in enumerate(zip(*(training.losses for training in trainings.values()), strict=True), 1):
        rows += [[str(step), *(f"{loss:.4f}" for loss in losses)]]
    rows += [["curve from the first", *(f"{training.distance(first):.3%}" for training in trainings.values())]]
    for leg in ("dispatch", "combine", "grad_combine", "grad_dispatch", "all"):
        sent = (training.sent[leg] for training in trainings.values())
        rows += [[f"{leg}, MB", *(f"{num_bytes / 1e6:.2f}" if num_bytes else "" for num_bytes in sent)]]
    if first.sent["as BF16"]:
        parts = (training.sent["all"] / first.sent["as BF16"] for training in trainings.values())
        rows += [["part of BF16 rows", *(f"{part:.3f}" for part in parts)]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--backend", default="partial_dtensor", help="of torchtitan for SPMD (default: %(default)s)")
    parser.add_argument("--compile", help="a backend of torch.compile")
    options, others = parser.parse_known_args()
    arguments = ["--module=qwen3", "--config=qwen3_moe_debug", "--parallelism.expert_parallel_degree=2"]
    # products of BF16 take processors up to a hundred times as long
    arguments += ["--training.mixed_precision_param=float32"]
    arguments += [f"--parallelism.spmd_backend={options.backend}", "--training.disable_cuda_graphs", "--debug.seed=1"]
    arguments += [f"--training.steps={options.steps}", "--training.local_batch_size=2", "--training.seq_len=256"]
    if options.compile:
        arguments += ["--compile.enable", f"--compile.backend={options.compile}"]
    trainings = {}
    for variant in options.variants:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            trainings[variant] = process.submit(train, variant, [*arguments, *others]).result()
    if os.environ["RANK"] == "0":
        print(table(trainings))


if __name__ == "__main__":
    main()
