"""Expert-parallel all-to-all for Mixture-of-Experts models, with tokens packed to MXFP4.

comm = fp4comm.EPCommunicator(group, num_experts=64, hidden=4096)
recv, handle = comm.dispatch(x, topk_idx, topk_weights)   # rows of this rank's experts, expert by expert
y = experts(recv.x, recv.num_rows_per_expert)
out = comm.combine(y, handle)                             # [num_tokens, hidden], differentiable
"""

from __future__ import annotations

from .codec import FP8Tensor, MXFP4Tensor, quantize_fp8, quantize_mxfp4
from .communicator import EPCommunicator, Handle, Received
from .errors import Fp4CommError, InvalidArgument, NotAvailable, TransportError
from .launch import world_group
from .precision import Leg, Precision

__version__ = "0.1.0"

__all__ = [
    "EPCommunicator",
    "FP8Tensor",
    "Fp4CommError",
    "Handle",
    "InvalidArgument",
    "Leg",
    "MXFP4Tensor",
    "NotAvailable",
    "Precision",
    "Received",
    "TransportError",
    "quantize_fp8",
    "quantize_mxfp4",
    "world_group",
]
