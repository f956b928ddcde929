"""What the ranks of test_transformers.py do: tiny models of five families, trained with and without expert parallelism.

`torchrun --nproc-per-node 2 tests/adapters/transformers_models.py` prints the table of docs/transformers.md, and with
the argument `counting` that of the task that the tests use.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fp4comm

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
VOCABULARY = 64
LENGTH = 24
NUM_SEQUENCES = 16  # of both ranks together, in a step of fine-tuning
LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")
Losses = list[float]
Differences = dict[str, float]


@dataclass(frozen=True)
class Optimization:
    """How AdamW is used.

    AdamW divides a gradient by its size plus eps, so that with its usual eps of 1e-8 the last bit of a gradient near
    zero decides on the sign of a whole step. An eps near the size of the gradients keeps rounding what it is.
    """

    rate: float = 1e-3
    warm_up: int = 1  # steps until the learning rate, which rises linearly, is reached
    eps: float = 1e-5

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.rate * min(1.0, (step + 1) / self.warm_up)


@dataclass(frozen=True)
class Lesson:
    """Steps of training: sequences for each, `[NUM_SEQUENCES, length]` int64, and the optimizer's settings."""

    batches: list[Tensor] = field(default_factory=list)
    optimization: Optimization = Optimization()


@dataclass(frozen=True)
class Task:
    """What a model learns first, and what it is fine-tuned on."""

    vocabulary: int
    before: Lesson
    after: Lesson


def tiny_config(family: str, hidden: int = 64, vocabulary: int = VOCABULARY) -> Any:
    """A configuration of the family with two layers, of which at least one has experts."""
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 16},
        ),
        "olmoe": ("OlmoeConfig", {"intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 8}),
        "gpt_oss": (
            "GptOssConfig",
            {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 16},
        ),
        "deepseek_v3": (
            "DeepseekV3Config",
            {
                "intermediate_size": 64,
                "moe_intermediate_size": 48,
                "n_routed_experts": 8,
                "num_experts_per_tok": 4,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
        ),
    }
    name, fields = own[family]
    return getattr(importlib.import_module("transformers"), name)(**common, **fields)


def texts(num_sequences: int, seed: int, first_step: int = 1) -> Tensor:
    """`[num_sequences, LENGTH]` sequences that can be learned: each counts on by one of three steps of its own."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY - 3, (num_sequences, 1), generator=random)
    step = first_step + torch.randint(3, (num_sequences, 1), generator=random)
    return 3 + (start + step * torch.arange(LENGTH)) % (VOCABULARY - 3)


def counting(num_steps: int = 32) -> Task:
    """A task of a few seconds: to count by other steps. Its loss falls so fast that small errors show."""
    before = [texts(NUM_SEQUENCES, -seed) for seed in range(1, 65)]
    after = [texts(NUM_SEQUENCES, seed, 4) for seed in range(num_steps)]
    return Task(VOCABULARY, Lesson(before, Optimization(2e-3)), Lesson(after, Optimization(5e-4)))


def source_code() -> bytes:
    """The sources of the Python standard library, without what is not part of every installation or hardly text."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return b"".join((root / name).read_bytes() for name in names if not left_out & set(name.parts))


def prose() -> bytes:
    """English: Python's documentation of its language, which comes with every Python for `help`."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def windows(text: bytes, num_steps: int, length: int, seed: int) -> list[Tensor]:
    """For each step, sequences of bytes that begin anywhere in the text."""
    random = torch.Generator().manual_seed(seed)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(data) - length + 1, (num_steps, NUM_SEQUENCES, 1), generator=random)
    return list(data[starts + torch.arange(length)].long())


def reading(num_steps_before: int = 300, num_steps: int = 64, length: int = 128) -> Task:
    """Bytes of real text: a model that has read source code is fine-tuned on prose."""
    before = Lesson(windows(source_code(), num_steps_before, length, 0), Optimization(1e-3, 20, 1e-8))
    after = Lesson(windows(prose(), num_steps, length, 1), Optimization(2e-4, 8, 1e-8))
    return Task(256, before, after)


@contextmanager
def saved_model(group: Any, config: Any, favourites: int = 0, lesson: Lesson = Lesson()) -> Iterator[str]:
    """A folder with a model of that configuration, in float32, the same for all ranks, after a lesson.

    Routers with a bias prefer the first few experts so much that nobody takes any other.
    """
    transformers: Any = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, 0, group)
        if dist.get_rank(group) == 0:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():  # what starts as zeros and ones would hide mistakes
                for name, parameter in model.named_parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
                    if name.endswith("router.bias"):
                        parameter[:favourites] += 100
            Run(model, lesson, slice(None))
            model.save_pretrained(folder)
        dist.barrier(group)
        yield shared[0]
        dist.barrier(group)


def load(
    folder: str, implementation: str | None = None, tp_size: int = 1, ep_size: int | None = None, **options: Any
) -> Any:
    """The model of the folder, in one process or with its experts over groups of ep_size ranks (None = all)."""
    transformers: Any = importlib.import_module("transformers")
    if implementation is not None:
        distributed: Any = importlib.import_module("transformers.distributed")
        num_ranks = dist.get_world_size()
        options["distributed_config"] = distributed.DistributedConfig(
            tp_size=tp_size,
            fsdp_size=num_ranks // tp_size,
            ep_size=ep_size or num_ranks,
            ep_implementation=implementation,
        )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient as it is without parallelism."""
    gather: Any = getattr(tensor, "full_tensor", tensor.clone)
    result: Tensor = gather()
    return result.detach().cpu()


class Run:
    """What a lesson leaves: losses, the first gradients, the last parameters."""

    def __init__(self, model: Any, lesson: Lesson, own: slice, group: Any = None) -> None:
        how = lesson.optimization
        optimizer = torch.optim.AdamW(model.parameters(), eps=how.eps, foreach=False)  # some are DTensors
        self.losses: Losses = []
        self.gradients: dict[str, Tensor] = {}
        for step, ids in enumerate(lesson.batches):
            optimizer.param_groups[0]["lr"] = how.rate_at(step)
            part = ids[own].to(model.device)
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            if not self.gradients:
                named = model.named_parameters()
                self.gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}
            optimizer.step()
            mean = loss.detach().clone()
            if group is not None:
                dist.all_reduce(mean, group=group)
                mean /= dist.get_world_size(group)
            self.losses.append(float(mean))
        self.parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}


