# What people do every day. `make serve` is all that a newcomer needs.
PYTHON ?= python3
VENV := .venv
ARGS ?=
ENGINE ?= $(if $(shell command -v docker),docker,podman)

.PHONY: engine-venv test-engines images lint-docker setup serve demo test test-slow test-exhaustive lint format bench compat clients cookbook docs openapi proto lock clean

setup: $(VENV)/.ready  ## build the virtual environment

$(VENV)/.ready: pyproject.toml constraints.txt docker/setup.sh docker/install_torch.py
	PYTHON=$(PYTHON) ./docker/setup.sh $(VENV) && touch $@

engine-venv:  ## build the environment of an engine that has one of its own: make engine-venv NAME=veomni
	PYTHON=$(PYTHON) ./docker/engine_env.sh $(NAME)

serve: setup  ## start the server on 127.0.0.1 with the default model
	exec $(VENV)/bin/tinsmith serve $(ARGS)

demo: setup  ## fine-tune on a few poems, with a server running
	$(VENV)/bin/tinsmith demo $(ARGS)

test: setup  ## run all tests, in two processes
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-engines: setup  ## build the environment of each engine that has one, and test it there: make test-engines [ARGS=veomni]
	PYTHON=$(PYTHON) $(VENV)/bin/python -m tests.engines.field $(ARGS)

test-slow: setup  ## what takes more than ten seconds each; before a change lands
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m slow $(ARGS)

test-exhaustive: setup  ## what takes minutes each: every kill, every moment, every layout
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m exhaustive $(ARGS)

lint: setup  ## style, imports and types
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

lint-docker: .lint/.ready  ## the Dockerfile and the manifests, in an environment of their own
	.lint/bin/python docker/lint.py

.lint/.ready: docker/lint-requirements.txt
	$(PYTHON) -m venv .lint && .lint/bin/python -m pip install --quiet -r $< && touch $@

images:  ## build tinsmith:cpu and tinsmith:cuda with docker or podman: make images [ENGINE=podman]
	@command -v $(ENGINE) >/dev/null || { echo "there is no $(ENGINE); choose another with ENGINE=..." >&2; exit 1; }
	$(ENGINE) build --file docker/Dockerfile --build-arg TORCH=cpu --tag tinsmith:cpu .
	$(ENGINE) build --file docker/Dockerfile --build-arg TORCH=cuda --tag tinsmith:cuda .

format: setup
	$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

bench: setup  ## measure the server on this machine
	$(VENV)/bin/python -m benchmarks $(ARGS)

cookbook: setup  ## run the unmodified tinker-cookbook against a server, write docs/cookbook.md
	$(VENV)/bin/python -m benchmarks.cookbook $(ARGS)

compat: setup  ## older versions of the SDK against this server; writes docs/compatibility.md
	$(VENV)/bin/python -m tests.compat.versions $(ARGS)

clients: setup  ## clients generated from openapi.yaml do a training step; needs node 20
	$(VENV)/bin/python -m tests.clients

docs: setup  ## regenerate what is generated: openapi.yaml, docs/settings.md, the table in docs/engines.md
	$(VENV)/bin/python -m app.openapi && $(VENV)/bin/python -m app.settings_docs && $(VENV)/bin/python -m app.engines_docs

proto: setup  ## regenerate the protobuf code
	$(VENV)/bin/python -m grpc_tools.protoc -I schemas/proto --python_out=schemas/proto --pyi_out=schemas/proto schemas/proto/tinker_public.proto

lock: setup  ## pin exactly what is installed now
	(head -1 constraints.txt; $(VENV)/bin/pip freeze --exclude-editable | sed 's/+cpu//' | grep -v '^torch==') > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .lint .compat tests/clients/typescript/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
