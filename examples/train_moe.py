"""Trains a byte-level Mixture-of-Experts language model, once per wire format, and compares the validation losses.

    mpirun -n 2 python examples/train_moe.py
    torchrun --nproc-per-node 2 examples/train_moe.py
    python examples/train_moe.py

The experts are spread over the ranks; everything else is replicated and trained data-parallel over the same ranks.
All runs of a seed start from the same weights and see the same bytes in the same order. See docs/training.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import shlex
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_data import Corpus
from moe_model import ByteModel, ModelSize, RoutedTokens
from moe_report import LEGS, Report, Run, plot, results, save, update_document
from torch import Tensor

import fp4comm
from fp4comm import EPCommunicator, InvalidArgument, NotAvailable, Precision, world_group

TWIN = "twin"  # the first wire once more, from weights that differ by a millionth: what chaos alone does to a run
_EVALUATION_BATCH = 32  # windows per rank at once
_CURVE_WINDOWS = 64  # windows behind a point of the validation curve; the final loss takes --validation-windows
_CURVE_POINTS = 10
_TRACE_TOKENS = 2048


@dataclass(frozen=True)
class Settings:
    """What the command line says; see `parse` for the meaning of each."""

    wires: list[str]
    seeds: int
    steps: int
    batch: int
    length: int
    layers: int
    hidden: int
    heads: int
    experts: int
    topk: int
    expert_hidden: int
    learning_rate: float
    balance: float
    validation_windows: int
    threads: int
    out: str
    save_trace: str | None

    @property
    def size(self) -> ModelSize:
        return ModelSize(self.layers, self.hidden, self.heads, self.experts, self.topk, self.expert_hidden)

    def precision(self, wire: str) -> str:
        return self.wires[0] if wire == TWIN else wire


def parse(arguments: list[str]) -> Settings:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level MoE language model once per wire format and compare the validation losses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    wires = ["bf16", TWIN, "fp8", "fp4", "mxfp4"]
    parser.add_argument(
        "--wires",
        nargs="+",
        default=wires,
        help=f"recipes of fp4comm.Precision to compare with the first; {TWIN!r} is the first once more from weights "
        "that differ by a millionth: the noise to judge the others by",
    )
    parser.add_argument("--seeds", type=positive_int, default=3, help="how many seeds (weights and order of the data)")
    parser.add_argument("--steps", type=positive_int, default=400, help="optimizer steps of a run")
    parser.add_argument("--batch", type=positive_int, default=8, help="windows per step, over all ranks")
    parser.add_argument("--length", type=positive_int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=positive_int, default=2, help="layers, each with attention and a MoE")
    parser.add_argument("--hidden", type=positive_int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--heads", type=positive_int, default=4, help="attention heads")
    parser.add_argument("--experts", type=positive_int, default=16, help="experts per layer, a multiple of the ranks")
    parser.add_argument("--topk", type=positive_int, default=4, help="experts per token")
    parser.add_argument("--expert-hidden", type=positive_int, default=32, help="inner width of an expert")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3, help="peak; warm-up, then linear to zero")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load balancing loss")
    parser.add_argument("--validation-windows", type=positive_int, default=512, help="windows of the final validation")
    parser.add_argument("--threads", type=int, default=0, help="threads per rank; 0 = cores / ranks")
    parser.add_argument("--out", default="training", help="path of the results without suffix: .json and .png follow")
    parser.add_argument(
        "--save-trace", metavar="FILE", help="save routing and activations of the last layer (first run) as .npz"
    )
    return Settings(**vars(parser.parse_args(arguments)))


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


class Ranks:
    """The processes that were started together, and the one reduction that data parallelism needs."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._is_mpi = hasattr(group, "Allreduce")
        if group is None:
            self.rank, self.size = 0, 1
        elif self._is_mpi:
            self.rank, self.size = group.Get_rank(), group.Get_size()
        else:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def transport(self) -> str:
        """That of CPU tensors, also where there are GPUs."""
        return "loopback" if self.group is None else "mpi" if self._is_mpi else "process_group"

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks, the same bits on all of them."""
        if self.size == 1:
            return values
        total = values.clone()
        if self._is_mpi:
            self.group.Allreduce(values.numpy(), total.numpy())
        else:
            dist.all_reduce(total, group=self.group)
        return total

    def share(self, batch: Tensor) -> Tensor:
        """The rows of a batch that are this rank's."""
        return batch[self.rank :: self.size]

    def print(self, text: str) -> None:
        """Prints once, not once per rank."""
        if self.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


