#!/usr/bin/env bash
# compute-sanitizer over the kernels' own tests, at their small sizes, on this machine's GPU: bad accesses, races in
# shared memory, reads of memory that nobody has written. Prints a line per tool and file of tests, and fails if
# something was found. The sweeps over all pairs of kinds are left out, since they mostly compile.
#
#     tools/sanitize.sh [files of tests instead of all that call kernels]
set -uo pipefail
cd "$(dirname "$0")/.."

files=("$@")
[ ${#files[@]} -gt 0 ] || files=(tests/test_{cuda_{rows,sums,columns,route},gemm_rows,moe_swiglu}.py)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

check() { # torch's allocator would hide accesses beyond a tensor inside its own blocks
    SMALL_TESTS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
        python3 -m pytest -q -m gpu -k "not every_pair" -p no:cacheprovider "$2" >"$3" 2>&1
    echo $? >"$3.code"
}

tools=(memcheck racecheck initcheck)
for tool in "${tools[@]}"; do
    for file in "${files[@]}"; do check "$tool" "$file" "$logs/$tool.$(basename "$file")" & done
done
wait
status=0
for tool in "${tools[@]}"; do
    for file in "${files[@]}"; do
        log=$logs/$tool.$(basename "$file")
        found=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | tr -d '=' | xargs)
        echo "$tool $file: ${found:-did not finish}; pytest: $(grep -E '[0-9]+ (passed|failed)' "$log" | tail -1)"
        if [ "$(cat "$log.code")" -ne 0 ]; then
            status=1
            grep -vE '^$' "$log" | head -60 >&2
        fi
    done
done
exit $status
