#!/usr/bin/env bash
# The one command for a GPU machine without network: install what is here, test it on the GPU, run the demo.
#
#   OUT            folder for the log and the demo's pictures (default: the working directory)
#   PYTHON         the interpreter, which already has all that the build and the tests need (default: python3)
#   PACKAGE        what to install: this checkout (default), or a wheel built elsewhere
#   PIP_ARGS       further arguments of `pip install`, e.g. "--target DIR" together with PYTHONPATH=DIR
#   BRIDGE_REQUIRE what must be there: a test that lacks it fails instead of skipping (default: gpu,cupy,warp)
set -euo pipefail
exec </dev/null
out=$(realpath "${OUT:-.}")
package=$(realpath "${PACKAGE:-$(dirname "${BASH_SOURCE[0]}")/..}")
python=${PYTHON:-python3}
export BRIDGE_REQUIRE=${BRIDGE_REQUIRE:-gpu,cupy,warp}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
mkdir -p "$out/demo"
log="$out/test_gpu.log"
report=$(mktemp)
trap 'rm -f "$report"' EXIT
: >"$log"

# `python -P` below: without it the source folder would be imported instead of the package that was installed.
read -ra pip_args <<<"${PIP_ARGS:-}"
"$python" -m pip install --quiet --no-build-isolation --no-deps --no-index "${pip_args[@]}" "$package" 2>&1 | tee -a "$log"

pytest_code=0
"$python" -P -m pytest tests/adapters tests/gpu -p no:cacheprovider --junitxml="$report" 2>&1 |
    tee -a "$log" || pytest_code=$?

demo_code=0
(cd "$out/demo" && "$python" -P -m rmm_managed_bridge demo) 2>&1 | tee -a "$log" || demo_code=$?

"$python" -P "$root/ci/tools/gpu_table.py" "$report" "$pytest_code" "$demo_code" 2>&1 | tee -a "$log"
