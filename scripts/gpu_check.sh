#!/usr/bin/env bash
# Checks on a machine with a GPU; needs no network.
#   scripts/gpu_check.sh [build] [test] [sanitize] [bench]     default: all four, in this order
# $PYTHON (default python3) builds in place and runs everything. $CPMCU_CUDA_ARCH overrides the GPU's
# own architecture. $CPMCU_TEST_WORKERS (default 4) is the number of test processes. If a step fails,
# the others still run, except after a failed build.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # benchmarks are run as files
workers=(-n "${CPMCU_TEST_WORKERS:-4}" --dist worksteal)
[ $# -gt 0 ] || set -- build test sanitize bench
if ! nvidia-smi -L; then
  echo "gpu_check.sh: nvidia-smi finds no GPU here; without one, run make test" >&2
  exit 2
fi

build() { CPMCU_WITH_CUDA=1 "$python" setup.py --quiet build_ext --inplace; }

gpu_tests() {
  local failed=0
  "$python" -m pytest -m "gpu and not alone" "${workers[@]}" || failed=1
  "$python" -m pytest -m "gpu and alone" || failed=1
  return $failed
}

# compute-sanitizer slows kernels down by a factor of 100: small shapes, no timeouts, four processes
# (eight take longer). API errors are not reported: the engine checks every call, and torch probes for
# features with calls that fail. racecheck reports the barriers of cuBLAS's kernels (nvjet) as hazards
# and cannot continue after some of them. So it skips the tests whose GEMM is cuBLAS's: on Hopper,
# large_gemm with a float32 y. docs/benchmarks.md describes its reports on overlapping launches of
# packed_gemm.
sanitize_with() {
  local tests=() by_cublas="large_gemm or test_large_rows or (test_gemm.py and gated)"
  if nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -q '^9\.0'; then
    by_cublas="large_gemm and (True or float32)"
  fi
  [ "$1" = racecheck ] && tests=(-k "not ($by_cublas)")
  CPMCU_SMALL=1 PYTEST_TIMEOUT=0 "$sanitizer" --tool "$1" --target-processes all \
    --report-api-errors no --error-exitcode 86 "${@:2}" \
    "$python" -m pytest tests/kernels -m gpu "${tests[@]}" -q -n 4 --dist worksteal
}

bench() {
  local file failed=0
  for file in $(grep -l '__main__' scripts/bench/*.py); do
    echo "-- $file"
    "$python" "$file" || failed=1
  done
  return $failed
}

summary=() failures=0
step() {  # step NAME COMMAND...
  local name=$1 start=$SECONDS result=ok
  shift
  printf '\n== %s\n' "$name"
  "$@" || { result="FAILED ($?)"; failures=$((failures + 1)); }
  summary+=("$(printf '%-12s %6ds  %s' "$name" $((SECONDS - start)) "$result")")
  [ "$result" = ok ]
}
finish() {
  printf '\n%-12s %7s  %s\n' step time result
  printf '%s\n' "${summary[@]}"
  exit $((failures > 0))
}

for name in "$@"; do
  case $name in
    build) step build build || finish ;;
    test) step test gpu_tests ;;
    sanitize)
      sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
      if [ -z "$sanitizer" ]; then
        summary+=("$(printf '%-12s %6ds  %s' sanitize 0 'skipped: compute-sanitizer is not installed')")
      else
        step memcheck sanitize_with memcheck
        step racecheck sanitize_with racecheck --kernel-name-exclude kns=nvjet
      fi ;;
    bench) step bench bench ;;
    *) echo "gpu_check.sh: unknown step '$name'; known: build test sanitize bench" >&2; exit 2 ;;
  esac
done
finish
