"""Expert parallelism of Hugging Face transformers, with fp4comm's numbers on the wire.

Importing this module makes it known to transformers as "fp4comm":

- From transformers 5.23 on, as an implementation of expert parallelism: `DistributedConfig(ep_size=8, fsdp_size=8,
  ep_implementation="fp4comm")`. `register` chooses its numbers, or makes further ones under other names.
- From transformers 5.0 on, `shard_experts(model, group)` keeps this rank's experts of a loaded model and lets it reach
  the others' through fp4comm.

The experts themselves are computed by transformers, with the kernel that the model's configuration names.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..communicator import EPCommunicator
from ..errors import InvalidArgument, NotAvailable, require
from ..precision import Precision
from ..received import Received
from .pool import Options, Pool, checked_options

__all__ = ["close", "communicators", "register", "shard_experts"]

NAME = "fp4comm"
_ATTRIBUTE = "_fp4comm_exchange"

RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


def register(name: str = NAME, *, precision: Precision | str = "fp4", **options: Any) -> None:
    """Makes `DistributedConfig(ep_implementation=name)` mean fp4comm with these numbers.

    Importing the module has called it once, with the defaults. Models that are loaded already keep what they have.

    Args:
        name: what `ep_implementation` will say; not one of transformers' own.
        precision: a `Precision` or the name of a recipe: "fp4" (default), "fp8", "mxfp4", "bf16", "fp32".
        options: further arguments of `EPCommunicator`: check_inputs, max_buffer_bytes, num_max_tokens_per_rank,
            num_sms, seed, timeout_secs, transport. Equal on all ranks, as is precision.

    Raises:
        InvalidArgument: an unknown recipe or option, or a name of transformers' own.
        NotAvailable: transformers is older than 5.23.
    """
    host = _expert_parallel()
    known = host.EPImplementationInterface()
    is_free = name not in known or issubclass(known[name], _ExpertParallel)
    require(is_free, "name", repr(name), "a name that transformers doesn't use itself")
    attributes = {"options": checked_options(precision, options)}
    host.EPImplementationInterface.register(
        name, type("Fp4CommEP", (_ExpertParallel, host.EPImplementation), attributes)
    )


def shard_experts(model: nn.Module, group: Any = None, *, precision: Precision | str = "fp4", **options: Any) -> None:
    """Spreads the experts of a loaded model over a group, for transformers 5.0 and newer. Collective.

    Every rank keeps its own slice of each experts module's parameters, as new parameters, and drops the rest: make
    optimizers and wrap the model afterwards. Everything else stays replicated. Each rank then computes on a batch of
    its own, and it is up to the training loop to add up the replicated parameters' gradients over the ranks; those of
    the experts are complete, sums over all ranks' tokens.

    Args:
        model: a model with all its experts, the same on all ranks.
        group: the ranks that share the experts: what `EPCommunicator` takes.
        precision, options: as for `register`, but for num_max_tokens_per_rank.

    Raises:
        InvalidArgument: the model has no experts that transformers can dispatch, has them sharded already, or their
            number is no multiple of the number of ranks; an unknown recipe or option.
    """
    require(
        "num_max_tokens_per_rank" not in options,
        "num_max_tokens_per_rank",
        "given to shard_experts",
        "ep_implementation of transformers 5.23 or newer, whose experts can leave out empty rows",
    )
    chosen = checked_options(precision, options)
    found = list(_experts_of(model))
    require(bool(found), "model", f"a {type(model).__name__} without experts modules", "a model with routed experts")
    for name, experts in found:
        is_sharded = hasattr(experts, _ATTRIBUTE) or any(hasattr(p, "placements") for p in experts.parameters())
        require(not is_sharded, "model", f"sharded already ({name})", "a model with all its experts on every rank")
    comms = [_POOL.get(group, e.num_experts, e.config.hidden_size, chosen) for _, e in found]  # checks sizes too
    for (_, experts), comm in zip(found, comms, strict=True):
        _keep_slice(experts, comm.rank * comm.num_local_experts, comm.num_local_experts)
        setattr(experts, _ATTRIBUTE, _Exchange(comm.num_experts, group, chosen))
        experts.forward = MethodType(_sharded_forward, experts)  # copies of the module bind it to themselves


def communicators() -> tuple[EPCommunicator, ...]:
    """The communicators of all models so far, or since `close`, in the order in which they were made.

    There is one for all layers of equal group, number of experts, hidden size and options; it is made in the first
    forward pass. Their `traffic` counts the bytes sent, their `stage_hook` is for profiling.
    """
    return _POOL.all()


def close() -> None:
    """Closes the communicators. Collective; to be called before the process groups are destroyed.

    A model that is used again afterwards makes a new one.
    """
    _POOL.close()


_POOL = Pool()


class _Exchange:
    """A layer's way to its experts: tokens and global expert numbers in, weighted sums out. Copies share it."""

    def __init__(self, num_experts: int, group: Any, options: Options) -> None:
        self._num_experts, self._group, self._options = num_experts, group, options

    def __deepcopy__(self, memo: dict[int, Any]) -> _Exchange:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model whose experts are spread over a group can't be pickled; save its state_dict()")

    def __call__(
        self, run_experts: RunExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """`(..., [T, hidden], [T, K], [T, K]) -> [T, hidden]`. Collective, as is its backward.

        Args:
            run_experts: `(rows [n, hidden], local experts [n, 1], weights [n, 1]) -> [n, hidden]`.
        """
        comm = _POOL.get(self._group, self._num_experts, hidden_states.shape[-1], self._options)
        recv, handle = comm.dispatch(hidden_states, top_k_index, top_k_weights.float())
        return comm.combine(self._compute(run_experts, recv), handle)

    def _compute(self, run_experts: RunExperts, recv: Received) -> Tensor:
        rows, ends = recv.x, recv.expert_offsets
        assert isinstance(rows, Tensor)
        assert ends is not None, "layout 'expert'"
        num_rows = rows.shape[0]
        if num_rows == 0:
            # A rank without rows computes one of zeros, so that its experts take part in backward: FSDP waits for them.
            rows = nn.functional.pad(rows, (0, 0, 0, 1))
            experts = torch.zeros(1, dtype=torch.int64, device=rows.device)
        else:
            # Rows are in the order of experts; those past the last one's end, with fixed shapes, get the number that
            # transformers' kernels leave out.
            places = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
            experts = torch.searchsorted(ends, places, right=True)
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return run_experts(rows, experts.unsqueeze(1), ones)[:num_rows]


class _ExpertParallel:
    """What `register` puts before transformers' `EPImplementation`, which has the same constructor and call."""

    options: Options

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)  # type: ignore[call-arg]  # the host's base is not known to mypy
        num_experts = int(experts.num_experts) * ep_mesh.size()
        implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        require(
            implementation != "eager" or dict(self.options).get("num_max_tokens_per_rank") is None,
            "experts_implementation",
            "'eager', with num_max_tokens_per_rank",
            "'grouped_mm' or 'batched_mm', which leave out the empty rows of fixed shapes",
        )
        hidden = getattr(getattr(experts, "config", None), "hidden_size", None)
        require(hidden is None or hidden % 32 == 0, "hidden_size", hidden, "a multiple of 32")  # now, not after loading
        self.tp_mesh = tp_mesh
        self._run_experts: RunExperts = experts.forward
        self._exchange = _Exchange(num_experts, ep_mesh.get_group(), self.options)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return self._exchange(self._run_experts, hidden_states, top_k_index, top_k_weights)
        # The ranks of a tensor-parallel group have the same tokens: each sends its part of them, so that none is
        # computed twice.
        parts = (_own_part(tensor, self.tp_mesh) for tensor in (hidden_states, top_k_index, top_k_weights))
        return _all_parts(self._exchange(self._run_experts, *parts), self.tp_mesh, hidden_states.shape[0])


