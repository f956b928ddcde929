"""Trains a byte-level Mixture-of-Experts language model, once per wire format or recipe, and compares the losses.

    mpirun -n 2 python examples/train_moe.py
    mpirun -n 2 python examples/train_moe.py --recipes bf16 twin fp8_flow fp4 fp4_all
    torchrun --nproc-per-node 2 examples/train_moe.py --preset large --recipes bf16 fp8_flow fp4 fp4_all

The experts are spread over the ranks; everything else is replicated and trained data-parallel over the same ranks.
All runs of a seed start from the same weights and see the same bytes in the same order. See docs/training.md.
"""

from __future__ import annotations

import datetime
import platform
import sys
from pathlib import Path

import numpy as np
import torch
from moe_data import Corpus
from moe_model import ByteModel, RoutedTokens
from moe_ranks import Ranks
from moe_report import Report, load, publish, save
from moe_settings import (
    RECIPES,
    TWIN,
    WIRES,
    Settings,
    check,
    make_parser,
    parse_with_preset,
    positive_int,
)
from moe_trainer import Trainer, read_text

import fp4comm
from fp4comm import InvalidArgument

_TRACE_TOKENS = 2048
_THAT_OF_OUT = ""  # of --resume without a file


def parse(arguments: list[str]) -> Settings:
    """Reads the command line."""
    parser = make_parser("Train a byte-level MoE language model once per wire format or recipe and compare the losses.")
    noise = f"{TWIN!r} is the first once more from weights that differ by a millionth: the noise to judge the others by"
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--wires",
        nargs="+",
        metavar="WIRE",
        help=f"names of fp4comm.Precision to compare with the first; {noise}. Without it: {' '.join(WIRES)}",
    )
    which.add_argument(
        "--recipes",
        nargs="*",
        metavar="RECIPE",
        help=f"compare recipes of fp4comm.moe.MoELayer instead; without a name: {' '.join(RECIPES)}",
    )
    add = parser.add_argument
    add("--seeds", type=positive_int, default=3, help="how many seeds (weights and order of the data)")
    add("--validation-windows", type=positive_int, default=512, help="windows of the final validation")
    add("--curve-points", type=positive_int, default=10, help="how often to validate, on an eighth of these windows")
    add("--out", default="training", help="path of the results without suffix: .json and .png follow")
    add(
        "--resume",
        nargs="?",
        const=_THAT_OF_OUT,
        metavar="FILE",
        help="don't repeat the runs that are in FILE, or without it in the .json of --out; it need not exist yet",
    )
    add("--save-trace", metavar="FILE", help="save routing and activations of the last layer (first run) as .npz")
    options = parse_with_preset(parser, arguments)
    if options["recipes"] == []:
        options["recipes"] = RECIPES
    if options["resume"] == _THAT_OF_OUT:
        options["resume"] = f"{options['out']}.json"
    return Settings(**options)


def save_trace(path: Path, routed: RoutedTokens, num_experts: int) -> None:
    """Saves what a layer sent to its experts, BF16 as its bits."""
    x_bits = routed.x[:_TRACE_TOKENS].bfloat16().cpu().view(torch.uint16).numpy()
    np.savez_compressed(
        path,
        x_bits=x_bits,
        topk_idx=routed.topk_idx[:_TRACE_TOKENS].to(torch.int32).cpu().numpy(),
        topk_weights=routed.topk_weights[:_TRACE_TOKENS].cpu().numpy(),
        num_experts=num_experts,
    )


