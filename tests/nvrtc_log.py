"""Compiling with NVRTC by CuPy's binding; without torch, so that helper processes start at once."""

from __future__ import annotations

from typing import Any


def missing() -> str | None:
    """Why kernels can't be compiled for all generations of GPUs, or None."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        version = nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"no NVRTC: {error}"
    return None if version >= (12, 8) else f"NVRTC {version} is older than 12.8 and does not know sm_100"


def compiler_log(source: str, options: tuple[str, ...]) -> str:
    """What the compiler says: nothing if all is well."""
    from cupy_backends.cuda.libs import nvrtc

    program: Any = nvrtc.createProgram(source, "kernel.cu", (), ())
    error = ""
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as raised:
        error = f"{raised}\n"
    log = error + str(nvrtc.getProgramLog(program)).strip("\0 \n")
    if not error and any(option.startswith("-arch=compute") for option in options):
        code = nvrtc.getPTX(program)
        code = code.decode() if isinstance(code, bytes) else code
        if "neg.ftz" in code:  # no emulator shows it
            log += "a negation flushes subnormals; use sub_rn"
    nvrtc.destroyProgram(program)
    return log
