"""Results of the training comparison: a table, a JSON file and a plot.

    python examples/moe_report.py docs/training_large.json

puts results that another machine has written into docs/training.md, and draws their plot again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")
DOCUMENT = "training.md"
_PANELS = {2: (11, (3, 2)), 3: (15, (3, 3, 2.4))}  # width in inches and shares of it, by number of panels


@dataclass
class Run:
    """One training run. Losses are in nats per byte.

    Attributes:
        name: the wire or recipe.
        training_loss: of every step.
        validation_loss: (step, loss) on a few windows, the last on all of them.
        final_loss: the last validation loss.
        bytes_per_token: bytes sent to other ranks per token of training, over all layers, by leg.
        seconds: of training, without validation.
        load: for each layer, tokens of the idlest and the busiest expert in the final validation; 1 = the mean expert.
    """

    name: str
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
    """All runs, and what is needed to repeat them. `settings` and `corpus` are plain data.

    Attributes:
        command: that made the runs; a line each if there were several.
        kind: what is compared, "wire" or "recipe".
        model: what there is to say of the model in one line, or "".
    """

    command: str
    date: str
    versions: dict[str, str]
    machine: str
    num_ranks: int
    transport: str
    settings: dict[str, Any]
    corpus: dict[str, Any]
    runs: list[Run]
    kind: str = "wire"
    model: str = ""

    @property
    def names(self) -> list[str]:
        """In the order of the command line; the others are compared with the first."""
        return list(dict.fromkeys(run.name for run in self.runs))

    def of(self, name: str) -> list[Run]:
        """The runs of a wire or recipe by seed."""
        return sorted((run for run in self.runs if run.name == name), key=lambda run: run.seed)

    def pairs(self, name: str) -> Iterator[tuple[Run, Run]]:
        """The runs of `name` beside those of the first with the same seed."""
        first = {run.seed: run for run in self.of(self.names[0])}
        return ((run, first[run.seed]) for run in self.of(name) if run.seed in first)

    def differences(self, name: str) -> list[float]:
        """Final loss relative to the first in %, by seed."""
        return [100 * (run.final_loss / base.final_loss - 1) for run, base in self.pairs(name)]

    def summary(self) -> dict[str, dict[str, Any]]:
        """What the table says, by wire or recipe."""
        result = {}
        for name in self.names:
            differences, pairs = self.differences(name), list(self.pairs(name))
            sent, base_sent = _mean_bytes([run for run, _ in pairs]), _mean_bytes([base for _, base in pairs])
            result[name] = {
                "final_loss": statistics.mean(run.final_loss for run in self.of(name)),
                "difference_percent": statistics.mean(differences) if differences else None,
                "spread_percent": statistics.stdev(differences) if len(differences) > 1 else None,
                "bytes_per_token": sum(_mean_bytes(self.of(name)).values()),
                "relative_bytes": {leg: sent[leg] / base_sent[leg] if base_sent[leg] else None for leg in LEGS},
                "seconds": statistics.mean(run.seconds for run in self.of(name)),
            }
        return result


def _mean_bytes(runs: list[Run]) -> dict[str, float]:
    return {leg: statistics.mean(run.bytes_per_token[leg] for run in runs) if runs else 0.0 for leg in LEGS}


def table(report: Report) -> str:
    """The summary as text, a line per wire or recipe."""
    base = report.names[0]
    lines = [
        f"{'':8}{'validation':>12}{f'relative to {base}':>22}{f'bytes per token, relative to {base}':>42}",
        f"{report.kind:8}{'loss':>12}{'mean':>12}{'spread':>10}{''.join(f'{leg:>15}' for leg in LEGS)}{'s / run':>10}",
    ]
    for name, row in report.summary().items():
        shares = "".join(f"{'-' if share is None else f'{share:.2f}':>14}" for share in row["relative_bytes"].values())
        spread, mean = (
            "-" if row[key] is None else f"{row[key]:{sign}.2f} %"
            for key, sign in (("spread_percent", ""), ("difference_percent", "+"))
        )
        lines.append(f"{name:8}{row['final_loss']:12.4f}{mean:>12}{spread:>10}{shares}{row['seconds']:10.1f}")
    return "\n".join(lines)


def results(report: Report) -> str:
    """The table with what it takes to read it."""
    idlest = min(load[0] for run in report.runs for load in run.load)
    busiest = max(load[1] for run in report.runs for load in run.load)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    model = f"{report.model}\n" if report.model else ""
    return f"""{report.command}
{report.date}, {report.machine}, {report.num_ranks} rank(s), {versions}
{model}
{table(report)}

