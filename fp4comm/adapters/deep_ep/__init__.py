"""DeepEP's interface, with fp4comm's numbers on the wire.

Programs that use `deep_ep` (Megatron-Core's flex dispatcher, for one) get it by one line before they import it:

    from fp4comm.adapters import deep_ep
    deep_ep.install(precision="fp4")

and others can take `Buffer` and `ElasticBuffer` from here. `configure` chooses the numbers for the buffers that are
made after it.
"""

from __future__ import annotations

from ._buffer import Buffer
from ._config import Config, topk_idx_t
from ._elastic import ElasticBuffer, EPHandle
from ._events import EventHandle, EventOverlap
from ._install import install, uninstall
from ._wires import close, communicators, configure

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "close",
    "communicators",
    "configure",
    "install",
    "topk_idx_t",
    "uninstall",
]
