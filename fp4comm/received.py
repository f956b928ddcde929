"""What a dispatch brings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .backends import backend_for
from .codec import FP8Columns, FP8Tensor, MXFP4Tensor
from .errors import InvalidArgument
from .exchange import WireRows
from .formats import Kind
from .fp8_rows import FP8Rows
from .routing import Routing


@dataclass(frozen=True, eq=False, repr=False)
class Received:
    """What arrived for the local experts.

    With layout "expert" there is a row per received token and local expert: ordered by expert, then source rank, then
    token, then slot, every expert's rows padded with zeros to a multiple of `expert_alignment`. With layout "rank"
    there is a row per received token: ordered by source rank, then token.

    With `num_max_tokens_per_rank=n` the number of rows is fixed. In layout "expert" zero rows follow. In layout "rank",
    and in what is said below to have a row per received token, the rows from rank r start at `r * n`, and the unused
    ones are zero in x and have no expert.

    Attributes:
        x: `[num_rows, hidden]`: a tensor, or an `FP8Tensor` or `fp4comm.moe.FP8Rows` if dispatch was called with
            `out="fp8"` or `out="fp8_rows"`.
        topk_weights: float32, differentiable: `[num_rows]` (layout "expert", 0 at padding) or `[num_rows, num_topk]`.
    """

    x: Tensor | FP8Tensor | FP8Rows
    topk_weights: Tensor
    _routing: Routing
    _arrived: WireRows
    _is_rotated: bool

    @property
    def topk_idx(self) -> Tensor:
        """`[num_recv_tokens, num_topk]` int32, local experts of the received tokens, -1 = on another rank."""
        return self._routing.recv_topk_idx

    @property
    def num_recv_tokens_per_expert(self) -> Tensor:
        """`[num_local_experts]` int64, rows of each local expert without padding."""
        return self._routing.num_recv_tokens_per_expert

    @property
    def num_rows_per_expert(self) -> tuple[int, ...]:
        """Rows of each local expert with padding. Layout "expert"; else empty.

        On a GPU with `num_max_tokens_per_rank` the host has to wait for the device to know them; see `expert_offsets`.
        """
        return self._routing.num_rows_per_expert

    @property
    def expert_offsets(self) -> Tensor | None:
        """`[num_local_experts]` int32, where each local expert's rows end, padding included. None in layout "rank".

        On the device of x: what `torch._grouped_mm` and torch's `grouped_mm` take as `offs`.
        """
        return None if self._routing.experts is None else self._routing.experts.ends

    @property
    def source_rows(self) -> Tensor | None:
        """`[num_rows]` int64, the received token behind each row of x, -1 = zeros. None = the same rows."""
        return self._routing.source_rows

    @property
    def payload(self) -> MXFP4Tensor:
        """The received rows as they came over the wire, one per received token: `[num_recv_tokens, hidden]`.

        No copy but with transport "peer", where they must be asked for before the communicator's next call of any kind,
        combine and backward passes included: others write to the memory after that.

        What to keep for backward, with `source_rows` and `num_rows_per_expert`; see `MXFP4Tensor.to_fp8_columns`.
        Rotated if the dispatch leg uses the Hadamard transform.

        Raises:
            InvalidArgument: the dispatch leg is not mxfp4.
        """
        rows = self._arrived.kept.rows
        if rows.kind != Kind.MXFP4 or rows.scales is None:
            raise InvalidArgument(f"payload: the wire of dispatch is {rows.kind.name}; accepted: MXFP4")
        return MXFP4Tensor(rows.data, rows.scales)

    def to_fp8_columns(self) -> FP8Columns:
        """The same numbers column-wise per expert, for the weight gradient, straight from the payload.

        Raises:
            InvalidArgument: the layout is not "expert", or the wire is not mxfp4 or fp8, or rotated.
        """
        rows = self._arrived.kept.rows
        if self._routing.experts is None:
            raise InvalidArgument("to_fp8_columns: the layout is 'rank'; accepted: 'expert'")
        if rows.kind not in (Kind.MXFP4, Kind.FP8_E8M0):
            raise InvalidArgument(f"to_fp8_columns: the wire of dispatch is {rows.kind.name}; accepted: MXFP4, FP8")
        if self._is_rotated:
            accepted = "a dispatch leg without the Hadamard transform, whose reverse is not FP8"
            raise InvalidArgument(f"to_fp8_columns: the received rows are rotated; accepted: {accepted}")
        if rows.kind == Kind.MXFP4:
            return self.payload.to_fp8_columns(self.num_rows_per_expert, self.source_rows)
        src_row = self._routing.experts.rows[: sum(self.num_rows_per_expert)]
        data, scales = backend_for(rows.data).fp8_columns(rows, src_row, self.num_rows_per_expert)
        return FP8Columns(data, scales, self.num_rows_per_expert)

    def __repr__(self) -> str:
        num_rows, hidden = self.x.data.shape
        kind = str(self.x.dtype) if isinstance(self.x, Tensor) else type(self.x).__name__
        known = self._routing.sizes.padded_rows_per_expert  # the rest would wait for a device
        per_expert = "" if known is None else f", num_rows_per_expert={known}"
        return f"Received(x=[{num_rows}, {hidden}] {kind}, layout={self._routing.layout!r}{per_expert})"
