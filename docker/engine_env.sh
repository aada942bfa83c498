#!/bin/sh
# Builds the environment of an engine that pins other versions than the server: docker/engine_env.sh NAME [FOLDER]
# NAME is vllm or torchtitan; the build for GPUs is chosen where there is one (set TINSMITH_ENGINE_BUILD=cpu or gpu to
# choose by hand). Safe to run again: it completes or updates what is there.
set -eu
name=${1:-}
case $name in
  # Wanted by vLLM for pictures and sound only; they do not load beside a CPU build of torch.
  vllm) unwanted='torchvision torchaudio torchcodec' use='start the server with --sampler vllm' ;;
  torchtitan) unwanted='' use='it is the environment of engine torchtitan' ;;
  *) echo "usage: docker/engine_env.sh vllm|torchtitan [FOLDER]; there is no engine environment '$name'" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
venv=${2:-.engines/$name}
PYTHON=${PYTHON:-python3}
build=${TINSMITH_ENGINE_BUILD:-auto}
if [ "$build" = auto ]; then
  if [ -e /dev/nvidiactl ]; then build=gpu; else build=cpu; fi
fi
echo "building $venv ($build); this takes a few minutes the first time" >&2
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
pip="$venv/bin/python -m pip"
$pip install --quiet --upgrade 'pip>=25.1'
if [ "$build" = gpu ]; then
  $pip install --quiet --group "pyproject.toml:$name"
else
  "$venv/bin/python" docker/install_torch.py
  $pip install --quiet --group "pyproject.toml:$name-cpu"
  # shellcheck disable=SC2086 # several names
  [ -z "$unwanted" ] || $pip uninstall --quiet --yes $unwanted
fi
"$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$name"
echo "$venv is ready; $use" >&2
