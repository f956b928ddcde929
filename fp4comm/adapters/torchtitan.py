"""fp4comm as the token dispatcher of torchtitan, through its overrides.

    torchtitan ... --override.imports fp4comm.adapters.torchtitan.token_dispatcher

or, with options, `--override.imports 'fp4comm.adapters.torchtitan.token_dispatcher={"precision": "mxfp4"}'`. Takes the
place of the standard all-to-all dispatcher in every layer, also of the one that pads for FP8 GEMMs. Without expert
parallelism nothing changes.

`fp4comm.adapters.torchtitan.save_exchanges`, a second override, keeps what was exchanged where selective activation
checkpointing would exchange it once more.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..communicator import EPCommunicator
from ..errors import NotAvailable, require
from .pool import Options, Pool, checked_options

if TYPE_CHECKING:
    from ..ops import CompiledHandle

__all__ = ["close", "communicators", "save_exchanges", "token_dispatcher"]


def _host(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotAvailable(
            f"fp4comm.adapters.torchtitan needs torchtitan 0.3 or newer: pip install 'torchtitan>=0.3' ({error})"
        ) from error


_config: Any = _host("torchtitan.config")
if not hasattr(_config, "override"):
    raise NotAvailable("this torchtitan has no overrides; needed: 0.3 or newer (pip install 'torchtitan>=0.3')")
_dispatchers: Any = _host("torchtitan.models.common.token_dispatcher")
_spmd_types: Any = _host("spmd_types")  # which torchtitan checks layouts with, on demand
_checkpointing: Any = _host("torchtitan.distributed.activation_checkpoint")


@dataclass(frozen=True)
class _Metadata:
    """What `combine` needs of `dispatch`."""

    comm: EPCommunicator
    handle: CompiledHandle
    topk_weights: Tensor


class _Exchange:
    """What is put before a dispatcher of torchtitan: its `dispatch` and `combine` where there is expert parallelism."""

    num_experts: int
    ep_mesh: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the host's base is not known to mypy
        self._options = checked_options(config.precision, config.options)
        self._alignment = getattr(config, "pad_multiple", 1)
        self._place = 0

    def init_buffer(self) -> None:
        """What torchtitan calls once the ranks are known."""
        if self.ep_mesh is not None:
            wiring = (self.ep_mesh.get_group(), self.num_experts, self._options, self._alignment)
            if wiring not in _WIRINGS:
                _WIRINGS.append(wiring)
            self._place = _WIRINGS.index(wiring)

    def dispatch(
        self, x: Tensor, topk_scores: Tensor, topk_expert_ids: Tensor, num_tokens_per_expert: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Sends tokens to their experts. Collective.

        Args:
            x: `[T, hidden]`.
            topk_scores: `[T, K]`, applied in float32 by `combine`.
            topk_expert_ids: `[T, K]`.
            num_tokens_per_expert: of these tokens; not needed.

        Returns:
            Rows in the order of this rank's experts, how many each has (padding included), and what `combine` needs.
        """
        if self.ep_mesh is None:
            whole: Any = super().dispatch(x, topk_scores, topk_expert_ids, num_tokens_per_expert)  # type: ignore[misc]  # likewise
            return whole  # type: ignore[no-any-return]  # likewise
        comm = _communicator(self._place, x.shape[1])
        received, handle = ops.dispatch(comm, x, topk_expert_ids, topk_scores.float())
        ends = received.expert_offsets
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return received.x, counts, _Metadata(comm, handle, received.topk_weights)

    def combine(self, routed_output: Tensor, metadata: Any, x: Tensor) -> Tensor:
        """Brings the experts' results home, weighted and summed per token. Collective."""
        if self.ep_mesh is None:
            whole: Tensor = super().combine(routed_output, metadata, x)  # type: ignore[misc]  # likewise
            return whole
        return ops.combine(metadata.comm, routed_output, metadata.topk_weights, metadata.handle)


class Dispatcher(_Exchange, _dispatchers.AllToAllTokenDispatcher):  # type: ignore[misc]  # likewise
    """In place of `AllToAllTokenDispatcher`."""

    @dataclass(kw_only=True, slots=True)
    class Config(_dispatchers.AllToAllTokenDispatcher.Config):  # type: ignore[misc]  # likewise
        precision: str = "fp4"
        options: dict[str, Any] = field(default_factory=dict)


