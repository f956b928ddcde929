"""A Mixture-of-Experts layer that computes on what arrives and keeps what was sent.

`MoELayer` is the layer; a `Recipe` says what travels, how experts compute and what is kept for backward.
"""

from __future__ import annotations

from ..fp8_rows import FP8Rows, quantize_fp8_rows
from .experts import GroupedExperts
from .layer import MoELayer
from .memory import ActivationBytes, activation_bytes, activation_bytes_per_token
from .recipe import Recipe
from .router import Router, Routes

__all__ = [
    "ActivationBytes",
    "FP8Rows",
    "GroupedExperts",
    "MoELayer",
    "Recipe",
    "Router",
    "Routes",
    "activation_bytes",
    "activation_bytes_per_token",
    "quantize_fp8_rows",
]
