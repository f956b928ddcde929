"""The shapes of known models that the benchmarks of the MoE layer take, and the options that change them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from .common import list_of, positive
from .host_layers import Sizes
from .ranks import Ranks

SHAPES = {  # hidden, width, experts, top-k
    "deepseek-v3": (7168, 2048, 256, 8),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}
SIZES = ("hidden", "width", "experts", "topk")
CUSTOM = "custom"
DTYPE = torch.bfloat16


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `parse_shapes` reads."""
    add = parser.add_argument
    add(
        "--shape",
        type=list_of(str, [*SHAPES, "all"]),
        default=["deepseek-v3"],
        help=f"with commas, of {', '.join(SHAPES)}, or all; default the first",
    )
    for name, what in zip(SIZES, ("width of a token", "of an expert", "in all", "experts of a token"), strict=True):
        add(f"--{name}", type=positive, help=f"{what}, default that of the shape, of which there must be one then")
    add("--tokens", type=positive, default=8192, help="per rank, default %(default)s")


def parse_shapes(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `shapes` are the sizes to measure by name."""
    options = parser.parse_args(arguments)
    names = list(SHAPES) if "all" in options.shape else options.shape
    given = [f"--{name}" for name in SIZES if getattr(options, name)]
    if given and len(names) > 1:
        parser.error(f"{', '.join(given)} with several shapes; accepted: one --shape, whose sizes these replace")
    options.shapes = {CUSTOM if given else name: sizes_of(SHAPES[name], options) for name in names}
    return options


def announce(ranks: Ranks, name: str, sizes: Sizes) -> None:
    """Says what comes next: nothing else is printed before all of a shape has been measured."""
    weights = 3 * sizes.hidden * sizes.width * sizes.num_experts * sizes.dtype.itemsize / ranks.num_ranks
    ranks.say(
        f"measuring {name}: {sizes.num_tokens} tokens and {weights / 2**30:.3g} GiB of experts' weights a rank ..."
    )


def sizes_of(shape: Sequence[int], options: argparse.Namespace) -> Sizes:
    """Those of a shape where no option says otherwise."""
    hidden, width, experts, topk = (
        getattr(options, name) or default for name, default in zip(SIZES, shape, strict=True)
    )
    return Sizes(options.tokens, hidden, topk, experts, width, DTYPE)
