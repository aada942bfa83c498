#!/bin/sh
# Builds the environment of an engine that pins other versions than the server: docker/engine_env.sh NAME [FOLDER]
# What is in it stands in pyproject.toml ([dependency-groups] and [tool.tinsmith.environments]). The build for GPUs is
# chosen where there is one (set TINSMITH_ENGINE_BUILD=cpu or gpu to choose by hand).
# Safe to run again: it completes or updates what is there.
set -eu
name=${1:-}
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
build=${TINSMITH_ENGINE_BUILD:-auto}
if [ "$build" = auto ]; then
  if [ -e /dev/nvidiactl ]; then build=gpu; else build=cpu; fi
fi
facts=$("$PYTHON" docker/environments.py "$name" "$build")
eval "$facts"
venv=${2:-.engines/$name}
echo "building $venv ($build); this takes a few minutes the first time" >&2
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
pip="$venv/bin/python -m pip"
$pip install --quiet --upgrade 'pip>=25.1'
[ "$build" = gpu ] || "$venv/bin/python" docker/install_torch.py
$pip install --quiet --group "pyproject.toml:$group"
# Wanted by some package for what is never done here; they do not load beside a CPU build of torch.
[ -z "$unwanted" ] || $pip uninstall --quiet --yes $unwanted
"$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$package"
echo "$venv is ready; start the server with $serve" >&2