def device_of(group: Any) -> torch.device:
    """The ranks' GPUs if the group has NCCL."""
    has_nccl = "nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


def share(group: Any, tp_size: int = 1) -> slice:
    """The sequences of a batch that are this rank's: equally many, so that the mean of means is the mean."""
    return slice(dist.get_rank(group) // tp_size, None, dist.get_world_size(group) // tp_size)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative distance of two tensors of the same name, in the Euclidean norm."""
    assert one.keys() == other.keys()
    distances = [float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-6)) for name in other]
    return max(distances)


def compare(
    group: Any, family: str, implementation: str, *, favourites: int = 0, tp_size: int = 1, **options: Any
) -> Differences:
    """The largest differences between training in one process and with experts over the ranks."""
    lesson = Lesson([texts(8, seed) for seed in range(3)])
    with saved_model(group, tiny_config(family), favourites) as folder:
        alone = Run(load(folder), lesson, slice(None))
        model = load(folder, implementation, tp_size, **options)
        spread = Run(model, lesson, share(group, tp_size), group)
    losses = zip(alone.losses, spread.losses, strict=True)
    return {
        "losses": max(abs(one - other) / one for one, other in losses),
        "gradients": difference(spread.gradients, alone.gradients),
        "parameters": difference(spread.parameters, alone.parameters),
    }


def compare_logits(group: Any, family: str, one: str, other: str, dtype: torch.dtype) -> float:
    """The relative distance of the logits of two implementations, in the Euclidean norm."""
    ids = texts(8, 0)[share(group)]
    with saved_model(group, tiny_config(family)) as folder, torch.no_grad():
        models = [load(folder, name, dtype=dtype) for name in (one, other)]
        first, second = (model(input_ids=ids.to(model.device)).logits.float() for model in models)
    return float((first - second).norm() / second.norm())


