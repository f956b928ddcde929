"""Settings of the training example and of the measurement of gradients: what their command lines say."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from moe_data import TEXTS
from moe_model import ByteModel, ModelSize, Placement, recipe_moes, wire_moes
from moe_ranks import DEVICES, Ranks

from fp4comm import EPCommunicator, InvalidArgument, Precision
from fp4comm.moe import Recipe

TWIN = "twin"  # the first one once more, from weights that differ by a millionth: what chaos alone does to a run
WIRES = ["bf16", TWIN, "fp8", "fp4", "mxfp4"]
RECIPES = ["bf16", TWIN, "fp8_flow", "fp4", "fp4_all"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EXPERT_MULTIPLE = 32  # of inner widths of MoELayer

PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {  # 437 million weights, 25 million tokens
        "text": "packages",
        "seeds": 1,
        "steps": 768,
        "batch": 64,
        "length": 512,
        "layers": 8,
        "hidden": 1024,
        "heads": 8,
        "experts": 32,
        "topk": 4,
        "expert_hidden": 512,
        "learning_rate": 6e-4,
        "clip": 1.0,
        "validation_windows": 2048,
        "curve_points": 16,
    },
}


@dataclass(frozen=True)
class Settings:
    """What the command line says; see `add_options` for the meaning of each."""

    wires: list[str] | None
    recipes: list[str] | None
    preset: str
    text: str
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
    clip: float
    balance: float
    validation_windows: int
    curve_points: int
    threads: int
    device: str
    dtype: str
    out: str
    save_trace: str | None = None
    resume: str | None = None

    @property
    def size(self) -> ModelSize:
        return ModelSize(self.layers, self.hidden, self.heads, self.experts, self.topk, self.expert_hidden)

    @property
    def kind(self) -> str:
        """What is compared."""
        return "recipe" if self.recipes else "wire"

    @property
    def option(self) -> str:
        """Which option names what is compared."""
        return f"--{self.kind}s"

    @property
    def names(self) -> list[str]:
        """What is compared: wires or recipes."""
        return self.recipes or self.wires or WIRES

    def source(self, name: str) -> str:
        """The wire or recipe behind `name`, which may be the twin."""
        return self.names[0] if name == TWIN else name

    def placement(self, device: torch.device) -> Placement:
        """Recipes are about BF16 and less; over wires a CPU computes in float32, so that they alone differ."""
        auto = "bfloat16" if self.recipes or device.type == "cuda" else "float32"
        return Placement(device, DTYPES[auto if self.dtype == "auto" else self.dtype])

    def comparable(self) -> dict[str, Any]:
        """What must be equal for two runs to be put side by side, as plain data."""
        apart = {"wires", "recipes", "seeds", "threads", "device", "out", "save_trace", "resume", "preset"}
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in apart}

    def described(self) -> dict[str, Any]:
        """All that says how runs were made, as plain data."""
        return {self.option.strip("-"): self.names, "seeds": self.seeds, **self.comparable()}


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def parse_with_preset(parser: argparse.ArgumentParser, arguments: list[str], **own: Any) -> dict[str, Any]:
    """Reads a command line, in which --preset changes the defaults of the options that the parser has.

    Args:
        parser: with those of `add_options`.
        arguments: the command line.
        own: defaults of the program, whatever the preset.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="small")
    preset = PRESETS.get(first.parse_known_args(arguments)[0].preset, {})
    known = {name: value for name, value in {**preset, **own}.items() if parser.get_default(name) is not None}
    parser.set_defaults(**known)
    options = vars(parser.parse_args(arguments))
    options["out"] = str(Path(options["out"]))  # without a slash at its end, to which suffixes are added
    return options


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the options that training and measuring gradients share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, on what, and where it is computed."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="defaults of the other options: large is meant for GPUs")
    add(
        "--text",
        choices=TEXTS,
        default="stdlib",
        help="stdlib: the sources of Python's library; packages: those and code and text of all installed packages",
    )
    add("--steps", type=positive_int, default=400, help="optimizer steps of a run")
    add("--batch", type=positive_int, default=8, help="windows per step, over all ranks")
    add("--length", type=positive_int, default=128, help="bytes per window")
    add("--layers", type=positive_int, default=2, help="layers, each with attention and a MoE")
    add("--hidden", type=positive_int, default=128, help="width of the model, a multiple of 32")
    add("--heads", type=positive_int, default=4, help="attention heads")
    add("--experts", type=positive_int, default=16, help="experts per layer, a multiple of the ranks")
    add("--topk", type=positive_int, default=4, help="experts per token")
    add("--expert-hidden", type=positive_int, default=32, help="inner width of an expert")
    add("--learning-rate", type=positive_float, default=2.5e-3, help="peak; warm-up, then linear to zero")
    add("--clip", type=float, default=0.0, help="largest norm of all gradients together; 0 = as they are")
    add("--balance", type=float, default=0.01, help="weight of the load balancing loss")
    add("--threads", type=int, default=0, help="threads per rank; 0 = cores / ranks")
    add("--device", choices=DEVICES, default="auto", help="auto = cuda if every rank has a GPU")
    add(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="of what attention and experts read; auto = bfloat16, but float32 for wires on the CPU",
    )


