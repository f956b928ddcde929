"""A torch.distributed backend whose all-to-alls send float rows in small numbers.

    fp4comm.adapters.distributed.register()
    ep_group = dist.new_group(ranks, backend="fp4comm")

`dist.all_to_all_single` and `dist.all_to_all` over such a group send BF16, FP16 and FP32 rows as MXFP4 (or FP8).
Everything else, all other collectives included, goes to gloo (CPU) or NCCL (CUDA) as it is.

Code that moves tokens with `all_to_all_single` needs no other change. It neither knows about equal tokens for one rank
nor about the four legs of a layer, which `EPCommunicator` does.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import BufferRows, Rows, backend_for
from ..codec import FLOAT_DTYPES
from ..errors import InvalidArgument, require
from ..formats import BLOCK_SIZE, WIRE_KINDS
from ..memory import empty

BACKEND = "fp4comm"
WIRES = ("mxfp4", "fp8", "bf16")

_HAS_SEQUENCE_NUMBERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)  # where they are set by hand

# Whose C++ trampoline keeps Python's lock while the base class works, so that they are forwarded from here (torch's
# own group releases it): with the lock held, gloo's threads and ours can wait for each other for ever.
_FORWARDED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Options:
    """What a group compresses and how: `dist.new_group(ranks, backend="fp4comm", pg_options=Options(wire="fp8"))`.

    Attributes:
        wire: "mxfp4", "fp8", or "bf16" to send all rows as they are, float32 ones too.
        min_width: narrower rows are sent as they are: what is narrow is seldom a token (routing weights, counts held
            as floats). A width is the same on every rank; the bytes of a call or of a message are not, and with a
            limit on them the rounding of a token would depend on how many others go the same way.

    Raises:
        InvalidArgument: an option has no such value.
    """

    wire: str = "mxfp4"
    min_width: int = 256
    _timeout: ClassVar[timedelta | None] = None  # which meshes ask options for; None = torch's default

    def __post_init__(self) -> None:
        require(self.wire in WIRES, "wire", repr(self.wire), ", ".join(map(repr, WIRES)))
        is_width = isinstance(self.min_width, int) and self.min_width >= 0
        require(is_width, "min_width", repr(self.min_width), "an integer, 0 or more")

    def accepts(self, rows: Tensor) -> bool:
        """Whether tensors like `rows` are compressed: of its dtype, number of dimensions and last extent."""
        if self.wire == "bf16" or rows.dtype not in FLOAT_DTYPES or rows.ndim < 2:
            return False
        width = rows.shape[-1]
        return width > 0 and width % BLOCK_SIZE == 0 and width >= self.min_width


_defaults = Options()


def register(*, wire: str = "mxfp4", min_width: int = 256) -> None:
    """Makes "fp4comm" known to torch.distributed. The options are those of groups made afterwards without any.

    May be called again, for other options. Call it on every rank, with the same ones.

    Args:
        wire: see `Options`.
        min_width: see `Options`.

    Raises:
        InvalidArgument: an option has no such value.
    """
    global _defaults
    _defaults = Options(wire, min_width)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


class CompressedGroup(dist.ProcessGroup):
    """A process group that compresses its all-to-alls; what `dist.new_group(backend="fp4comm")` returns.

    A rank's rows for itself are rounded like all others: what a token becomes must not depend on where its expert is.

    Args:
        inner: the group that does the work, over the same ranks, with backends for the devices of the tensors.
        options: what to compress.

    Attributes:
        options: what is compressed.
        traffic: bytes that this rank's all-to-alls have sent to other ranks: under the wire's name those of compressed
            rows, under "given" what these were before, under "unchanged" those of everything else. `clear()` it to
            start again.
    """

    def __init__(self, inner: dist.ProcessGroup, options: Options) -> None:
        # the constructor with a store makes an object that C++ does not recognise as this one
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self._name = self._desc = ""
        self.options = options
        self.traffic: Counter[str] = Counter()

    def alltoall_base(  # type: ignore[override]  # torch's stub lacks the forms that C++ calls
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work | None:
        """What `dist.all_to_all_single` calls.

        Args:
            output: `[sum of output_split_sizes, ..., width]`, receives the rows in the order of their ranks.
            input: `[sum of input_split_sizes, ..., width]`.
            output_split_sizes: how many of the first dimension come from each rank; empty = equally many.
            input_split_sizes: how many of the first dimension go to each rank; empty = equally many.
            args, kwargs: torch's options.

        Raises:
            InvalidArgument: the sizes or shapes do not fit, or `output` is not contiguous.
        """
        rows = input if input.ndim >= 2 or output.ndim < 2 else output  # a rank without rows may not know their width
        if not self.options.accepts(rows):
            sent = _sizes("input_split_sizes", input_split_sizes, input, self.size()) if input.ndim else []
            self._count_unchanged(input.numel() // max(len(input), 1) * input.element_size(), sent)
            return _all_to_all_single(self._inner)(
                output, input, output_split_sizes, input_split_sizes, *args, **kwargs
            )
        width, rows_per_index = rows.shape[-1], rows.shape[1:-1].numel()
        _check_shape("output", output, rows)
        _check_shape("input", input, rows)
        require(output.is_contiguous(), "output", f"of strides {output.stride()}", "contiguous")
        outgoing = [n * rows_per_index for n in _sizes("input_split_sizes", input_split_sizes, input, self.size())]
        incoming = [n * rows_per_index for n in _sizes("output_split_sizes", output_split_sizes, output, self.size())]
        sources, places = [input.reshape(-1, width)], [output.view(-1, width)]
        return self._exchange(places, sources, incoming, outgoing, [output], args, kwargs)

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # its name since torch 2.13

    def alltoall(  # type: ignore[override]  # likewise
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work | None:
        """What `dist.all_to_all` calls: a tensor to and from each rank. (gloo by itself has none.)

        Args:
            outputs: `[..., width]` each, in the order of the ranks that the rows come from.
            inputs: `[..., width]` each, in the order of the ranks that the rows go to.
            args, kwargs: torch's options.

        Raises:
            InvalidArgument: there are not as many tensors as ranks, widths differ, or an output is not contiguous.
        """
        for argument, tensors in (("outputs", outputs), ("inputs", inputs)):
            require(len(tensors) == self.size(), argument, f"{len(tensors)} tensors", f"{self.size()}, one per rank")
        if not self.options.accepts(inputs[0]):
            self._count_unchanged(1, [tensor.nbytes for tensor in inputs])
            return self._inner.alltoall(list(outputs), list(inputs), *args, **kwargs)
        width = inputs[0].shape[-1]
        for argument, tensors in (("outputs", outputs), ("inputs", inputs)):
            for i, tensor in enumerate(tensors):
                fits = tensor.ndim >= 2 and tensor.shape[-1] == width and tensor.dtype == inputs[0].dtype
                received = f"{tensor.dtype} of shape {list(tensor.shape)}"
                require(fits, f"{argument}[{i}]", received, f"{inputs[0].dtype}, rows of {width}, as in inputs[0]")
        for i, tensor in enumerate(outputs):
            require(tensor.is_contiguous(), f"outputs[{i}]", f"of strides {tensor.stride()}", "contiguous")
        sources, places = [[t.reshape(-1, width) for t in tensors] for tensors in (inputs, outputs)]
        incoming, outgoing = [len(rows) for rows in places], [len(rows) for rows in sources]
        return self._exchange(places, sources, incoming, outgoing, list(outputs), args, kwargs)

    def _exchange(
        self,
        places: Sequence[Tensor],
        sources: Sequence[Tensor],
        incoming: Sequence[int],
        outgoing: Sequence[int],
        outputs: list[Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> dist.Work | None:
        """Sends the rows of `sources` one after the other, `outgoing[r]` to rank r; likewise receives `places`."""
        wire = _Wire(self.options.wire, sources[0])
        send, received = wire.buffer(sum(outgoing)), wire.buffer(sum(incoming))
        wire.encode(sources, send)
        given = wire.width * sources[0].element_size()
        self.traffic[self.options.wire] += self._bytes_to_others(wire.row_bytes, outgoing)
        self.traffic["given"] += self._bytes_to_others(given, outgoing)
        sizes = [n * wire.row_bytes for n in incoming], [n * wire.row_bytes for n in outgoing]
        work = _all_to_all_single(self._inner)(received.view(-1), send.view(-1), *sizes, *args, **kwargs)
        if work is None:  # nobody waits: NCCL has put it into the current stream
            wire.decode(received, places)
            return None
        return _Arrival(work, lambda: wire.decode(received, places), outputs)

    def _bytes_to_others(self, unit: int, sizes: Sequence[int]) -> int:
        return unit * (sum(sizes) - sizes[self.rank()])

    def _count_unchanged(self, unit: int, sizes: Sequence[int]) -> None:
        if sizes:
            self.traffic["unchanged"] += self._bytes_to_others(unit, sizes)

    # C++ asks a group that is written in Python for its names.

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        self._inner._set_group_name(name)  # type: ignore[arg-type]  # a str to C++, a class to the stub

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc
        self._inner._set_group_desc(desc)

    def __repr__(self) -> str:
        return f"CompressedGroup(rank {self.rank()} of {self.size()}, {self.options})"


def _forward(name: str) -> Callable[..., Any]:
    def method(self: CompressedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"`{name}` of gloo or NCCL."
    return method


for _name in _FORWARDED:
    if hasattr(dist.ProcessGroup, _name):  # names change between versions of torch
        setattr(CompressedGroup, _name, _forward(_name))


class _Wire:
    """Rows of one width in the wire format, `[codes | scales]` each, as in `EPCommunicator`."""

    def __init__(self, name: str, like: Tensor) -> None:
        self.width, self._device = like.shape[1], like.device
        self._kind = WIRE_KINDS[name]
        self._backend = backend_for(like)
        self._layout = backend_for(None).row_layout(self._kind, self.width, 0)
        self.row_bytes: int = self._layout.row_bytes

    def buffer(self, num_rows: int) -> Tensor:
        return empty((num_rows, self.row_bytes), torch.uint8, self._device)

    def encode(self, sources: Sequence[Tensor], buffer: Tensor) -> None:
        for rows, part in zip(sources, self._parts(buffer, sources), strict=True):
            self._convert(Rows.of(rows), part)

    def decode(self, buffer: Tensor, places: Sequence[Tensor]) -> None:
        for rows, part in zip(places, self._parts(buffer, places), strict=True):
            self._convert(part, Rows.of(rows))

    def _parts(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[Rows]:
        ends = accumulate(map(len, tensors))
        parts = [buffer[end - len(rows) : end] for rows, end in zip(tensors, ends, strict=True)]
        return [BufferRows(self._kind, part, self._layout) for part in parts]

    def _convert(self, source: Rows, target: Rows) -> None:
        if len(source):
            self._backend.convert_rows(source, target)


class _Arrival(dist.Work):
    """An all-to-all under way, after which rows must be expanded. Complete once they are.

    Args:
        work: the all-to-all of bytes.
        expand: writes the outputs; called once, on the thread and stream that waits.
        outputs: result of the future, as with NCCL.
    """

    def __init__(self, work: dist.Work, expand: Callable[[], None], outputs: list[Tensor]) -> None:
        super().__init__()
        self._work, self._outputs = work, outputs
        self._expand: Callable[[], None] | None = expand
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        if self._future is not None:
            self._future.wait()  # on a GPU it expands on a stream of its own
        else:
            self._finish()
        return True

    def is_completed(self) -> bool:
        if self._future is not None:
            return self._future.done()
        return self._work.is_completed() and self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = self._work.get_future().then(self._after)
        return self._future

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def _after(self, done: torch.futures.Future[Any]) -> list[Tensor]:
        done.value()  # raises what the exchange did
        self._finish()
        return self._outputs

    def _finish(self) -> None:
        with self._lock:
            if self._expand is not None:
                self._expand()
            self._expand = None  # and let the buffers go


def _create(facts: Any, options: Options | None) -> CompressedGroup:
    """What torch calls for a new group: `facts` has the store, this rank, the ranks and the timeout."""
    if not dist.is_initialized():
        raise InvalidArgument(
            'backend of init_process_group is "fp4comm"; accepted: dist.init_process_group() with a backend of torch, '
            'and then dist.new_group(ranks, backend="fp4comm") for the ranks that share experts'
        )
    options = _defaults if options is None else options
    is_ours = isinstance(options, Options)
    require(is_ours, "pg_options", f"a {type(options).__name__}", "fp4comm.adapters.distributed.Options or None")
    _agree(facts, options)
    inner = dist.ProcessGroup(facts.store, facts.group_rank, facts.group_size)
    group = CompressedGroup(inner, options)
    inner_types = dist.ProcessGroup.BackendType
    for device, kind, backend in _inner_backends(facts):
        for owner in (inner, group):
            owner._register_backend(torch.device(device), getattr(inner_types, kind), backend)
            owner._set_default_backend(getattr(inner_types, kind))
    return group


def _inner_backends(facts: Any) -> list[tuple[str, str, Any]]:
    """Gloo for tensors on the CPU and, where there are GPUs, NCCL for those on them: `(device, type, backend)`."""
    store, rank, size = facts.store, facts.group_rank, facts.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=facts.timeout)
    backends: list[tuple[str, str, Any]] = [("cpu", "GLOO", gloo)]
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = facts.timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)
        backends.append(("cuda", "NCCL", nccl))
    for _, _, backend in backends:
        backend.options.global_ranks_in_group = facts.global_ranks_in_group
        backend.options.group_name = facts.group_id
        if _HAS_SEQUENCE_NUMBERS:
            backend._set_sequence_number_for_group()
    return backends


def _agree(facts: Any, options: Options) -> None:
    """Raises on all ranks of the new group if they do not have the same options."""
    keys = [f"options/{rank}" for rank in range(facts.group_size)]
    facts.store.set(keys[facts.group_rank], json.dumps(asdict(options)))
    facts.store.wait(keys, facts.timeout)
    texts = [text.decode() for text in facts.store.multi_get(keys)]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    theirs = f"{texts[other]} on rank {other} of the group and {texts[0]} on rank 0"
    require(other == 0, "options of the fp4comm group", theirs, "the same in register() or pg_options on all its ranks")


def _all_to_all_single(group: dist.ProcessGroup) -> Callable[..., dist.Work | None]:
    return getattr(group, "all_to_all_single", None) or group.alltoall_base


def _sizes(argument: str, sizes: Sequence[int], tensor: Tensor, num_ranks: int) -> list[int]:
    """The sizes along the first dimension; equal ones for none.

    Raises:
        InvalidArgument: they are not one per rank, or their sum is not the extent.
    """
    extent = len(tensor)
    if not sizes:
        accepted = f"a multiple of the {num_ranks} ranks, or {argument}"
        require(extent % num_ranks == 0, f"first extent for {argument}=None", extent, accepted)
        return [extent // num_ranks] * num_ranks
    numbers = [int(size) for size in sizes]
    fits = len(numbers) == num_ranks and min(numbers) >= 0 and sum(numbers) == extent
    require(fits, argument, numbers, f"{num_ranks} numbers, one per rank, whose sum is the first extent, {extent}")
    return numbers


def _check_shape(argument: str, tensor: Tensor, rows: Tensor) -> None:
    fits = tensor.numel() == 0 or tensor.shape[1:] == rows.shape[1:]
    require(fits, argument, f"of shape {list(tensor.shape)}", f"[n, {', '.join(map(str, rows.shape[1:]))}]")
