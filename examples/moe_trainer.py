"""One training run: a model, its optimizer and its order of the data."""

from __future__ import annotations

import time
from collections import Counter

import torch
import torch.nn.functional as F
from moe_data import Corpus
from moe_model import ByteModel
from moe_ranks import Ranks
from moe_report import LEGS, Run
from moe_settings import TWIN, Settings, make_model
from torch import Tensor, nn

from fp4comm import InvalidArgument

_EVALUATION_BATCH = 32  # windows per rank at once
_CURVE_SHARE = 8  # a point of the validation curve takes one window in so many of those of the final loss


def read_text(settings: Settings, ranks: Ranks) -> Corpus:
    """The text to train on. Collective.

    Raises:
        OSError: there is none.
        InvalidArgument: it differs between ranks.
    """
    corpus = Corpus.of(settings.text)
    if not ranks.agree(int(corpus.digest[:12], 16)):
        raise InvalidArgument(f"--text is {settings.text}; accepted: one that is the same for all ranks")
    return corpus


class Gradients:
    """Sums of the gradients over the ranks, in one message.

    Gradients of the replicated weights are parts of one tensor, which autograd adds to. Those of experts are sums over
    all ranks' tokens already: they come with the rows.

    Args:
        model: whose gradients they are.
        ranks: that share it.
        clip: largest norm of all gradients together; 0 = as they are.
    """

    def __init__(self, model: ByteModel, ranks: Ranks, clip: float) -> None:
        self.ranks, self.clip, self.own = ranks, clip, model.own()
        replicated = model.replicated()
        sizes = [weight.numel() for weight in replicated]
        self.message = torch.zeros(sum(sizes) + 2, device=ranks.device)
        *parts, self._loss, self._square = self.message.split([*sizes, 1, 1])
        for weight, part in zip(replicated, parts, strict=True):
            weight.grad = part.view_as(weight)

    def zero(self) -> None:
        self.message.zero_()
        for weight in self.own:
            weight.grad = None

    def sum(self, loss: Tensor) -> Tensor:
        """Sums them, and `loss`, of which each rank gives its part; the loss over all ranks. Waits for no device."""
        self._loss.copy_(loss)
        if self.clip:
            self._square.copy_(self._square_of_own())
        self.ranks.sum_(self.message)
        total = self._loss.clone()
        if self.clip:
            self._scale()
        return total

    def _square_of_own(self) -> Tensor:
        return nn.utils.get_total_norm(self._of_own()).square()

    def _of_own(self) -> list[Tensor]:
        return [weight.grad for weight in self.own if weight.grad is not None]

    def _scale(self) -> None:
        """Brings the norm down to `clip` if it is larger, by the same factor on all ranks."""
        norm = (self.message[:-2].square().sum() + self._square).sqrt()
        factor = (self.clip / norm).clamp(max=1)
        self.message.mul_(factor)
        for gradient in self._of_own():
            gradient.mul_(factor)


