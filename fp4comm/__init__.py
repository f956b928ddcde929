"""Expert-parallel all-to-all for Mixture-of-Experts models, with tokens packed to MXFP4.

`EPCommunicator.dispatch` sends every token to the ranks of its experts and `EPCommunicator.combine` brings the results
home. Both are differentiable, and each of the four all-to-alls of a layer has a wire format of its own (`Precision`).
"""

from __future__ import annotations

from .codec import FP8Tensor, MXFP4Tensor, quantize_fp8, quantize_mxfp4
from .communicator import EPCommunicator, Handle
from .errors import Fp4CommError, InvalidArgument, NotAvailable, TransportError
from .launch import world_group
from .precision import Leg, Precision
from .received import Received

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