def make_report(settings: Settings, corpus: Corpus, ranks: Ranks, transport: str) -> Report:
    """A report without runs."""
    order_0, order_1 = corpus.entropies()
    return Report(
        command=ranks.command_line("train_moe.py"),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions={"fp4comm": fp4comm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        machine=ranks.machine,
        num_ranks=ranks.size,
        transport=transport,
        settings=settings.described(),
        corpus={
            "num_files": corpus.num_files,
            "training_bytes": corpus.train.numel(),
            "validation_bytes": corpus.validation.numel(),
            "digest": corpus.digest,
            "entropy_order_0": order_0,
            "entropy_order_1": order_1,
        },
        runs=[],
        kind=settings.kind,
    )


def take_up(report: Report, settings: Settings, ranks: Ranks) -> None:
    """Adds the runs of --resume to a report that has none. Collective.

    Raises:
        InvalidArgument: they were made in another way, or not all ranks see them.
        ValueError: that file is no report.
    """
    path = Path(settings.resume or "")
    before = load(path) if settings.resume and path.exists() else None
    if not ranks.agree(len(before.runs) if before else 0):
        raise InvalidArgument(f"--resume is {path}; accepted: a file that all ranks see")
    if before is None:
        return
    then = {name: before.settings.get(name) for name in settings.comparable()}
    pairs = [(name, value, then[name]) for name, value in settings.comparable().items()]
    pairs += [(name, getattr(report, name), getattr(before, name)) for name in ("kind", "machine", "num_ranks")]
    pairs += [(name, getattr(report, name), getattr(before, name)) for name in ("versions", "transport")]
    pairs += [("text", report.corpus["digest"], before.corpus["digest"])]
    for name, value, other in pairs:
        if value != other:
            accepted = f"a file whose runs have {name} {value!r}, not {other!r}"
            raise InvalidArgument(f"--resume is {path}; accepted: {accepted}")
    report.runs, report.model = before.runs, before.model
    if report.command not in before.command.split("\n"):
        report.command = f"{before.command}\n{report.command}"


def compare(settings: Settings, corpus: Corpus, ranks: Ranks, report: Report) -> None:
    """Makes the runs that the report lacks, and saves it after each.

    The runs of a seed follow each other, so all see the same machine.
    """
    done = {(run.seed, run.name) for run in report.runs}
    runs = [(seed, name) for seed in range(settings.seeds) for name in settings.names if (seed, name) not in done]
    on_device = corpus.to(ranks.device)
    for number, (seed, name) in enumerate(runs, start=1):
        trainer = Trainer(settings, name, seed, on_device, ranks)
        if settings.recipes:
            report.model = describe(trainer.model, settings)
        report.runs.append(trainer.train(f"[{number}/{len(runs)}] {name:8} seed {seed}"))
        if number == 1 and settings.save_trace and ranks.rank == 0:
            save_trace(Path(settings.save_trace), trainer.model.moe_layers[-1].routed, settings.experts)
        trainer.close()
        if ranks.rank == 0:
            save(report, Path(f"{settings.out}.json"))


def describe(model: ByteModel, settings: Settings) -> str:
    """The size of what was trained."""
    total, of_experts = (number / 1e6 for number in model.num_parameters())
    tokens = settings.steps * settings.batch * settings.length / 1e6
    dtype = str(model.placement.dtype).removeprefix("torch.")
    return f"{total:.3g} million weights, {of_experts:.3g} of experts; {tokens:.3g} million tokens a run, in {dtype}"


def main() -> None:
    ranks = Ranks.started("train_moe")
    with ranks.printing_once():
        settings = parse(sys.argv[1:])
    ranks.share_cores(settings.threads)
    try:
        ranks.use_device(settings.device)
        transport = check(settings, ranks)
        corpus = read_text(settings, ranks)
        report = make_report(settings, corpus, ranks, transport)
        take_up(report, settings, ranks)
    except (ValueError, OSError) as error:
        ranks.close()
        sys.exit(f"train_moe: {error}" if ranks.rank == 0 else 2)
    ranks.print(
        f"{ranks.size} rank(s), {torch.get_num_threads()} thread(s) each; {corpus.num_files} files, "
        f"{corpus.train.numel():,} bytes to train on, {corpus.validation.numel():,} to validate on"
    )
    compare(settings, corpus, ranks, report)
    if ranks.rank == 0:
        publish(report, Path(settings.out))
    ranks.close()


if __name__ == "__main__":
    main()
