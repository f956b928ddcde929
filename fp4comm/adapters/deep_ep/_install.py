"""`deep_ep` as a module for programs that import it by name."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ... import __version__
from ...errors import InvalidArgument
from ...precision import Precision
from . import _buffer, _config, _elastic, _events
from ._wires import configure

NAME = "deep_ep"
_VERSION = "2.1.0"  # of the interface
_MARK = "__fp4comm__"

_NAMES: dict[str, dict[str, Any]] = {
    "": {
        "Buffer": _buffer.Buffer,
        "Config": _config.Config,
        "EPHandle": _elastic.EPHandle,
        "ElasticBuffer": _elastic.ElasticBuffer,
        "EventHandle": _events.EventHandle,
        "EventOverlap": _events.EventOverlap,
        "topk_idx_t": _config.topk_idx_t,
        "__version__": f"{_VERSION}+fp4comm.{__version__}",
    },
    "buffer": {"Buffer": _buffer.Buffer},
    "buffers": {},
    "buffers.elastic": {"EPHandle": _elastic.EPHandle, "ElasticBuffer": _elastic.ElasticBuffer},
    "buffers.legacy": {"Buffer": _buffer.Buffer},
    "utils": {"EventHandle": _events.EventHandle, "EventOverlap": _events.EventOverlap},
    "utils.event": {"EventHandle": _events.EventHandle, "EventOverlap": _events.EventOverlap},
}


def install(*, precision: Precision | str = "fp4", force: bool = False, **options: Any) -> None:
    """Makes `import deep_ep` mean this module in this process, and chooses the numbers on the wire.

    To be called before the program imports whatever imports deep_ep, on all ranks. Calling it again chooses other
    numbers for the buffers that are made from then on.

    Args:
        precision, options: as for `configure`.
        force: also where DeepEP itself is installed. What has been imported from it already stays as it is.

    Raises:
        InvalidArgument: DeepEP can be imported, or something has been imported that looked for it in vain; an unknown
            recipe or option.
    """
    if not _is_installed() and not force:
        _refuse_if_importable()
    _refuse_if_late()
    configure(precision=precision, **options)
    for path, names in _NAMES.items():
        full_name = f"{NAME}.{path}" if path else NAME
        module = ModuleType(full_name, "DeepEP's interface over fp4comm; see fp4comm.adapters.deep_ep.")
        module.__spec__ = ModuleSpec(full_name, None, is_package=True)
        module.__path__ = []
        module.__package__ = full_name
        vars(module).update(names, **{_MARK: True})
        sys.modules[full_name] = module
        parent, _, child = full_name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def uninstall() -> None:
    """Takes the module away again. What has been imported from it goes on."""
    for full_name in [name for name, module in sys.modules.items() if name.split(".")[0] == NAME]:
        if hasattr(sys.modules[full_name], _MARK):
            del sys.modules[full_name]


def _is_installed() -> bool:
    return hasattr(sys.modules.get(NAME), _MARK)


def _refuse_if_importable() -> None:
    try:
        spec = importlib.util.find_spec(NAME)
    except ValueError:  # a module without a spec
        spec = ModuleSpec(NAME, None)
    if spec is not None:
        place = spec.origin or ", ".join(spec.submodule_search_locations or ()) or "imported already"
        raise InvalidArgument(
            f"deep_ep is there already ({place}); accepted: install(force=True) to take its place in this process"
        )


def _refuse_if_late() -> None:
    late = [name for name, module in list(sys.modules.items()) if _has_looked_in_vain(module)]
    if late:
        raise InvalidArgument(
            f"{late[0]} has been imported without deep_ep and won't look for it again; accepted: "
            "fp4comm.adapters.deep_ep.install() before that import"
        )


def _has_looked_in_vain(module: Any) -> bool:
    """By the flag that Megatron keeps; not by attribute, which lazy modules would import something for."""
    return isinstance(module, ModuleType) and vars(module).get("HAVE_DEEP_EP") is False
