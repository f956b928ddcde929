#!/usr/bin/env bash
# compute-sanitizer over the kernels' own tests on this machine's GPU: bad accesses, races in shared memory, reads of
# memory that nobody has written. Prints a line per tool; ends with an error if one of them found something.
# Usage: tools/sanitize.sh [pytest arguments], by default all small tests of the kernels.
set -uo pipefail
cd "$(dirname "$0")/.."

tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/test_cuda_rows.py tests/test_cuda_sums.py tests/test_cuda_columns.py tests/test_cuda_route.py)
status=0
for tool in memcheck racecheck initcheck; do
    # torch's allocator would hide accesses beyond a tensor in its own blocks
    log=$(PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        python3 -m pytest -q -m gpu -p no:cacheprovider "${tests[@]}" 2>&1)
    code=$?
    echo "$tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' <<<"$log" | tail -1 | tr -d '=' | xargs); $(tail -1 <<<"$(grep -E '[0-9]+ passed' <<<"$log")")"
    if [ "$code" -ne 0 ]; then
        status=1
        tail -60 <<<"$log" >&2
    fi
done
exit $status
