"""Where the time of a step goes: kernel seconds by what they are for, a bar for each kind of experts.

torchrun --nproc-per-node 2 -m benchmarks.moe_layer --json moe.jsonl
python -m benchmarks.moe_plot moe.jsonl docs/moe.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from fp4comm.errors import counted

from .common import read_json_lines
from .moe_report import by_shape

Record = dict[str, Any]
ORDER = ("GEMMs", "SwiGLU", "exchange", "packing", "unpacking", "rows", "columns", "weights", "rest")
WHOLE = "step"  # where there are no kernels: on a CPU


def plot(records: Sequence[Record], target: Path) -> None:
    """Draws the records of a run into `target`, whose suffix tells the format; shapes one below the other."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "fp4comm"  # so that the same figures give the same file
    run, *rest = records
    shapes = by_shape(rest)
    height = 1.2 + sum(0.9 + 0.32 * len(experts) for _, experts in shapes)
    figure, axes = plt.subplots(len(shapes), 1, figsize=(9, height), squeeze=False, layout="constrained")
    for axis, (title, experts) in zip(axes[:, 0], shapes, strict=True):
        draw(axis, experts)
        axis.set_title(title, fontsize="small")
    axes[-1, 0].set_xlabel("ms of kernels of a step, one rank; | = the step itself, median of the slowest rank")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=9, fontsize="small")
    machine = f"{run['gpu']} each" if run["device"] == "cuda" else f"{run['cores']} cores of {run['cpu']}"
    figure.suptitle(f"{counted(run['ranks'], 'rank')}, {machine}, {run['date']}", fontsize="small")
    metadata = {"Date": None} if target.suffix == ".svg" else {}
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata=metadata)
    plt.close(figure)


def draw(axis: Any, experts: Sequence[Record]) -> None:
    """The bars of one shape, the first kind of experts on top."""
    names = [record["name"] for record in experts]
    places, left = range(len(names)), [0.0] * len(names)
    steps = [1e3 * record["seconds"]["step"]["median"] for record in experts]
    parts = [part for part in ORDER if part in experts[0]["kernel_seconds"]] or [WHOLE]
    for part in parts:
        widths = [1e3 * record["kernel_seconds"][part] for record in experts] if part != WHOLE else steps
        colour = f"C{ORDER.index(part)}" if part in ORDER else "grey"
        axis.barh(places, widths, left=left, color=colour, label=part)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.plot(steps, places, linestyle="", marker="|", markersize=16, color="black")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.moe_plot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="JSON lines of benchmarks.moe_layer")
    parser.add_argument("target", type=Path, help="picture to write: .png, .svg or .pdf")
    options = parser.parse_args()
    plot(read_json_lines(options.source), options.target)


if __name__ == "__main__":
    main()
