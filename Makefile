# What people do every day. `make serve` is all that a newcomer needs.
PYTHON ?= python3
VENV := .venv
ARGS ?=
ENGINE ?= $(if $(shell command -v docker),docker,podman)

.PHONY: help fuzz test-console screenshots vendor audit sbom secrets secrets-history engine-venv test-engines images lint-docker setup serve demo test test-slow test-exhaustive lint format bench compat clients cookbook exports docs site notebooks openapi proto lock clean

setup: $(VENV)/.ready  ## build the virtual environment

$(VENV)/.ready: pyproject.toml constraints.txt requirements.lock docker/setup.sh docker/install_torch.py
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

test-console: setup  ## the web console in a real browser (apt-get install chromium)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[browser]"
	$(VENV)/bin/python -m pytest tests/console -m browser --timeout 900 $(ARGS)

screenshots: setup  ## docs/screenshots, of a server with the default model
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[browser]"
	$(VENV)/bin/python -m tests.console.screenshots $(ARGS)

vendor:  ## fetch the console's libraries (needs npm)
	./app/console/vendor.sh

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

secrets: .lint/.ready  ## look for secrets in tracked files, offline; ARGS=--accept takes what is found as known to be none
	.lint/bin/python docker/secret_scan.py $(ARGS)

secrets-history: .lint/.ready  ## the same in every version of every file; takes minutes
	.lint/bin/python docker/secret_scan.py --history

.audit/.ready: docker/audit-requirements.txt
	$(PYTHON) -m venv .audit && .audit/bin/python -m pip install --quiet -r $< && touch $@

audit: .audit/.ready  ## ask for known vulnerabilities of every locked package; needs the network; ARGS=osv asks that service
	.audit/bin/python docker/audit.py $(ARGS)

sbom: setup .audit/.ready  ## what is installed, as a CycloneDX document: build/sbom.json
	mkdir -p build && .audit/bin/cyclonedx-py environment --pyproject pyproject.toml --of JSON --output-reproducible \
		--output-file build/sbom.json $(VENV)/bin/python

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

exports: setup  ## exported checkpoints in transformers, PEFT and llama.cpp, compared with the server; writes docs/exports.md
	$(VENV)/bin/python -m benchmarks.exports $(ARGS)

fuzz: setup  ## wild bodies for the decoders: make fuzz [ARGS="--minutes 10"]
	$(VENV)/bin/python -m benchmarks fuzz $(ARGS)

compat: setup  ## older versions of the SDK against this server; writes docs/compatibility.md
	$(VENV)/bin/python -m tests.compat.versions $(ARGS)

clients: setup  ## clients generated from openapi.yaml do a training step; needs node 20
	$(VENV)/bin/python -m tests.clients

docs: setup  ## regenerate what is generated: openapi.yaml, docs/settings.md, docs/cli.md, docs/reference.md, the table in docs/engines.md
	$(VENV)/bin/python -m app.openapi && $(VENV)/bin/python -m app.settings_docs && $(VENV)/bin/python -m app.cli_docs && $(VENV)/bin/python -m app.engines_docs && $(VENV)/bin/python -m app.metrics.docs
	$(VENV)/bin/python -m tests.docs.covered

site: .site/.ready  ## build the documentation as a site that needs no network: site/index.html
	@echo "building the site ..." >&2
	@NO_MKDOCS_2_WARNING=1 .site/bin/mkdocs build --strict --quiet
	@echo "open site/index.html" >&2

notebooks: .site/.ready  ## make examples/*.ipynb of the scripts, and run them on the server of TINKER_BASE_URL
	.site/bin/python -m examples.notebooks $(ARGS)

# An environment of its own. What the examples import is the server's; a .pth file lends it.
.site/.ready: docs/requirements.txt examples/requirements.txt constraints.txt | setup
	@echo "building .site, which takes a minute the first time: the environment ..." >&2
	@$(VENV)/bin/python -m venv .site
	@echo "installing what makes the site ..." >&2
	@.site/bin/python docker/pip_progress.py install --constraint constraints.txt -r docs/requirements.txt -r examples/requirements.txt
	@echo "$(CURDIR)/$(VENV)/lib/$$(ls .site/lib)/site-packages" > .site/lib/$$(ls .site/lib)/site-packages/server.pth
	touch $@

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1 \2/p' $(firstword $(MAKEFILE_LIST)) | while read -r name does; do \
		printf '%-18s %s\n' "$$name" "$$does"; done

proto: setup  ## regenerate the protobuf code
	$(VENV)/bin/python -m grpc_tools.protoc -I schemas/proto --python_out=schemas/proto --pyi_out=schemas/proto schemas/proto/tinker_public.proto

lock: setup .audit/.ready  ## pin exactly what is installed now, and write the hashes of it
	(head -1 constraints.txt; $(VENV)/bin/pip freeze --exclude-editable | sed 's/+cpu//' | grep -v '^torch==') > constraints.new && mv constraints.new constraints.txt
	.audit/bin/python docker/lock.py

clean:
	rm -rf $(VENV) .lint .audit .site site .compat tests/clients/typescript/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