{seeds(report)}Losses are in nats per byte; \
counting bytes gives {report.corpus["entropy_order_0"]:.3f} (order 0), counting pairs \
{report.corpus["entropy_order_1"]:.3f} (order 1).
The idlest expert of any layer and run gets {idlest:.2f} of the mean load, the busiest {busiest:.2f}."""


def seeds(report: Report) -> str:
    """A line that says how many runs each has, where that differs."""
    counts = {name: len(report.of(name)) for name in report.names}
    if len(set(counts.values())) == 1:
        return ""
    own = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"Seeds: {own}. Losses and times are means over their own seeds, the rest over shared ones.\n"


def update_document(text: str, out: Path, caption: str = "") -> bool:
    """Puts results between the two marks for `out.name` in training.md beside it; whether it has them.

    Args:
        text: the results.
        out: path of the results without suffix.
        caption: of the plot, which is shown if it is there.
    """
    path, plot_file = out.parent / DOCUMENT, Path(f"{out}.png")
    first, last = f"<!-- results: {out.name} -->", f"<!-- end of results: {out.name} -->"
    if not path.exists() or not all(mark in path.read_text() for mark in (first, last)):
        return False
    before, rest = path.read_text().split(first)
    image = f"\n![{caption}]({plot_file.name})\n" if caption and plot_file.exists() else ""
    path.write_text(f"{before}{first}\n```text\n{text}\n```\n{image}{last}{rest.split(last)[1]}")
    return True


def save(report: Report, path: Path) -> None:
    """Writes the report and its summary as JSON, a line per run."""
    head = asdict(report)
    runs = head.pop("runs")
    head["summary"] = rounded(report.summary())
    text = json.dumps(head, indent=2)[:-2]
    lines = ",\n    ".join(json.dumps(rounded(run)) for run in runs)
    part = Path(f"{path}.part")  # whoever ends this program meanwhile leaves the last results
    part.write_text(f'{text},\n  "runs": [\n    {lines}\n  ]\n}}\n')
    part.replace(path)


def rounded(value: Any) -> Any:
    """Seven significant digits for every float: more than two runs could agree on."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> Report:
    """Reads what `save` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        data = json.loads(path.read_text())
        del data["summary"]
        return Report(**{**data, "runs": [Run(**run) for run in data["runs"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no results of train_moe.py: {error}") from error


def publish(report: Report, out: Path) -> None:
    """Prints the results and puts them where `out` says: JSON, plot, and the document beside them."""
    print(f"\n{results(report)}\n")
    save(report, Path(f"{out}.json"))
    written = f"{out}.json"
    try:
        plot(report, Path(f"{out}.png"))
        written += f" and {out}.png"
    except ImportError as error:
        written += f", but no plot ({error}); install it with: pip install matplotlib"
    update_document(results(report), out, "Validation loss over steps, and final losses relative to the first")
    print(f"wrote {written}")


def plot(report: Report, path: Path) -> None:
    """Draws validation loss over steps, and the final loss of each seed relative to the first wire or recipe.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_panels = 3 if report.kind == "recipe" else 2
    width, shares = _PANELS[num_panels]
    figure, panels = pyplot.subplots(1, num_panels, figsize=(width, 4.2), width_ratios=shares, layout="constrained")
    _draw_curves(panels[0], report)
    if num_panels == 3:
        _draw_distances(panels[1], report)
    _draw_finals(panels[-1], report)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_curves(axes: Any, report: Report) -> None:
    """Validation loss over steps, and what counting gives."""
    for name in report.names:
        points = [run.validation_loss for run in report.of(name)]
        steps = [step for step, _ in points[0]]
        axes.plot(
            steps, [statistics.mean(loss for _, loss in column) for column in zip(*points, strict=True)], label=name
        )
    for order in (0, 1):
        axes.axhline(report.corpus[f"entropy_order_{order}"], color="gray", linestyle=":")
        axes.annotate(
            f"bytes, order {order}", (steps[-1], report.corpus[f"entropy_order_{order}"]), ha="right", va="bottom"
        )
    counts = " or ".join(map(str, sorted({len(report.of(name)) for name in report.names})))
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title=f"Mean of {counts} seed(s)")
    axes.legend()


def _draw_distances(axes: Any, report: Report) -> None:
    """Validation loss relative to the first over steps, the mean over seeds."""
    for place, name in enumerate(report.names[1:], start=1):
        pairs = list(report.pairs(name))
        columns = zip(
            *(zip(run.validation_loss, base.validation_loss, strict=True) for run, base in pairs), strict=True
        )
        points = [
            (column[0][0][0], statistics.mean(100 * (loss / other - 1) for (_, loss), (_, other) in column))
            for column in columns
        ]
        axes.plot(*zip(*points, strict=True), color=f"C{place}", label=name)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xlabel="step", ylabel="%", title=f"Validation loss relative to {report.names[0]}")
    if report.names[1:]:
        axes.legend()


def _draw_finals(axes: Any, report: Report) -> None:
    """The final loss of each seed relative to the first."""
    names = report.names[1:]
    for place, name in enumerate(names):
        differences = report.differences(name)
        axes.plot([place] * len(differences), differences, "o", alpha=0.5, color=f"C{place + 1}")
        axes.plot([place - 0.2, place + 0.2], [statistics.mean(differences)] * 2, color=f"C{place + 1}")
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xticks=range(len(names)), xticklabels=names, xlim=(-0.5, max(len(names), 1) - 0.5))
    axes.set(ylabel="%", title=f"Final loss relative to {report.names[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish results of train_moe.py or gradient_error.py again.")
    parser.add_argument("file", nargs="+", type=Path, help="JSON as one of them wrote it")
    for path in parser.parse_args().file:
        try:
            is_training = "runs" in json.loads(path.read_text())
            if is_training:
                publish(load(path), path.with_suffix(""))
            else:
                import gradient_error

                gradient_error.publish(gradient_error.load(path), path.with_suffix(""))
        except (OSError, ValueError) as error:
            sys.exit(f"moe_report: {path}: {error}")


if __name__ == "__main__":
    main()