class Trainer:
    """One run.

    Args:
        settings: what is trained.
        name: the wire or recipe.
        seed: of weights and order of the data.
        corpus: on the device of the ranks.
        ranks: all of them make one.
    """

    def __init__(self, settings: Settings, name: str, seed: int, corpus: Corpus, ranks: Ranks) -> None:
        self.settings, self.name, self.seed, self.corpus, self.ranks = settings, name, seed, corpus, ranks
        self.model = make_model(settings, name, seed, ranks)
        self.comm = self.model.comm
        if name == TWIN:
            perturb(self.model, seed)
        order = torch.Generator().manual_seed(seed)
        starts = corpus.starts(settings.steps, settings.batch, settings.length, order)
        self.starts = ranks.share(starts, dim=1).to(ranks.device)
        self.gradients = Gradients(self.model, ranks, settings.clip)
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def train(self, title: str) -> Run:
        """Runs all steps and evaluates."""
        steps, tokens = self.settings.steps, self.settings.batch * self.settings.length
        run = Run(self.name, self.seed)
        losses = torch.zeros(steps, device=self.ranks.device)
        points = self._evaluated_steps()
        for first, last in zip([0, *points], [*points, steps], strict=True):
            self.ranks.wait()
            start = time.perf_counter()
            for step in range(first, last):
                losses[step] = self.step(step)[0]
            self.ranks.wait()
            run.seconds += time.perf_counter() - start
            if last < steps:
                validation = self.evaluate(max(1, self.settings.validation_windows // _CURVE_SHARE))
                run.validation_loss.append((last, validation))
                self.report(title, last, losses[last - 1].item(), validation, run.seconds)
        run.training_loss = losses.tolist()
        sent = self.ranks.sum(torch.tensor([self.comm.traffic[leg] for leg in LEGS], dtype=torch.float64))
        run.bytes_per_token = dict(zip(LEGS, (sent / (steps * tokens)).tolist(), strict=True))
        run.tokens_per_second = steps * tokens / run.seconds
        run.final_loss = self.evaluate(self.settings.validation_windows)
        run.validation_loss.append((steps, run.final_loss))
        load = self.ranks.sum(self.load)
        idlest, busiest = (load / load.mean(dim=1, keepdim=True)).aminmax(dim=1)
        run.load = list(zip(idlest.tolist(), busiest.tolist(), strict=True))
        self.report(title, steps, run.training_loss[-1], run.final_loss, run.seconds)
        return run

    def _evaluated_steps(self) -> list[int]:
        """After how many steps to evaluate, without the last."""
        steps = self.settings.steps
        interval = max(1, steps // self.settings.curve_points)
        return list(range(interval, steps, interval))

    def step(self, step: int) -> Tensor:
        """The optimizer step number `step` (from 0); the training loss `[1]` over all ranks' tokens."""
        loss = self.backward(*self.corpus.batch(self.starts[step], self.settings.length))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * schedule(step + 1, self.settings.steps)
        self.optimizer.step()
        self.gradients.zero()
        return loss

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of all weights for a batch, of which each rank passes its share; the loss `[1]` over all of it."""
        loss = cross_entropy(self.model, inputs, targets)
        balance = torch.stack([layer.balance for layer in self.model.moe_layers]).sum()
        # The loss of the step is the mean over all tokens: each rank gives its part, and the parts are summed.
        ((loss + self.settings.balance * balance) / self.ranks.size).backward()
        return self.gradients.sum(loss.detach() / self.ranks.size)

    @torch.no_grad()
    def evaluate(self, num_windows: int) -> float:
        """Mean loss on `num_windows` fixed windows of the validation text, computed as in training."""
        traffic = Counter(self.comm.traffic)
        num_windows = -(-num_windows // self.ranks.size) * self.ranks.size  # as many on every rank
        batch = self.corpus.validation_batch(num_windows, self.settings.length)
        inputs, targets = (self.ranks.share(part).split(_EVALUATION_BATCH) for part in batch)
        loss = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        self.load = torch.zeros(self.settings.layers, self.settings.experts, device=self.ranks.device)
        for part, target in zip(inputs, targets, strict=True):
            loss += cross_entropy(self.model, part, target, "sum")
            self.load += torch.stack([layer.num_tokens_per_expert for layer in self.model.moe_layers])
        self.comm.traffic.clear()
        self.comm.traffic.update(traffic)
        return self.ranks.sum(loss).item() / (num_windows * self.settings.length)

    def report(self, title: str, step: int, loss: float, validation: float, seconds: float) -> None:
        tokens = step * self.settings.batch * self.settings.length
        sent = sum(self.comm.traffic.values()) / (tokens / self.ranks.size)
        self.ranks.print(
            f"{title}  step {step:4}/{self.settings.steps}  loss {loss:.3f}  validation {validation:.3f}  "
            f"{tokens / seconds:7,.0f} tokens/s  {sent:5,.0f} wire bytes/token"
        )

    def close(self) -> None:
        self.comm.close()


def cross_entropy(model: ByteModel, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def schedule(step: int, num_steps: int) -> float:
    """Factor of the learning rate: a tenth of the steps up, then down to zero, which calms the end of the run."""
    warm_up = max(1, num_steps // 10)
    return min(step / warm_up, (num_steps - step + 1) / (num_steps - warm_up + 1))


@torch.no_grad()
def perturb(model: ByteModel, seed: int) -> None:
    """Changes each weight by about a millionth of itself."""
    generator = torch.Generator(model.placement.device).manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        weight.mul_(1 + 1e-6 * noise)
