#!/usr/bin/env bash
# Runs the tests that reach C++ with the extension built under AddressSanitizer (CPU only).
# $PYTHON (default python3) builds and runs; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

CPMCU_SANITIZE=address "$python" setup.py --quiet build_ext

folders=()
for folder in tests/engine tests/kernels; do
  if [ -d "$folder" ]; then folders+=("$folder"); fi
done
if [ ${#folders[@]} -eq 0 ]; then
  echo "run_asan_tests.sh: neither tests/engine nor tests/kernels exists" >&2
  exit 1
fi

# The interpreter is not instrumented, so the sanitizer's runtime is preloaded. libstdc++ is preloaded
# too: the sanitizer looks for __cxa_throw at start-up, and the first C++ exception would abort. Python
# leaks on purpose, so leaks are not reported. pytest must not capture file descriptors, or the report
# is lost with the process. New memory is filled with 0x7f bytes (a float of them is huge), so that
# uninitialised reads change results. Shapes are small because instrumented code is slow.
export ASAN_OPTIONS=detect_leaks=0:malloc_fill_byte=127:max_malloc_fill_size=268435456
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
CPMCU_EXTENSION_DIR="$PWD/build/asan" CPMCU_SMALL=1 \
  "$python" -m pytest "${folders[@]}" --capture=sys -n 2 --dist worksteal -m "not gpu and not slow" "$@"
