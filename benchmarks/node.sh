#!/usr/bin/env bash
# The figures of a node with NVLink: tests of more than two ranks, the exchange at EP4 and EP8 (EP2 on two GPUs), the
# MoE layer. JSON lines, plots and logs go to OUT_DIR.
#
#     benchmarks/node.sh [--dry-run] [OUT_DIR]       default: build/node
#
# --dry-run prints the commands. No step goes on after NODE_SECS (default 470), but for 10 s to end in; a step that fails or
# has no time left does not stop the others; the exit status is 1 if there was any.
#
# Environment: NODE_SECS; GPUS = how many to use, the first of those that torch finds (default: all); PYTHON (default: .venv/bin/python, or
# python3); MPIRUN (default: the one beside PYTHON, or that on the path). Variables of NCCL, such as NCCL_NVLS_ENABLE=0,
# reach all ranks as they are.
set -euo pipefail

usage() {
    sed -n '2,13s/^# \{0,1\}//p' "$0"
}

is_dry_run=false
out=build/node
has_out=false
for argument in "$@"; do
    case $argument in
        --dry-run) is_dry_run=true ;;
        -h | --help) usage && exit 0 ;;
        -*) echo "error: $argument; accepted: --dry-run, --help, OUT_DIR" >&2 && exit 2 ;;
        *)
            if $has_out; then
                echo "error: $argument after $out; accepted: one OUT_DIR" >&2
                exit 2
            fi
            out=$argument has_out=true
            ;;
    esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $out in
    /*) ;;
    *) $has_out && out=$PWD/$out ;;
esac
cd "$root"

python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
mpirun=${MPIRUN:-$(dirname "$python")/mpirun}
[[ -n ${MPIRUN:-} || -x $mpirun ]] || mpirun=mpirun
gpus=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo none)}
if [[ $gpus == none ]]; then
    echo "error: $python has no torch; run make install, name one with PYTHON=..., or set GPUS=8 for --dry-run" >&2
    exit 2
fi
if [[ ! $gpus =~ ^[0-9]+$ ]] || ((gpus < 2)); then
    echo "error: $gpus GPUs; accepted: at least two, or GPUS=8 with --dry-run" >&2
    exit 2
fi
[[ -n ${CUDA_VISIBLE_DEVICES:-} ]] || CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((gpus - 1)))
export CUDA_VISIBLE_DEVICES
experts=256
sizes=()
for ranks in 8 4; do
    ((ranks > gpus)) || sizes+=("$ranks")
done
((${#sizes[@]} > 0)) || sizes=(2)
largest=${sizes[0]}

deadline=$((SECONDS + ${NODE_SECS:-470}))
failed=()
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # Open MPI started by root, as in containers
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# step NAME SECS COMMAND...: at most SECS, and what is left of the whole.
step() {
    local name=$1 secs=$2 start=$SECONDS status=0
    shift 2
    if $is_dry_run; then
        printf '%q ' "$@"
        echo
        return
    fi
    ((secs < deadline - SECONDS)) || secs=$((deadline - SECONDS))
    if ((secs < 5)); then
        echo "$name: not run, no time left"
        failed+=("$name: no time left")
        return
    fi
    # As Ctrl-C, after which pytest stops what it has started in other sessions.
    timeout --signal=INT --kill-after=10 "$secs" "$@" >"$out/logs/$name.log" 2>&1 </dev/null || status=$?
    if ((status == 0)); then
        echo "$name: $((SECONDS - start)) s"
        return
    fi
    local why="exit status $status"
    ((status != 124 && status != 137)) || why="stopped after $secs s"
    failed+=("$name: $why, see $out/logs/$name.log")
    echo "$name: $why"
    tail -n 15 "$out/logs/$name.log"
}

# With mpirun and with torchrun; a module and its options follow the number of ranks.
on_mpi() {
    local name=$1 secs=$2 ranks=$3
    shift 3
    step "$name" "$secs" "$mpirun" --bind-to none -n "$ranks" "$python" -m "$@"
}

on_torch() {
    local name=$1 secs=$2 ranks=$3
    shift 3
    step "$name" "$secs" "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m "$@"
}

$is_dry_run || mkdir -p "$out/logs"
$is_dry_run || echo "$gpus GPUs, $((deadline - SECONDS)) s"

# What matters most first: the last steps are those that time may run out for.
for ranks in "${sizes[@]}"; do
    for layout in rank expert; do
        on_mpi "bandwidth_ep${ranks}_$layout" 90 "$ranks" benchmarks.bandwidth --cached --layout "$layout" \
            --tokens 4096,8192 --hidden 7168 --topk 8 --experts "$experts" --wires bf16,fp8,mxfp4,fp32 \
            --warmup-secs 0.4 --secs 6 --json "$out/bandwidth_ep${ranks}_$layout.jsonl"
    done
done
on_torch moe_layer 90 "$largest" benchmarks.moe_layer --shape deepseek-v3 --secs 6 \
    --json "$out/moe_layer.jsonl" --plot "$out/moe_layer.png"
for ranks in "${sizes[@]}"; do
    on_torch "legs_ep$ranks" 60 "$ranks" benchmarks.legs --tokens 4096,8192 --hidden 7168 --topk 8 \
        --experts "$experts" --wires bf16,fp8,mxfp4 --layouts rank,expert \
        --warmup-secs 0.4 --secs 6 --json "$out/legs_ep$ranks.jsonl"
done
on_mpi sizes 60 "$largest" benchmarks.bandwidth --layout rank --cached --wires bf16,mxfp4 --experts "$experts" \
    --tokens 32,128,512,2048,8192 --warmup-secs 1 --secs 5 --json "$out/sizes.jsonl"
step plot 20 "$python" -m benchmarks.plot "$out/sizes.jsonl" "$out/sizes.png"
on_mpi latency 60 "$largest" benchmarks.bandwidth --latency --experts "$experts" --warmup-secs 1 --secs 5 \
    --json "$out/latency.jsonl"
step tests 200 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_node_gpu.py

$is_dry_run && exit 0
echo "JSON lines and plots in $out:"
for file in "$out"/*.jsonl "$out"/*.png; do
    [[ ! -e $file ]] || echo "  $file"
done
if ((${#failed[@]} > 0)); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all steps passed"
