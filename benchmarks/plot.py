"""Plots time and bandwidth over tokens per rank, a line per transport and wire, from a bandwidth run of several sizes.

mpirun -n 4 python -m benchmarks.bandwidth --tokens 64,256,1024,4096 --json sizes.jsonl
python -m benchmarks.plot sizes.jsonl docs/sizes.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
    import matplotlib.pyplot as plt
except ImportError as error:
    raise SystemExit(f"error: no plot ({error}); install it with: pip install matplotlib") from None

from fp4comm.errors import counted

from .common import read_json_lines
from .tables import LEGS, unique
from .workload import Config

Record = dict[str, Any]
STYLES = ("-", "--", ":")  # by transport
IN_GRAPH = "graph_seconds"


def plot(source: Path, target: Path) -> None:
    """Draws time above and bandwidth below into `target`, whose suffix tells the format."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "fp4comm"  # so that the same figures give the same file
    run, *records = read_json_lines(source)
    legs = most_sizes([record for record in records if record["record"] == "leg" and record.get("num_sms") is None])
    in_graph = any(IN_GRAPH in record for record in legs)
    legs = [record for record in legs if IN_GRAPH in record or not in_graph]
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), sharex=True, sharey="row", layout="constrained")
    for column, leg in zip(axes.T, LEGS, strict=True):
        draw_leg(column, [record for record in legs if record["leg"] == leg], run["transport"], in_graph)
        column[0].set(xscale="log", yscale="log", title=leg)
        column[1].set(xscale="log", xlabel="tokens per rank")
        column[1].set_ylim(bottom=0)
    axes[0, 0].set_ylabel(f"us, median of the slowest rank{', in a CUDA graph' if in_graph else ''}")
    axes[1, 0].set_ylabel("BF16-equivalent GB/s per rank")
    axes[0, 0].legend()
    machine = f"{run['gpu']} each" if run.get("device") == "cuda" else f"{run['cores']} cores of {run['cpu']}"
    case = "hidden " + str(Config(**legs[0]["config"])).partition(" x ")[2]
    figure.suptitle(f"{case}\n{counted(run['ranks'], 'rank')}, {machine}, {run['date']}", fontsize="small")
    metadata = {"Date": None} if target.suffix == ".svg" else {}
    figure.savefig(target, metadata=metadata)
    plt.close(figure)


def most_sizes(legs: list[Record]) -> list[Record]:
    """Those of one configuration but for the number of tokens: the one with the most of them."""

    def group(record: Record) -> str:
        return str({**record["config"], "num_tokens": 0})

    def num_sizes(name: str) -> int:
        return len({record["config"]["num_tokens"] for record in legs if group(record) == name})

    best = max(unique(map(group, legs)), key=num_sizes)
    return sorted((leg for leg in legs if group(leg) == best), key=lambda leg: int(leg["config"]["num_tokens"]))


def draw_leg(axes: Any, legs: list[Record], default_transport: str, in_graph: bool) -> None:
    """The lines of one leg: colours by wire, dashes by transport."""
    names = unique((record.get("transport", default_transport), record["wire"]) for record in legs)
    transports, wires = unique(name for name, _ in names), unique(wire for _, wire in names)
    for transport, wire in names:
        points = [leg for leg in legs if (leg.get("transport", default_transport), leg["wire"]) == (transport, wire)]
        tokens = [leg["config"]["num_tokens"] for leg in points]
        seconds = [leg[IN_GRAPH if in_graph else "seconds"]["median"] for leg in points]
        # the record's figure is for the time of a call in a row
        gbps = [
            leg["bf16_equivalent_gbps"] * leg["seconds"]["median"] / time
            for leg, time in zip(points, seconds, strict=True)
        ]
        look = {
            "color": f"C{wires.index(wire)}",
            "linestyle": STYLES[transports.index(transport) % len(STYLES)],
            "marker": "o",
            "label": f"{wire}, {transport}",
        }
        axes[0].plot(tokens, [1e6 * time for time in seconds], **look)
        axes[1].plot(tokens, gbps, **look)
    for axis in axes:
        axis.grid(which="major", alpha=0.3)


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
