# make setup   .venv with locked dependencies      make demo    compare six methods on real data, write a report
# make test    the quick tests, in minutes         make lint    linters and type checker
# make test-all   all tests, with many random examples     make test-rest   those of them that make test leaves out
# make costs   the quick tests, whose costs become the budget (tests/README.md)
# make test-versions   the tests on CPython 3.11 to 3.13 with the oldest and the newest torch, and a table (by hand)
# make bench   the benchmarks (slow, by hand)      make lock    pin what .venv holds now
# make site    the site, strictly                    make docs        the site, and its tests
# make drawings    the site's drawings and charts anew
# make wheel   wheel and source archive, into dist
# make gpu     every check and figure that needs a GPU; exit status 2 where there is none
# make attack BUDGET=10   random attacks for ten minutes, counted in tests/attack/counts.json; mistakes that diagnose names

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/.ready
TOX := .tox/.tox/bin/tox
# The tests train many small networks, one thread each; three at a time, for some wait for processes that they start.
# A file's tests run in one process: what they share is made once. Who forbids bytecode would compile all in each process.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
TEST := $(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
MANY := --hypothesis-profile=many

.PHONY: setup demo test test-all test-rest costs test-versions lint bench gpu attack site docs drawings wheel lock docs-lock clean

BUDGET ?= 10

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Stretto needs CPython 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $(READY)

demo: $(READY)
	$(BIN)/stretto compare examples/demo.toml --out demo

test: $(READY)
	$(TEST) $(ARGS)

test-all: $(READY)
	$(TEST) -m "" $(MANY) $(ARGS)

test-rest: $(READY)
	$(TEST) -m "slow or docs or hypothesis" $(MANY) $(ARGS)

costs: $(READY)
	$(TEST) --keep-costs --costs=build/costs.json
	$(BIN)/python tests/costs.py build/costs.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts/charts.py scripts/commit_subject.py scripts/drawings.py scripts/release.py

# Installs everything anew, so that newest is newest. VERSIONS=py313-newest,py311-oldest: these alone; TESTS=tests/optim.
test-versions: $(TOX)
	$(TOX) run --recreate $(if $(VERSIONS),-e $(VERSIONS)) $(if $(TESTS),-- $(TESTS))

$(TOX):
	$(PYTHON) -m venv .tox/.tox
	.tox/.tox/bin/python -m pip install --quiet --disable-pip-version-check "tox>=4.34"

bench: $(READY)
	for claim in benchmarks/*/*.py; do $(TEST_ENV) $(BIN)/python $$claim || exit 1; done

gpu: $(READY)
	$(TEST_ENV) $(BIN)/python tests/gpu/run.py --out tests/gpu/result.json

attack: $(READY)
	$(TEST_ENV) $(BIN)/python tests/attack/run.py --minutes $(BUDGET)
	$(TEST_ENV) $(BIN)/python benchmarks/diagnosis/main.py

# The generator has an environment of its own. Pages are read from the sources without importing them: no torch is needed.
# Not --quiet, which also hides warnings from --strict. The variable leaves out an announcement that docs/design.md has.
site: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict
	@echo "build/site/index.html"

docs: site $(READY)
	$(TEST) -m docs $(ARGS)

$(DOCS_READY): requirements-docs.lock
	$(PYTHON) -m venv --clear .venv-docs
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	@touch $(DOCS_READY)

drawings: $(READY)
	$(BIN)/python scripts/drawings.py
	$(BIN)/python scripts/charts.py

wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

docs-lock:
	$(PYTHON) -m venv --clear .venv-docs
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	{ echo "# What builds the site, pinned. Made by: make docs-lock"; $(DOCS_BIN)/python -m pip freeze; } > requirements-docs.lock
	@touch $(DOCS_READY)

lock: $(READY)
	{ echo "# Every package that Stretto is developed and tested with, pinned. Made by: make lock"; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > requirements.lock

clean:
	rm -rf .venv .venv-docs build dist demo runs