def _own_part(tensor: Tensor, mesh: Any) -> Tensor:
    """This rank's part of the rows that all ranks of the mesh have. Backward gathers the parts' gradients."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    part: Tensor = whole.redistribute(mesh, [Shard(0)]).to_local()
    return part


def _all_parts(part: Tensor, mesh: Any, num_rows: int) -> Tensor:
    """The reverse: `[num_rows, hidden]` on all ranks of the mesh. Backward takes this rank's part of the gradient."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((num_rows, part.shape[1]))
    parts = DTensor.from_local(
        part.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(part.shape[1], 1)
    )
    whole: Tensor = parts.full_tensor()
    return whole


def _sharded_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts of a sharded model do. Those that are here are computed by their class's forward, by the kernel
    that the configuration says then."""
    run_experts = MethodType(type(experts).forward, experts)
    output: Tensor = getattr(experts, _ATTRIBUTE)(run_experts, hidden_states, top_k_index, top_k_weights)
    return output.to(hidden_states.dtype)


def _no_kernel(*_: Any) -> NoReturn:
    """The experts implementation "fp4comm", which is a way to experts, and computes none."""
    raise InvalidArgument(
        f"experts_implementation is {NAME!r}; accepted: one of transformers' own, to compute experts by, and to spread "
        "them fp4comm.adapters.transformers.shard_experts(model, group)"
    )


def _experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules whose forward transformers looks up by the name of the implementation."""
    for name, module in model.named_modules():
        is_dispatched = hasattr(type(module).forward, "__wrapped__") and hasattr(module, "config")
        if is_dispatched and isinstance(getattr(module, "num_experts", None), int) and _stacked(module):
            yield name, module


def _stacked(experts: Any) -> dict[str, nn.Parameter]:
    """The parameters with one slice for each expert."""
    own = experts.named_parameters(recurse=False)
    return {name: value for name, value in own if value.ndim >= 2 and value.shape[0] == experts.num_experts}


def _keep_slice(experts: Any, start: int, count: int) -> None:
    for name, whole in _stacked(experts).items():
        part = whole.detach()[start : start + count].clone()
        setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    experts.num_experts = count


def _host(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotAvailable(
            f"fp4comm.adapters.transformers needs transformers 5.0 or newer, and 5.23 for DistributedConfig("
            f"ep_implementation={NAME!r}): pip install 'transformers>=5.23' ({error})"
        ) from error


def _expert_parallel() -> Any:
    """`transformers.distributed.expert_parallel`, of a version that has implementations to choose from."""
    version = _host("transformers").__version__
    try:
        module = importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError:
        module = None
    if not hasattr(module, "EPImplementationInterface"):
        raise NotAvailable(
            f"transformers {version} has no ep_implementation; needed: 5.23 or newer (pip install "
            "'transformers>=5.23'), or fp4comm.adapters.transformers.shard_experts(model, group) instead"
        )
    return module


def _register_all() -> None:
    moe = _host("transformers.integrations.moe")
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _no_kernel)
    with contextlib.suppress(NotAvailable):  # an older transformers, where `shard_experts` is what there is
        register()


_register_all()