class Trainer:
    """One run: a model, its optimizer and its order of the data, over one wire."""

    def __init__(self, settings: Settings, wire: str, seed: int, corpus: Corpus, ranks: Ranks) -> None:
        self.settings, self.wire, self.seed, self.corpus, self.ranks = settings, wire, seed, corpus, ranks
        self.comm = make_communicator(settings, wire, ranks, seed)
        self.model = ByteModel(settings.size, self.comm, seed)
        if wire == TWIN:
            perturb(self.model, seed)
        self.order = torch.Generator().manual_seed(seed)
        # The experts' gradients are sums over all ranks' tokens already: they come with the rows.
        self.replicated = [weight for name, weight in self.model.named_parameters() if ".experts." not in name]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def train(self, title: str) -> Run:
        """Runs all steps and evaluates."""
        steps, tokens = self.settings.steps, self.settings.batch * self.settings.length
        run = Run(self.wire, self.seed)
        seconds = 0.0
        for step in range(1, steps + 1):
            start = time.perf_counter()
            loss = self.step(step)
            seconds += time.perf_counter() - start
            run.training_loss.append(loss)
            if step % max(1, steps // _CURVE_POINTS) == 0 and step < steps:
                run.validation_loss.append((step, self.evaluate(_CURVE_WINDOWS)))
                self.report(title, step, loss, run.validation_loss[-1][1], step * tokens / seconds)
        sent = self.ranks.sum(torch.tensor([self.comm.traffic[leg] for leg in LEGS], dtype=torch.float64))
        run.bytes_per_token = dict(zip(LEGS, (sent / (steps * tokens)).tolist(), strict=True))
        run.seconds, run.tokens_per_second = seconds, steps * tokens / seconds
        run.final_loss = self.evaluate(self.settings.validation_windows)
        run.validation_loss.append((steps, run.final_loss))
        load = self.ranks.sum(self.load)
        idlest, busiest = (load / load.mean(dim=1, keepdim=True)).aminmax(dim=1)
        run.load = list(zip(idlest.tolist(), busiest.tolist(), strict=True))
        self.report(title, steps, loss, run.final_loss, run.tokens_per_second)
        return run

    def step(self, step: int) -> float:
        """One optimizer step; returns the training loss over all ranks' tokens."""
        batch = self.corpus.batch(self.settings.batch, self.settings.length, self.order)
        inputs, targets = (self.ranks.share(part) for part in batch)
        loss = cross_entropy(self.model, inputs, targets)
        balance = torch.stack([layer.balance for layer in self.model.moe_layers]).sum()
        # The loss of the step is the mean over all tokens: each rank gives its part, and the parts are summed.
        ((loss + self.settings.balance * balance) / self.ranks.size).backward()
        mean_loss = self.sum_gradients(loss.detach() / self.ranks.size)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * schedule(step, self.settings.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_loss

    def sum_gradients(self, loss: Tensor) -> float:
        """Sums the gradients of the replicated weights, and the loss, over the ranks in one message."""
        gradients = [weight.grad for weight in self.replicated]
        total = self.ranks.sum(torch.cat([*(gradient.flatten() for gradient in gradients), loss[None]]))
        *parts, loss = total.split([*(gradient.numel() for gradient in gradients), 1])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return loss.item()

    @torch.no_grad()
    def evaluate(self, num_windows: int) -> float:
        """Mean loss on `num_windows` fixed windows of the validation text, over the wire that the run trains with."""
        traffic = Counter(self.comm.traffic)
        num_windows = -(-num_windows // self.ranks.size) * self.ranks.size  # as many on every rank
        batch = self.corpus.validation_batch(num_windows, self.settings.length)
        inputs, targets = (self.ranks.share(part).split(_EVALUATION_BATCH) for part in batch)
        loss = torch.zeros(1, dtype=torch.float64)
        self.load = torch.zeros(self.settings.layers, self.settings.experts)
        for part, target in zip(inputs, targets, strict=True):
            loss += cross_entropy(self.model, part, target, "sum")
            self.load += torch.stack([layer.load for layer in self.model.moe_layers])
        self.comm.traffic.clear()
        self.comm.traffic.update(traffic)
        return self.ranks.sum(loss).item() / (num_windows * self.settings.length)

    def report(self, title: str, step: int, loss: float, validation: float, speed: float) -> None:
        tokens = step * self.settings.batch * self.settings.length / self.ranks.size
        sent = sum(self.comm.traffic.values()) / tokens
        self.ranks.print(
            f"{title}  step {step:4}/{self.settings.steps}  loss {loss:.3f}  validation {validation:.3f}  "
            f"{speed:7,.0f} tokens/s  {sent:5,.0f} wire bytes/token"
        )


def make_communicator(settings: Settings, wire: str, ranks: Ranks, seed: int) -> EPCommunicator:
    return EPCommunicator(
        ranks.group,
        num_experts=settings.experts,
        hidden=settings.hidden,
        precision=settings.precision(wire),
        transport=ranks.transport,
        seed=seed,
    )


def cross_entropy(model: ByteModel, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def schedule(step: int, num_steps: int) -> float:
    """Factor of the learning rate: a tenth of the steps up, then down to zero, which calms the end of the run."""
    warm_up = max(1, num_steps // 10)
    return min(step / warm_up, (num_steps - step + 1) / (num_steps - warm_up + 1))


@torch.no_grad()
def perturb(model: ByteModel, seed: int) -> None:
    """Changes each weight by about a millionth of itself."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator))


def save_trace(path: Path, routed: RoutedTokens, num_experts: int) -> None:
    """Saves what a layer sent to its experts, BF16 as its bits."""
    x_bits = routed.x[:_TRACE_TOKENS].bfloat16().view(torch.uint16).numpy()
    np.savez_compressed(
        path,
        x_bits=x_bits,
        topk_idx=routed.topk_idx[:_TRACE_TOKENS].to(torch.int32).numpy(),
        topk_weights=routed.topk_weights[:_TRACE_TOKENS].numpy(),
        num_experts=num_experts,
    )


def prepare(settings: Settings, ranks: Ranks) -> Corpus:
    """Finds what is wrong before anything takes long.

    Raises:
        ValueError: sizes don't fit together, or a wire is unknown.
        OSError: results can't be written, or there is no text.
    """
    if settings.batch % ranks.size:
        raise InvalidArgument(f"--batch is {settings.batch}; accepted: a multiple of the {ranks.size} ranks")
    if settings.hidden % (2 * settings.heads):
        raise InvalidArgument(
            f"--heads is {settings.heads}; accepted: a number whose double divides --hidden ({settings.hidden})"
        )
    if settings.topk > settings.experts:
        raise InvalidArgument(f"--topk is {settings.topk}; accepted: at most the {settings.experts} experts")
    if settings.wires[0] == TWIN:
        raise InvalidArgument(f"--wires begins with {TWIN!r}; accepted: it after the wire that it is the twin of")
    if len(set(settings.wires)) < len(settings.wires):
        raise InvalidArgument(f"--wires is {' '.join(settings.wires)}; accepted: each wire once")
    for wire in settings.wires:
        Precision.of(settings.precision(wire))
    make_communicator(settings, settings.wires[0], ranks, 0).close()
    for path in filter(None, (settings.out, settings.save_trace)):
        folder = Path(path).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise OSError(f"can't write {path}: {folder} is not a folder that this user can write to")
    return Corpus.of_standard_library()


def compare(settings: Settings, corpus: Corpus, ranks: Ranks) -> list[Run]:
    """Trains with every wire and seed; the wires of a seed follow each other, so all see the same machine."""
    runs = []
    names = [(seed, wire) for seed in range(settings.seeds) for wire in settings.wires]
    for number, (seed, wire) in enumerate(names, start=1):
        trainer = Trainer(settings, wire, seed, corpus, ranks)
        runs.append(trainer.train(f"[{number}/{len(names)}] {wire:5} seed {seed}"))
        if number == 1 and settings.save_trace and ranks.rank == 0:
            save_trace(Path(settings.save_trace), trainer.model.moe_layers[-1].routed, settings.experts)
        trainer.comm.close()
    return runs


def command_line(transport: str, num_ranks: int) -> str:
    """The command that was given, as it reads on any machine."""
    launcher = {
        "mpi": f"mpirun -n {num_ranks} python",
        "process_group": f"torchrun --nproc-per-node {num_ranks}",
    }.get(transport, "python")
    return f"{launcher} examples/train_moe.py {shlex.join(sys.argv[1:])}".strip()


def make_report(settings: Settings, corpus: Corpus, ranks: Ranks, runs: list[Run]) -> Report:
    order_0, order_1 = corpus.entropies()
    transport = "process_group" if dist.is_initialized() else "mpi" if ranks.size > 1 else "loopback"
    return Report(
        command=command_line(transport, ranks.size),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions={"fp4comm": fp4comm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        machine=f"{processor()}, {os.cpu_count()} logical cores",
        num_ranks=ranks.size,
        transport=transport,
        settings=asdict(settings),
        corpus={
            "num_files": corpus.num_files,
            "training_bytes": corpus.train.numel(),
            "validation_bytes": corpus.validation.numel(),
            "digest": corpus.digest,
            "entropy_order_0": order_0,
            "entropy_order_1": order_1,
        },
        runs=runs,
    )


def processor() -> str:
    """What kind of processor this is."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(report: Report, out: str) -> None:
    """Prints the results; writes JSON and plot, and into the document of that name if it is there."""
    print(f"\n{results(report)}\n")
    save(report, Path(f"{out}.json"))
    update_document(report, Path(f"{out}.md"))
    try:
        plot(report, Path(f"{out}.png"))
        print(f"wrote {out}.json and {out}.png")
    except ImportError as error:
        print(f"wrote {out}.json, but no plot ({error}); install it with: pip install matplotlib")


def main() -> None:
    try:
        ranks = Ranks(world_group())
    except NotAvailable as error:
        sys.exit(f"train_moe: {error}")
    nowhere = io.StringIO()
    with contextlib.ExitStack() as stack:
        if ranks.rank > 0:  # one usage message is enough
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        settings = parse(sys.argv[1:])
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // ranks.size))
    try:
        corpus = prepare(settings, ranks)
    except (ValueError, OSError) as error:
        ranks.close()
        sys.exit(f"train_moe: {error}" if ranks.rank == 0 else 2)
    ranks.print(
        f"{ranks.size} rank(s), {torch.get_num_threads()} thread(s) each; {corpus.num_files} files, "
        f"{corpus.train.numel():,} bytes to train on, {corpus.validation.numel():,} to validate on"
    )
    report = make_report(settings, corpus, ranks, compare(settings, corpus, ranks))
    if ranks.rank == 0:
        write(report, settings.out)
    ranks.close()


if __name__ == "__main__":
    main()
