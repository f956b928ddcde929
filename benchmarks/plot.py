"""Plots time over tokens per rank, a line per wire format, from the JSON lines of a bandwidth run with several sizes.

mpirun -n 4 python -m benchmarks.bandwidth --tokens 64,256,1024,4096 --json sizes.jsonl
python -m benchmarks.plot sizes.jsonl sizes.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from .common import read_json_lines
from .tables import unique


def plot(source: Path, target: Path) -> None:
    """Draws the legs of `source` side by side into `target`, whose suffix tells the format."""
    mpl.use("agg")
    run, *records = read_json_lines(source)
    legs = [record for record in records if record["record"] == "leg"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, leg in zip(axes, ("dispatch", "combine"), strict=True):
        for wire in unique(record["wire"] for record in legs):
            points = [record for record in legs if (record["wire"], record["leg"]) == (wire, leg)]
            tokens = [record["config"]["num_tokens"] for record in points]
            axis.plot(tokens, [1e3 * record["seconds"]["median"] for record in points], marker="o", label=wire)
        axis.set(xscale="log", yscale="log", xlabel="tokens per rank", title=leg)
        axis.grid(which="major", alpha=0.3)
    axes[0].set_ylabel("ms, median of the slowest rank")
    axes[0].legend()
    where = f"{run['ranks']} ranks on {run['cores']} cores of {run['cpu']}, transport {run['transport']}, {run['date']}"
    figure.suptitle(where, fontsize="small")
    figure.savefig(target)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.plot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="JSON lines of benchmarks.bandwidth")
    parser.add_argument("target", type=Path, help="picture to write: .svg, .png or .pdf")
    options = parser.parse_args()
    plot(options.source, options.target)


if __name__ == "__main__":
    main()
