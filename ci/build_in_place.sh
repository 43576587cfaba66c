#!/usr/bin/env bash
# Builds the native part beside the sources, for the environment that is active; again after a change, what has changed.
# Then `PYTHONPATH=$PWD pytest` tests the checkout. The first time, it installs what the build and the tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
needed=$(python -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
own = [each for name in ("test", "check", "demo") for each in extras[name] if not each.startswith("rmm-managed-bridge")]
print("\n".join([*project["build-system"]["requires"], *project["project"]["dependencies"], *own]))
')
mapfile -t requirements <<<"$needed"
if [[ ! -f build/dev/.requirements || $(<build/dev/.requirements) != "$needed" ]]; then
    python -m pip install --quiet "${requirements[@]}"
    mkdir -p build/dev
    echo "$needed" >build/dev/.requirements
fi
python -m cmake --version >/dev/null 2>&1 && cmake=(python -m cmake) || cmake=(cmake)
"${cmake[@]}" -S rmm_managed_bridge/_native -B build/dev -G Ninja -DPython_EXECUTABLE="$(command -v python)" -DCMAKE_BUILD_TYPE=Release >/dev/null
"${cmake[@]}" --build build/dev
# Not over a library that a process has loaded, which would crash it.
rm -f rmm_managed_bridge/_native/*.so
cp build/dev/*.so rmm_managed_bridge/_native/
