#!/usr/bin/env bash
# Runs, checks and measures everything on one card, offline, in eight minutes: bash benchmarks/gpu_kit.sh --help
# PYTHON is the Python that has torch. Where toolkit-lm is not installed, it and what it needs come from the folder
# that `make gpu-kit` has made: --kit FOLDER, by default gpu-kit beside benchmarks.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
kit="" rest=()
while (($#)); do
    case $1 in
        --kit) kit=${2:?--kit needs a folder}; shift 2 ;;
        --kit=*) kit=${1#--kit=}; shift ;;
        *) rest+=("$1"); shift ;;
    esac
done
command -v "$python" > /dev/null || { echo "there is no $python: PYTHON names the Python that has torch" >&2; exit 2; }
path=$root/benchmarks
if "$python" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("toolkit_lm") is None)'; then
    [ -z "$kit" ] || { echo "toolkit-lm is installed in $python: leave out --kit, or take a Python without it" >&2; exit 2; }
else
    kit=${kit:-$root/gpu-kit}
    [ -d "$kit/wheels" ] || { echo "neither is toolkit-lm installed in $python, nor is there a kit in $kit: see make gpu-kit" >&2; exit 2; }
    kit=$(cd "$kit" && pwd)
    if [ ! -e "$kit/site/.whole" ]; then
        rm -rf "$kit/site"
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
            --root-user-action ignore --target "$kit/site" "$kit"/wheels/*.whl
        touch "$kit/site/.whole"
    fi
    for source in "$root"/core/src "$root"/libs/*/src "$root"/plugins/*/src "$root"/contrib_*/*/src; do path=$path:$source; done
    path=$path:$kit/metadata:$kit/site
    export GPU_KIT_SITE=$kit/site
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m gpu_kit ${rest[@]+"${rest[@]}"}