def compare_sharded(group: Any, family: str) -> Differences:
    """The same for `shard_experts`, where the caller sums the gradients of all but the experts."""
    adapter: Any = importlib.import_module("fp4comm.adapters.transformers")
    ids, size = texts(8, 0), dist.get_world_size(group)
    with saved_model(group, tiny_config(family)) as folder:
        alone, model = (load(folder).to(device_of(group)) for _ in range(2))
    ids = ids.to(model.device)
    alone_loss = alone(input_ids=ids, labels=ids).loss
    alone_loss.backward()
    adapter.shard_experts(model, group, precision="fp32")
    loss = model(input_ids=ids[share(group)], labels=ids[share(group)]).loss / size
    loss.backward()
    expected, found = {}, {}
    for (name, parameter), whole_one in zip(model.named_parameters(), alone.parameters(), strict=True):
        found[name], expected[name] = parameter.grad, whole_one.grad
        if parameter.shape == whole_one.shape:
            dist.all_reduce(found[name], group=group)
        else:
            expected[name] = whole_one.grad.chunk(size)[dist.get_rank(group)]
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return {"losses": abs(float(total / alone_loss.detach()) - 1), "gradients": difference(found, expected)}


def errors(group: Any) -> dict[str, str]:
    """What is said to mistakes for which the ranks are needed."""
    adapter: Any = importlib.import_module("fp4comm.adapters.transformers")
    adapter.register("capacity", precision="fp32", num_max_tokens_per_rank=256)
    odd = tiny_config("mixtral")
    odd.num_local_experts = 7
    said = {}

    def attempt(name: str, config: Any, use: Callable[[str], object]) -> None:
        with saved_model(group, config) as folder:
            try:
                use(folder)
            except ValueError as error:
                said[name] = f"{type(error).__name__}: {error}"

    def shard_twice(folder: str) -> None:
        model = load(folder)
        adapter.shard_experts(model, group)
        adapter.shard_experts(model, group)

    attempt("hidden", tiny_config("mixtral", 80), lambda folder: load(folder, "fp4comm"))
    attempt("odd, sharded by hand", odd, lambda folder: adapter.shard_experts(load(folder), group))
    attempt("odd", odd, lambda folder: load(folder, "fp4comm"))
    attempt("twice", tiny_config("mixtral"), shard_twice)
    attempt("eager", tiny_config("gpt_oss"), lambda folder: load(folder, "capacity", experts_implementation="eager"))
    return said


