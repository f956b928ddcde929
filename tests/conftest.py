"""What all tests share."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import hypothesis
import numpy
import pytest
import torch
from cuda_targets import Target, open_target
from launch import LAUNCHERS, have_launcher
from numerics import tensors_on

from fp4comm.backends import cpu

# Slow machines must not fail a property, and a failure must come back on the next run.
hypothesis.settings.register_profile("fp4comm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fp4comm")


def pytest_report_header() -> str:
    launchers = ", ".join(name for name in LAUNCHERS if have_launcher(name)) or "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        f"{platform.machine()}, torch {torch.__version__}, numpy {numpy.__version__}, ranks by: {launchers}, GPU: {gpu}"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    """Each way to start ranks, for `run_ranks(..., launcher=launcher)`."""
    name: str = request.param
    if not have_launcher(name):
        pytest.skip(f"no {name} on this machine")
    return name


@pytest.fixture(params=cpu.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has, in use during the test."""
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture(params=[*cpu.supported_isas(), pytest.param("cuda", marks=pytest.mark.gpu)])
def everywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each instruction set of this machine, and its GPU, where `numerics.on_device` puts tensors meanwhile."""
    before = cpu.isa()
    if request.param != "cuda":
        cpu.set_isa(request.param)
    with tensors_on("cuda" if request.param == "cuda" else "cpu"):
        yield
    cpu.set_isa(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where `numerics.on_device` puts tensors meanwhile."""
    with tensors_on(request.param):
        yield torch.device(request.param)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The CUDA backend, on a GPU and in the emulator."""
    with open_target(request.param) as opened:
        yield opened
