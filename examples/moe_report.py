"""Results of the training comparison: a table, a JSON file and a plot."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")
MARKS = ("<!-- results: written by train_moe.py -->", "<!-- end of results -->")


@dataclass
class Run:
    """One training run. Losses are in nats per byte.

    Attributes:
        training_loss: of every step.
        validation_loss: (step, loss) on a few windows, the last on all of them.
        final_loss: the last validation loss.
        bytes_per_token: bytes sent to other ranks per token of training, over all layers, by leg.
        seconds: of training, without validation.
        load: for each layer, tokens of the idlest and the busiest expert in the final validation; 1 = the mean expert.
    """

    wire: str
    seed: int
    training_loss: list[float] = field(default_factory=list)
    validation_loss: list[tuple[int, float]] = field(default_factory=list)
    final_loss: float = float("nan")
    bytes_per_token: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    load: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Report:
    """All runs, and what is needed to repeat them. `settings` and `corpus` are plain data."""

    command: str
    date: str
    versions: dict[str, str]
    machine: str
    num_ranks: int
    transport: str
    settings: dict[str, Any]
    corpus: dict[str, Any]
    runs: list[Run]

    @property
    def wires(self) -> list[str]:
        """In the order of the command line; the others are compared with the first."""
        return list(dict.fromkeys(run.wire for run in self.runs))

    def of(self, wire: str) -> list[Run]:
        """The runs of a wire by seed."""
        return [run for run in self.runs if run.wire == wire]

    def differences(self, wire: str) -> list[float]:
        """Final loss relative to the first wire in %, by seed."""
        pairs = zip(self.of(wire), self.of(self.wires[0]), strict=True)
        return [100 * (run.final_loss / base.final_loss - 1) for run, base in pairs]

    def summary(self) -> dict[str, dict[str, Any]]:
        """What the table says, by wire."""
        base_bytes = _mean_bytes(self.of(self.wires[0]))
        result = {}
        for wire in self.wires:
            differences, sent = self.differences(wire), _mean_bytes(self.of(wire))
            result[wire] = {
                "final_loss": statistics.mean(run.final_loss for run in self.of(wire)),
                "difference_percent": statistics.mean(differences),
                "spread_percent": statistics.stdev(differences) if len(differences) > 1 else None,
                "bytes_per_token": sum(sent.values()),
                "relative_bytes": {leg: sent[leg] / base_bytes[leg] if base_bytes[leg] else None for leg in LEGS},
                "seconds": statistics.mean(run.seconds for run in self.of(wire)),
            }
        return result


def _mean_bytes(runs: list[Run]) -> dict[str, float]:
    return {leg: statistics.mean(run.bytes_per_token[leg] for run in runs) for leg in LEGS}


def table(report: Report) -> str:
    """The summary as text, a line per wire."""
    base = report.wires[0]
    lines = [
        f"{'':8}{'validation':>12}{f'relative to {base}':>22}{f'bytes per token, relative to {base}':>42}",
        f"{'wire':8}{'loss':>12}{'mean':>12}{'spread':>10}{''.join(f'{leg:>15}' for leg in LEGS)}{'s / run':>10}",
    ]
    for wire, row in report.summary().items():
        shares = "".join(f"{'-' if share is None else f'{share:.2f}':>14}" for share in row["relative_bytes"].values())
        spread = "-" if row["spread_percent"] is None else f"{row['spread_percent']:.2f} %"
        mean = f"{row['difference_percent']:+.2f} %"
        lines.append(f"{wire:8}{row['final_loss']:12.4f}{mean:>12}{spread:>10}{shares}{row['seconds']:10.1f}")
    return "\n".join(lines)


def results(report: Report) -> str:
    """The table with what it takes to read it."""
    idlest = min(load[0] for run in report.runs for load in run.load)
    busiest = max(load[1] for run in report.runs for load in run.load)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"""{report.command}
{report.date}, {report.machine}, {report.num_ranks} rank(s), {versions}

{table(report)}

Losses are in nats per byte; counting bytes gives {report.corpus["entropy_order_0"]:.3f} (order 0), counting pairs \
{report.corpus["entropy_order_1"]:.3f} (order 1).
The idlest expert of any layer and run gets {idlest:.2f} of the mean load, the busiest {busiest:.2f}."""


def update_document(report: Report, path: Path) -> None:
    """Puts the results between the two marks of a Markdown file, if there is one with marks."""
    if path.exists() and all(mark in path.read_text() for mark in MARKS):
        before, rest = path.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        path.write_text(f"{before}{MARKS[0]}\n```text\n{results(report)}\n```\n{MARKS[1]}{after}")


def save(report: Report, path: Path) -> None:
    """Writes the report and its summary as JSON, a line per run."""
    head = asdict(report)
    runs = head.pop("runs")
    head["summary"] = report.summary()
    text = json.dumps(head, indent=2)[:-2]
    lines = ",\n    ".join(json.dumps(_rounded(run)) for run in runs)
    path.write_text(f'{text},\n  "runs": [\n    {lines}\n  ]\n}}\n')


def _rounded(value: Any) -> Any:
    """Seven significant digits for every float: more than two runs could agree on."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> Report:
    """Reads what `save` wrote."""
    data = json.loads(path.read_text())
    del data["summary"]
    return Report(**{**data, "runs": [Run(**run) for run in data["runs"]]})


def plot(report: Report, path: Path) -> None:
    """Draws validation loss over steps, and the final loss of each seed relative to the first wire.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, finals) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    for wire in report.wires:
        points = [run.validation_loss for run in report.of(wire)]
        steps = [step for step, _ in points[0]]
        curves.plot(
            steps, [statistics.mean(loss for _, loss in column) for column in zip(*points, strict=True)], label=wire
        )
    for order in (0, 1):
        curves.axhline(report.corpus[f"entropy_order_{order}"], color="gray", linestyle=":")
        curves.annotate(
            f"bytes, order {order}", (steps[-1], report.corpus[f"entropy_order_{order}"]), ha="right", va="bottom"
        )
    curves.set(xlabel="step", ylabel="validation loss (nats per byte)", title=f"Mean of {len(points)} seed(s)")
    curves.legend()
    wires = report.wires[1:]
    for place, wire in enumerate(wires):
        differences = report.differences(wire)
        finals.plot([place] * len(differences), differences, "o", alpha=0.5, color=f"C{place + 1}")
        finals.plot([place - 0.2, place + 0.2], [statistics.mean(differences)] * 2, color=f"C{place + 1}")
    finals.axhline(0, color="gray", linewidth=0.8)
    finals.set(xticks=range(len(wires)), xticklabels=wires, xlim=(-0.5, max(len(wires), 1) - 0.5))
    finals.set(ylabel="%", title=f"Final loss relative to {report.wires[0]}, each seed and mean")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