class PaddedDispatcher(_Exchange, _dispatchers.TorchAOTokenDispatcher):  # type: ignore[misc]  # likewise
    """In place of `TorchAOTokenDispatcher`, with experts' rows padded to a multiple of its `pad_multiple`."""

    @dataclass(kw_only=True, slots=True)
    class Config(_dispatchers.TorchAOTokenDispatcher.Config):  # type: ignore[misc]  # likewise
        precision: str = "fp4"
        options: dict[str, Any] = field(default_factory=dict)


_REPLACEMENTS: dict[type, Any] = {
    _dispatchers.AllToAllTokenDispatcher.Config: Dispatcher.Config,
    _dispatchers.TorchAOTokenDispatcher.Config: PaddedDispatcher.Config,
}


@_config.override(  # type: ignore[untyped-decorator]  # likewise
    target=_dispatchers.BaseEPTokenDispatcher.Config, description="fp4comm sends the tokens"
)
def token_dispatcher(config: Any, *, precision: str = "fp4", **options: Any) -> Any:
    """The override of torchtitan's dispatcher.

    Args:
        config: of the dispatcher that is replaced.
        precision: the name of a recipe: "fp4" (default), "fp8", "mxfp4", "bf16", "fp32".
        options: further arguments of `EPCommunicator`: check_inputs, max_buffer_bytes, num_max_tokens_per_rank,
            num_sms, seed, timeout_secs, transport. Equal on all ranks, as is precision.

    Raises:
        InvalidArgument: an unknown recipe or option, or another dispatcher than those named above.
    """
    checked_options(precision, options)
    for name, value in options.items():
        require(not isinstance(value, (dict, list)), name, repr(value), "a single value")
    replacement = _REPLACEMENTS.get(type(config))
    accepted = ", ".join(cls.__qualname__ for cls in _REPLACEMENTS)
    require(replacement is not None, "token dispatcher", type(config).__qualname__, accepted)
    return _config.derive(config, replacement, precision=precision, options=options)


class SaveExchanges(_checkpointing.SelectiveAC):  # type: ignore[misc]  # likewise
    """Selective activation checkpointing that keeps the results of dispatch and combine."""

    @dataclass(kw_only=True, slots=True)
    class Config(_checkpointing.SelectiveAC.Config):  # type: ignore[misc]  # likewise
        pass

    def get_save_ops(self) -> set[Any]:
        """Those of torchtitan, and the exchanges."""
        exchanges = {torch.ops.fp4comm.dispatch.default, torch.ops.fp4comm.combine.default}
        return {*super().get_save_ops(), *exchanges}


@_config.override(  # type: ignore[untyped-decorator]  # likewise
    target=_checkpointing.SelectiveAC.Config, exact=True, description="selective checkpointing keeps exchanges"
)
def save_exchanges(config: Any) -> Any:
    """The override of torchtitan's selective activation checkpointing."""
    return _config.derive(config, SaveExchanges.Config)


def communicators() -> tuple[EPCommunicator, ...]:
    """The communicators so far, or since `close`, in the order in which they were made.

    There is one for all layers of equal group, number of experts, hidden size, padding and options; it is made in the
    first forward pass. Their `traffic` counts the bytes sent, their `stage_hook` is for profiling.
    """
    return _pool.all()


def close() -> None:
    """Closes the communicators. Collective; to be called before the process groups are destroyed."""
    _pool.close()


_pool = Pool()
_WIRINGS: list[tuple[Any, int, Options, int]] = []  # group, number of experts, options and alignment, each once


# A constant to a compiler, so that the arguments must be numbers.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no type for it
def _communicator(place: int, hidden: int) -> EPCommunicator:
    """Of a place in `_WIRINGS`; made at its first use, since only tokens tell the hidden size."""
    group, num_experts, options, alignment = _WIRINGS[place]
    with _spmd_types.no_typecheck():  # it would refuse what the ranks tell each other here
        return _pool.get(group, num_experts, hidden, options, alignment)
