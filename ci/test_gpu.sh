#!/usr/bin/env bash
# The one command for a GPU machine without network: install what is here, test it on the GPU, run the demo.
#
# Each file of tests/gpu has a process of its own: a capture that is lost, or a CUDA error that stays, fails every test after
# it in the same process, and a crash would take the others' results along.
#
#   OUT            folder for the log and the demo's pictures (default: the working directory)
#   PYTHON         the interpreter, which already has all that the build and the tests need (default: python3)
#   PACKAGE        what to install: this checkout (default), a wheel built elsewhere, or "none": it is installed
#   PIP_ARGS       further arguments of `pip install`, e.g. "--target DIR" together with PYTHONPATH=DIR
#   BRIDGE_REQUIRE what must be there: a test that lacks it fails instead of skipping (default: gpu,cupy,warp)
#   TESTS          what to run, in this order (default: tests/adapters and each tests/gpu/test_*.py)
#   FILE_SECONDS   how long one of them may take before it is ended with a traceback of every thread (default: 300)
set -euo pipefail
exec </dev/null
out=$(realpath "${OUT:-.}")
package=${PACKAGE:-$(dirname "${BASH_SOURCE[0]}")/..}
if [[ $package != none ]]; then package=$(realpath "$package"); fi
python=${PYTHON:-python3}
export BRIDGE_REQUIRE=${BRIDGE_REQUIRE:-gpu,cupy,warp}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
mkdir -p "$out/demo"
log="$out/test_gpu.log"
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
: >"$log"

# `python -P` below: without it the source folder would be imported instead of the package that was installed.
read -ra pip_args <<<"${PIP_ARGS:-}"
if [[ $package != none ]]; then
    "$python" -m pip install --quiet --no-build-isolation --no-deps --no-index "${pip_args[@]}" "$package" 2>&1 | tee -a "$log"
fi

read -ra tests <<<"${TESTS:-tests/adapters $(echo tests/gpu/test_*.py)}"
for each in "${tests[@]}"; do
    name=$(basename "$each" .py)
    start=$SECONDS code=0
    # SIGABRT: pytest's faulthandler says where every thread is.
    timeout --signal=ABRT --kill-after=20 "${FILE_SECONDS:-300}" \
        "$python" -P -m pytest "$each" -p no:cacheprovider -o junit_family=xunit1 --junitxml="$reports/$name.xml" 2>&1 | tee -a "$log" || code=$?
    echo "$code $((SECONDS - start))" >"$reports/$name.code"
done

demo_code=0
(cd "$out/demo" && "$python" -P -m rmm_managed_bridge demo) 2>&1 | tee -a "$log" || demo_code=$?

"$python" -P "$root/ci/tools/gpu_table.py" "$reports" "$demo_code" 2>&1 | tee -a "$log"
