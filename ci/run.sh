#!/usr/bin/env bash
# All that CI does: the README's test command in a fresh environment, then style, types, and the checks in ci/tools.
set -euo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
work=$(mktemp -d)
current=setup
trap 'code=$?; rm -rf "$work"; if ((code)); then echo "== failed: $current (exit code $code)"; fi' EXIT

# Everything that pip builds lies under $work, so that check_wheel can look for one path in the wheel.
export TMPDIR="$work/tmp"
mkdir "$TMPDIR" "$work/wheel" "$work/elsewhere"
# PIP_NO_COMPILE: most of what is installed is never imported here.
export PIP_NO_COMPILE=1 PIP_QUIET=2 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Hypothesis then draws the same examples each time: the search for new ones is a developer's, and no reason to fail here.
export CI=true
# The caller's paths would hide what the fresh environment lacks.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER

step() { # NAME COMMAND...: one heading, the command, its time
    current=$1
    local start=$SECONDS
    echo "== $1"
    "${@:2}"
    echo "== $1: $((SECONDS - start)) s"
}

make_environment() {
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is older than 3.11")'
    python3 -m venv "$work/venv"
    # Not `activate`, which reads the prompt and other variables that `set -u` refuses.
    export VIRTUAL_ENV="$work/venv" PATH="$work/venv/bin:$PATH"
    python --version
}

run_readme_tests() {
    local command
    command=$(python ci/tools/readme_command.py README.md test-command)
    echo "$command"
    bash -euo pipefail -c "$command"
}

build_wheel() {
    pip wheel --no-deps --wheel-dir "$work/wheel" .
    wheel=$(echo "$work"/wheel/*.whl)
    test -f "$wheel"
}

check_stubs() { # outside the checkout, where the source folder would be imported instead of the built package
    local site so base modules=() allowlist=()
    site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    for so in "$site"/rmm_managed_bridge/_native/*.cpython-*.so; do
        base=${so##*/}
        modules+=("rmm_managed_bridge._native.${base%%.*}")
    done
    if [[ -f ci/stubtest_allowlist.txt ]]; then allowlist=(--allowlist "$root/ci/stubtest_allowlist.txt"); fi
    # RMM first: bridge_resource finds librmm.so only once RMM has loaded it, and stubtest imports it alone.
    (cd "$work/elsewhere" && python -c 'import sys, rmm; from mypy import stubtest; sys.exit(stubtest.main())' --mypy-config-file "$root/pyproject.toml" "${allowlist[@]}" "${modules[@]}")
}

step "environment" make_environment
step "tests (the README's command)" run_readme_tests
step "wheel" build_wheel
step "tools" pip install "${wheel}[check,docs]"
step "lint" ruff check .
step "format" ruff format --check .
step "format (C++)" clang-format --dry-run -Werror $(git ls-files '*.cpp' '*.hpp')
step "lint (Cython)" cython-lint --max-line-length 130 rmm_managed_bridge/_native
step "types" mypy
step "stubs" check_stubs
step "layers" python ci/tools/check_layers.py
step "includes" python ci/tools/check_includes.py
step "file length" python ci/tools/check_file_length.py
step "documents" python ci/tools/check_documents.py
step "site" sphinx-build -q -W --keep-going -b html docs "$work/site"
step "wheel content" python ci/tools/check_wheel.py "$wheel" --forbid "$root" --forbid "$work"
echo "== all passed in $SECONDS s"