@dataclass
class FineTuning:
    """Losses, bytes sent by all ranks for each leg, and what a leg in BF16 with a row per choice would have sent."""

    losses: Losses
    sent: Counter[str]
    per_choice: int
    num_communicators: int

    def last(self) -> float:
        """The mean of the last eight losses."""
        return sum(self.losses[-8:]) / 8

    def distance(self, other: FineTuning) -> float:
        """Between two curves: the mean of their distances, as a part of the mean loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return sum(abs(one - two) for one, two in pairs) / sum(other.losses)

    def share(self, *legs: str) -> float:
        """Bytes of these legs, or all four, as a part of those in BF16 with a row per choice."""
        return sum(self.sent[leg] for leg in legs or LEGS) / (len(legs or LEGS) * self.per_choice)


def fine_tune(group: Any, folder: str, implementation: str, lesson: Lesson, nudge: float = 0.0) -> FineTuning:
    """Trains all parameters of a model; its weights are larger by a part `nudge`."""
    adapter: Any = importlib.import_module("fp4comm.adapters.transformers")
    adapter.close()
    model = load(folder, implementation)
    hidden = model.config.hidden_size
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    chosen_elsewhere = 0

    def count(module: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal chosen_elsewhere
        chosen_elsewhere += int((inputs[1] // module.num_experts != dist.get_rank(group)).sum())

    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "num_experts"):
            module.register_forward_pre_hook(count)
    losses = Run(model, lesson, share(group), group).losses
    comms = adapter.communicators()
    own: tuple[Counter[str], int] = (sum((comm.traffic for comm in comms), Counter()), chosen_elsewhere * hidden * 2)
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, own, group)
    sent: Counter[str] = sum((part for part, _ in of_all), Counter())
    return FineTuning(losses, sent, sum(part for _, part in of_all), len(comms))


def on_two_ranks(group: Any) -> dict[str, Any]:
    """All that test_transformers.py looks at with two ranks, since starting them takes longest."""
    adapter: Any = importlib.import_module("fp4comm.adapters.transformers")
    adapter.register("exact", precision="fp32")
    adapter.register("bf16", precision="bf16")
    adapter.register("fixed", precision="fp32", num_max_tokens_per_rank=128)
    results: dict[str, Any] = {family: compare(group, family, "exact") for family in FAMILIES}
    results["fixed"] = compare(group, "gpt_oss", "fixed")
    results["eager"] = compare(group, "qwen3_moe", "exact", experts_implementation="eager")
    results["tensor parallel"] = compare(group, "qwen3_moe", "exact", tp_size=2)
    results["sharded"] = compare_sharded(group, "gpt_oss")
    results["bf16"] = compare_logits(group, "olmoe", "bf16", "all_to_all", torch.bfloat16)
    results["errors"] = errors(group)
    task = counting(16)
    with saved_model(group, tiny_config("olmoe", 256), lesson=task.before) as folder:
        names = ("all_to_all", "fp4comm")
        results |= {f"fine-tuned {name}": fine_tune(group, folder, name, task.after) for name in names}
    results["table"] = table(group, reading(4, 16, 16), ("deepseek_v3",))
    adapter.close()
    return results


def on_four_ranks(group: Any) -> dict[str, Any]:
    """The same with four ranks, and groups that are not the world."""
    adapter: Any = importlib.import_module("fp4comm.adapters.transformers")
    adapter.register("exact", precision="fp32")
    results = {
        "groups of two": compare(group, "mixtral", "exact", ep_size=2),
        "tensor parallel": compare(group, "qwen3_moe", "exact", tp_size=2),
        "ranks without rows": compare(group, "gpt_oss", "exact", favourites=4),
    }
    adapter.close()
    return results


def family_rows(group: Any, family: str, folder: str, lesson: Lesson) -> list[str]:
    """Of one model."""
    fields = tiny_config(family).to_dict()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(fields[name] for name in names if name in fields)
    start = f"| {family} | {fields['num_experts_per_tok']} of {num_experts} |"
    stock = fine_tune(group, folder, "all_to_all", lesson)
    rows = [f"{start} all_to_all | {stock.losses[0]:.3f} | {stock.last():.4f} | | | |"]
    for name in ("all_to_all", "fp4comm", "fp4comm fp8", "fp4comm mxfp4"):
        is_twin = name == "all_to_all"  # what chance does
        run = fine_tune(group, folder, name, lesson, nudge=1e-6 if is_twin else 0)
        sent = "| | |" if is_twin else f"| {run.share('dispatch'):.3f} | {run.share():.3f} |"
        title = "its twin" if is_twin else name
        rows += [f"{start} {title} | {run.losses[0]:.3f} | {run.last():.4f} | {run.distance(stock):.2%} {sent}"]
    return rows


def table(group: Any, task: Task, families: Sequence[str] = FAMILIES) -> str:
    """The table of docs/transformers.md."""
    adapter: Any = importlib.import_module("fp4comm.adapters.transformers")
    for recipe in ("fp8", "mxfp4"):
        adapter.register(f"fp4comm {recipe}", precision=recipe)
    rows = ["| model | top-k | ep_implementation | first loss | last | curve from stock | dispatch bytes | all bytes |"]
    rows += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for family in families:
        config = tiny_config(family, 256, task.vocabulary)
        with saved_model(group, config, lesson=task.before) as folder:
            rows += family_rows(group, family, folder, task.after)
    return "\n".join(rows)


if __name__ == "__main__":
    is_counting = sys.argv[1:] == ["counting"]
    text = table(fp4comm.world_group(), counting() if is_counting else reading())
    if dist.get_rank() == 0:
        print(text)
    importlib.import_module("fp4comm.adapters.transformers").close()
    dist.destroy_process_group()
