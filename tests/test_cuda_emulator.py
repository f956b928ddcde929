"""The emulator of CUDA kernels: what works on a device works in it, and what is undefined there fails loudly."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from cuda_emulator.emulator import Emulator, EmulatorError, emulated
from torch import Tensor

SOURCE = """
using int64_t = long;

__device__ inline unsigned warp_sum(unsigned x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

extern "C" __global__ void __launch_bounds__(256) sum(const unsigned* x, unsigned* out, int64_t n) {
    __shared__ unsigned parts[8];
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned total = warp_sum(i < n ? x[i] : 0);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x < 32) {
        const unsigned block = warp_sum(threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0);
        if (threadIdx.x == 0) atomicAdd(out, block);
    }
}

extern "C" __global__ void reverse(int* x) {
    extern __shared__ int tile[];
    tile[threadIdx.x] = x[threadIdx.x];
#if !defined(NO_BARRIER)
    __syncthreads();
#endif
    x[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void copy(const int* from, int* to) {
    to[threadIdx.x] = from[threadIdx.x];
}

extern "C" __global__ void votes(int* out) {
    const unsigned lane = threadIdx.x;
    int* mine = out + lane * 12;
    mine[0] = int(__ballot_sync(0xffffffffu, lane % 3 == 0));
    mine[1] = __any_sync(0xffffffffu, lane == 5);
    mine[2] = __all_sync(0xffffffffu, lane < 32);
    mine[3] = __all_sync(0xffffffffu, lane < 31);
    mine[4] = __shfl_sync(0xffffffffu, int(lane), 7);
    mine[5] = __shfl_up_sync(0xffffffffu, int(lane), 3);
    mine[6] = __shfl_down_sync(0xffffffffu, int(lane), 3, 8);
    mine[7] = lane < 16 ? __shfl_xor_sync(0x0000ffffu, int(lane), 1) : __shfl_xor_sync(0xffff0000u, int(lane), 2);
    mine[8] = __syncthreads_count(lane < 10);
    mine[9] = __syncthreads_or(lane == 31);
    mine[10] = __syncthreads_and(lane < 31);
    mine[11] = int(__byte_perm(0x84030201u, 0x08070605u, 0xb743u));
}

extern "C" __global__ void unwritten(int* out) {
    __shared__ int x[32];
    if (threadIdx.x < 31) x[threadIdx.x] = 0;
    __syncwarp();
    out[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void subnormals(const float* x, float* out) {
    out[0] = x[0] * 0.75f;
    out[1] = float(x[0] > 0.0f);
    out[2] = fp4comm_emulator::mul_rn(x[0], 1.0f);
    out[3] = fp4comm_emulator::add_rn(x[0], x[0]);
    out[4] = x[0] * 0.75f;
}

extern "C" __global__ void wrong(int* x, int64_t which) {
    __shared__ int tile[32];
    const int lane = int(threadIdx.x);
    if (which == 0 && lane < 31) x[lane] = __shfl_sync(0xffffffffu, lane, 31);
    if (which == 1 && lane < 16) __syncthreads();
    if (which == 1 && lane >= 16) __syncthreads();
    if (which == 2 && lane) __syncwarp();
    if (which == 2 && !lane) __syncthreads();
    if (which == 3) x[0] = __shfl_sync(1u << lane, lane, 0);
    if (which == 4) x[0] = __shfl_sync(2u, lane, 0);
    if (which == 5) tile[lane + 1] = 0;
    if (which == 6) *reinterpret_cast<uint4*>(x + 1) = make_uint4(0, 0, 0, 0);
    if (which == 7) x[0] = 1 << (lane + 1);
}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    folder = tmp_path_factory.mktemp("csrc")
    Path(folder, "cuda").mkdir()
    Path(folder, "cuda", "kernels.cu").write_text(SOURCE)
    return Emulator(folder)


def launch(emulator: Emulator, name: str, block: int, *args: Tensor | int, grid: int = 1, **options: int) -> None:
    values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
    emulator.launch("kernels.cu", name, {}, grid, block, values, **options)


@pytest.mark.parametrize("block", [32, 96, 256])
def test_sum(emulator: Emulator, block: int) -> None:
    x = torch.arange(1000, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    launch(emulator, "sum", block, x, out, 990, grid=-(-1000 // block))
    assert out.item() == 990 * 989 // 2


def test_dynamic_shared_memory(emulator: Emulator) -> None:
    x = torch.arange(1000, dtype=torch.int32)
    launch(emulator, "reverse", 1000, x, shared=4000)
    assert torch.equal(x, torch.arange(1000, dtype=torch.int32).flip(0))


def test_votes_and_shuffles(emulator: Emulator) -> None:
    out = torch.zeros((32, 12), dtype=torch.int32)
    launch(emulator, "votes", 32, out)
    ballot = sum(1 << lane for lane in range(0, 32, 3))
    for lane, mine in enumerate(out.tolist()):
        down = lane + 3 if lane % 8 < 5 else lane
        expected = [1, 1, 0, 7, max(lane - 3, lane if lane < 3 else 0), down, lane ^ (1 if lane < 16 else 2)]
        assert mine[0] % 2**32 == ballot
        assert mine[1:] == [*expected, 10, 1, 0, 0xFF080584 - 2**32]


def test_missing_barrier_shows(emulator: Emulator) -> None:
    """Whatever the order of the threads, some read what is not written yet."""
    x = torch.arange(256, dtype=torch.int32)
    emulator.launch("kernels.cu", "reverse", {"NO_BARRIER": 1}, 1, 256, (x.data_ptr(),), shared=1024)
    assert not torch.equal(x, torch.arange(256, dtype=torch.int32).flip(0))


def test_unwritten_shared_memory_holds_a_pattern(emulator: Emulator) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    for _ in range(2):
        launch(emulator, "unwritten", 32, out)
        assert not out[:31].any()
        assert out[31].item() % 2**32 == 0xC5C5C5C5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only on x86-64 are subnormals flushed")
def test_subnormals_are_flushed_unless_they_count(emulator: Emulator) -> None:
    x = torch.tensor([1e-40])
    out = torch.ones(5)
    launch(emulator, "subnormals", 1, x, out)
    assert out.tolist() == [0, 0, x.item(), 2 * x.item(), 0]
    assert (x * 1).item() == x.item(), "the mode of the caller is back"


@pytest.mark.parametrize(
    "which, message",
    [
        (0, "a shuffle from a lane that takes no part"),
        (1, "different barriers"),
        (2, "a divergent warp"),
        (3, "a shuffle from a lane that takes no part"),
        (4, "lacks the thread itself"),
        (5, r"index 32 outside of an array in .*kernels\.cu:\d+"),
        (6, r"misaligned or null address .* in .*kernels\.cu:\d+"),
        (7, r"shift by 32 in .*kernels\.cu:\d+"),
    ],
)
def test_undefined_behaviour_fails(emulator: Emulator, which: int, message: str) -> None:
    x = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=message):
        launch(emulator, "wrong", 32, x, which)
    launch(emulator, "sum", 32, x, x, 0)  # still works


def test_writing_beside_a_tensor_fails(emulator: Emulator) -> None:
    x = torch.arange(32, dtype=torch.int32)
    with emulated(emulator):
        inside, outside = torch.empty(32, dtype=torch.int32), torch.empty((31,), dtype=torch.int32)
    assert inside.view(torch.uint8).unique().tolist() == [0xA5]
    launch(emulator, "copy", 32, x, inside)
    assert torch.equal(inside, x)
    with pytest.raises(EmulatorError, match="beside a tensor"):
        launch(emulator, "copy", 32, x, outside)
    launch(emulator, "copy", 32, x, inside)


def test_wrong_launches_fail(emulator: Emulator) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(EmulatorError, match="takes 3 arguments"):
        launch(emulator, "sum", 32, x, x)
    with pytest.raises(EmulatorError, match="None: no such kernel"):
        launch(emulator, "product", 32, x)
    with pytest.raises(EmulatorError, match="block 1056"):
        launch(emulator, "sum", 1056, x, x, 0)
    launch(emulator, "sum", 32, x, x, 0, grid=0)