def check(settings: Settings, ranks: Ranks) -> str:
    """Finds what is wrong before anything takes long; the transport that is taken. Collective.

    Raises:
        InvalidArgument: sizes don't fit together, or a wire or recipe is unknown.
        OSError: results can't be written.
    """
    if settings.batch % ranks.size:
        raise InvalidArgument(f"--batch is {settings.batch}; accepted: a multiple of the {ranks.size} ranks")
    if settings.hidden % (2 * settings.heads):
        raise InvalidArgument(
            f"--heads is {settings.heads}; accepted: a number whose double divides --hidden ({settings.hidden})"
        )
    if settings.topk > settings.experts:
        raise InvalidArgument(f"--topk is {settings.topk}; accepted: at most the {settings.experts} experts")
    check_names(settings)
    comm = EPCommunicator(ranks.group, num_experts=settings.experts, hidden=settings.hidden, transport=ranks.transport)
    transport, carries_on = comm.transport, comm.device or ranks.device
    comm.close()
    if carries_on.type != ranks.device.type:
        accepted = "cpu, or GPUs that NCCL or CUDA connect"
        raise InvalidArgument(f"--device is {settings.device}, but {transport} is all there is; accepted: {accepted}")
    for path in filter(None, (settings.out, settings.save_trace)):
        folder = Path(path).parent
        if not folder.is_dir():
            raise OSError(f"can't write {path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK):
            raise OSError(f"can't write {path}: this user can't write to the folder {folder}")
    return transport


def check_names(settings: Settings) -> None:
    """That the names of wires or recipes are known, and what goes with them.

    Raises:
        InvalidArgument: they are not.
    """
    names, option = settings.names, settings.option
    if names[0] == TWIN:
        raise InvalidArgument(f"{option} begins with {TWIN!r}; accepted: it after the one that it is the twin of")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"{option} is {' '.join(names)}; accepted: each one once")
    for name in names:
        if settings.recipes:
            Recipe.of(settings.source(name))
        else:
            Precision.of(settings.source(name))
    if settings.save_trace and settings.resume:
        raise InvalidArgument("--save-trace is given with --resume; accepted: one of them")
    if not settings.recipes:
        return
    if settings.save_trace:
        raise InvalidArgument("--save-trace is given with --recipes; accepted: it with --wires")
    if settings.expert_hidden % _EXPERT_MULTIPLE:
        accepted = f"a multiple of {_EXPERT_MULTIPLE} with --recipes"
        raise InvalidArgument(f"--expert-hidden is {settings.expert_hidden}; accepted: {accepted}")


def make_model(settings: Settings, name: str, seed: int, ranks: Ranks) -> ByteModel:
    """The model of a wire or recipe, with the initial weights of a seed. Collective."""
    placement = settings.placement(ranks.device)
    moes = recipe_moes if settings.recipes else wire_moes
    make_moe = moes(settings.size, ranks.group, placement, settings.source(name), ranks.transport, seed)
    return ByteModel(settings.size, make_moe, seed, placement)
