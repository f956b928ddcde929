"""A Mixture-of-Experts layer that computes on what arrives and keeps what was sent.

`MoELayer` is the layer; a `Recipe` says what travels, how experts compute and what is kept for backward.
"""

from __future__ import annotations

from .experts import GroupedExperts
from .layer import MoELayer
from .memory import ActivationBytes, activation_bytes, activation_bytes_per_token
from .recipe import Recipe
from .router import Router, Routes

__all__ = [
    "ActivationBytes",
    "GroupedExperts",
    "MoELayer",
    "Recipe",
    "Router",
    "Routes",
    "activation_bytes",
    "activation_bytes_per_token",
]
