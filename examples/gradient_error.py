"""Compares the gradients of each recipe of a MoE layer with those in float32, layer by layer.

    mpirun -n 2 python examples/gradient_error.py
    torchrun --nproc-per-node 2 examples/gradient_error.py --preset large

Trains the model of `train_moe.py` for some steps with the first recipe. Then every recipe, and float32, computes the
gradients of the next batch with those weights. See docs/training.md.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from moe_data import Corpus
from moe_model import ByteModel
from moe_ranks import Ranks
from moe_report import rounded, update_document
from moe_settings import Settings, check, make_parser, parse_with_preset, positive_int
from moe_trainer import Trainer, read_text
from torch import Tensor

import fp4comm
from fp4comm import InvalidArgument

RECIPES = ["bf16", "fp8_flow", "fp4", "fp4_all"]
REFERENCE = "fp32"
PARTS = {
    "tokens": "gradient of the tokens that enter the layer",
    "gate_up": "weight gradient of the experts' gate and up projections",
    "down": "weight gradient of the experts' down projections",
    "router": "weight gradient of the router",
    "choices": "choices of experts that differ",
}


@dataclass
class GradientErrors:
    """What was measured, and what is needed to repeat it.

    Attributes:
        after: steps of training before.
        loss: of the batch, by recipe.
        errors: by recipe and key of `PARTS`, of each layer: norm of the difference over the norm in float32; for
            choices, the share that differs.
    """

    command: str
    date: str
    versions: dict[str, str]
    machine: str
    num_ranks: int
    transport: str
    settings: dict[str, Any]
    model: str
    after: int
    loss: dict[str, float]
    errors: dict[str, dict[str, list[float]]]


class Probe:
    """Remembers what enters the MoE layers of a model, and which experts they choose."""

    def __init__(self, model: ByteModel) -> None:
        self.layers = model.moe_layers
        self._tokens: list[Tensor] = []
        self._choices: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_pre_hook(self._enter)
            layer.router.register_forward_hook(self._choose)

    def _enter(self, layer: Any, inputs: tuple[Tensor]) -> None:
        inputs[0].retain_grad()
        self._tokens.append(inputs[0])

    def _choose(self, router: Any, inputs: tuple[Tensor], routes: Any) -> None:
        chosen = torch.zeros(len(inputs[0]), router.num_experts, device=inputs[0].device)
        self._choices.append(chosen.scatter_(1, routes.topk_idx, 1))

    def parts(self) -> dict[str, list[Tensor]]:
        """After a backward pass: what `PARTS` names, of each layer and this rank."""
        return {
            "tokens": [tokens.grad for tokens in self._tokens],
            "gate_up": [layer.experts.gate_up.grad for layer in self.layers],
            "down": [layer.experts.down.grad for layer in self.layers],
            "router": [layer.router.weight.grad.clone() for layer in self.layers],
            "choices": self._choices,
        }


def errors_of(
    parts: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], ranks: Ranks
) -> dict[str, list[float]]:
    """By part and layer, over all ranks. Collective.

    What all ranks have alike is counted as often in the difference as in the norm.
    """
    errors = {}
    for part, layers in parts.items():
        sums = torch.stack([_squares(got, want) for got, want in zip(layers, expected[part], strict=True)])
        difference, norm = ranks.sum(sums).unbind(dim=1)
        ratio = difference / norm
        errors[part] = (ratio / 2 if part == "choices" else ratio.sqrt()).tolist()  # a choice differs in two places
    return errors


def _squares(got: Tensor, want: Tensor) -> Tensor:
    return torch.stack([(got.double() - want.double()).square().sum(), want.double().square().sum()])


def weights_after(settings: Settings, after: int, corpus: Corpus, ranks: Ranks) -> dict[str, Tensor]:
    """This rank's weights after so many steps of the first recipe. Collective."""
    trainer = Trainer(settings, settings.names[0], 0, corpus, ranks)
    for step in range(after):
        loss = trainer.step(step)
        if step % max(1, after // 4) == 0:
            ranks.print(f"training, step {step + 1}/{after}  loss {loss.item():.3f}")
    weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.close()
    return weights


def gradients_of(
    settings: Settings, name: str, weights: dict[str, Tensor], step: int, corpus: Corpus, ranks: Ranks
) -> tuple[float, dict[str, list[Tensor]], str]:
    """Loss and gradients of a recipe for the batch of a step, and what there is to say of the model. Collective."""
    dtype = "float32" if name == REFERENCE else settings.dtype
    trainer = Trainer(replace(settings, dtype=dtype, clip=0.0), name, 0, corpus, ranks)
    trainer.model.load_state_dict(weights)
    probe = Probe(trainer.model)
    loss = trainer.backward(*corpus.batch(trainer.starts[step], settings.length)).item()
    trainer.close()
    total, of_experts = (number / 1e6 for number in trainer.model.num_parameters())
    tokens = settings.batch * settings.length
    about = f"{total:.3g} million weights, {of_experts:.3g} of experts; a batch of {tokens:,} tokens"
    return loss, probe.parts(), about


def measure(settings: Settings, after: int, corpus: Corpus, ranks: Ranks, report: GradientErrors) -> None:
    """Fills in the report. Collective."""
    corpus = corpus.to(ranks.device)
    weights = weights_after(settings, after, corpus, ranks)
    inputs = (weights, after, corpus, ranks)
    report.loss[REFERENCE], expected, report.model = gradients_of(settings, REFERENCE, *inputs)
    for name in settings.names:
        report.loss[name], parts, _ = gradients_of(settings, name, *inputs)
        report.errors[name] = errors_of(parts, expected, ranks)
        ranks.print(f"{name:8}  loss {report.loss[name]:.5f}, in float32 {report.loss[REFERENCE]:.5f}")


def results(report: GradientErrors) -> str:
    """Tables, one for each part, a line per layer."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    names = list(report.errors)
    head = f"{'layer':>8}{''.join(f'{name:>10}' for name in names)}"
    lines = [
        report.command,
        f"{report.date}, {report.machine}, {report.num_ranks} rank(s), {versions}",
        f"{report.model}, after {report.after} steps of {names[0]}",
        "",
        "Norm of the difference from float32 over the norm in float32, %; for choices, the share that differs, %",
    ]
    for part, meaning in PARTS.items():
        lines += ["", meaning, head]
        by_layer = zip(*(report.errors[name][part] for name in names), strict=True)
        for number, values in enumerate(by_layer, start=1):
            lines.append(f"{number:8}{''.join(f'{100 * value:#10.3g}' for value in values)}")
    losses = ", ".join(f"{name} {loss:.5f}" for name, loss in report.loss.items())
    return "\n".join([*lines, "", f"Loss of the batch: {losses}"])


def save(report: GradientErrors, path: Path) -> None:
    """Writes it as JSON."""
    path.write_text(json.dumps(rounded(asdict(report)), indent=2) + "\n")


def load(path: Path) -> GradientErrors:
    """Reads what `save` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        return GradientErrors(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no results of gradient_error.py: {error}") from error


def publish(report: GradientErrors, out: Path) -> None:
    """Prints the results and puts them where `out` says: JSON, and the document beside it."""
    print(f"\n{results(report)}\n")
    save(report, Path(f"{out}.json"))
    update_document(results(report), out)
    print(f"wrote {out}.json")


def parse(arguments: list[str]) -> tuple[Settings, int]:
    """Reads the command line: settings, and steps of training before the measurement."""
    parser = make_parser("Compare gradients of recipes of fp4comm.moe.MoELayer with float32, layer by layer.")
    add = parser.add_argument
    add("--recipes", nargs="+", metavar="RECIPE", default=RECIPES, help="training before is with the first")
    add("--after", type=positive_int, default=100, help="steps of training, of the --steps that a run would have")
    add("--out", default="gradient_error", help="path of the results without suffix: .json follows")
    options = parse_with_preset(parser, arguments)
    after = options.pop("after")
    return Settings(wires=None, seeds=1, validation_windows=1, curve_points=1, **options), after


def check_steps(settings: Settings, after: int) -> None:
    """That there is a batch after the training.

    Raises:
        InvalidArgument: there is none.
    """
    if after >= settings.steps:
        raise InvalidArgument(f"--after is {after}; accepted: less than --steps ({settings.steps})")


def main() -> None:
    ranks = Ranks.started("gradient_error")
    with ranks.printing_once():
        settings, after = parse(sys.argv[1:])
    ranks.share_cores(settings.threads)
    try:
        check_steps(settings, after)
        ranks.use_device(settings.device)
        transport = check(settings, ranks)
        corpus = read_text(settings, ranks)
    except (ValueError, OSError) as error:
        ranks.close()
        sys.exit(f"gradient_error: {error}" if ranks.rank == 0 else 2)
    report = GradientErrors(
        command=ranks.command_line("gradient_error.py"),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions={"fp4comm": fp4comm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        machine=ranks.machine,
        num_ranks=ranks.size,
        transport=transport,
        settings={**settings.described(), "digest": corpus.digest},
        model="",
        after=after,
        loss={},
        errors={},
    )
    measure(settings, after, corpus, ranks, report)
    if ranks.rank == 0:
        publish(report, Path(settings.out))
    ranks.close()


if __name__ == "__main__":
    main()
