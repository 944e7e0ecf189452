# Everything a clone needs: python3, make and gcc on the machine, and a package index that pip can reach.
#
#     make demo        compile Gemma 3 270M, compare it with eager
#     make test        the tests, on the CPU and against the real torch_npu (no NPU needed)
#     make test-serving  the tests in the frameworks' own code, in an environment of theirs
#     make test-page   the page of a report in Chromium, which has to be installed
#     make fuzz        random programs beside eager; ARGS="--programs 10000" for more
#     make coverage    how much of public models is recognised and fused (an hour; see benchmarks/README.md)
#     make bench       what the rest of benchmarks/ measures: launches, compile and run time, replay (see its README.md)
#     make golden      record how small public models fuse now, which the tests hold changes against
#     make mutants     that each legality check has a test that fails without it (half an hour; see benchmarks/README.md)
#     make lint        ruff and strict mypy
#     make clean       remove what these made

PYTHON ?= python3

# Two environments, as torch can't be imported where torch_npu is installed and the CANN libraries are missing.
CPU := .venv
NPU := .venv-npu

# And one more for the frameworks that serve models. They are installed without what they require, which for the most part
# is kernels: the extra `serving` has what their Python files need to be imported.
SERVING := .venv-serving
FRAMEWORKS := sglang vllm

# Stand-ins for the CANN libraries. The loader reads LD_LIBRARY_PATH when a process starts, no later. Without a task queue,
# a test that asks for a kernel (printing an npu tensor does) fails where it asks; with one, it hangs or dies later.
STUBS := $(NPU)/cann-stubs
WITH_STUBS := CANN_STUB_DEVICES=1 TASK_QUEUE_ENABLE=0 LD_LIBRARY_PATH=$(CURDIR)/$(STUBS)

# A test that hangs ends its process and shows where.
PYTEST := python -m pytest

# The whole package: all Python files but those of tests, examples and benchmarks, and none from a hidden folder or from
# build/.
SOURCES := $(shell find . -name '*.py' -not -path './.*' -not -path './build/*' \
                          -not -path './tests/*' -not -path './examples/*' -not -path './benchmarks/*')

.PHONY: demo test test-page test-serving fuzz coverage bench golden mutants lint clean

demo: $(CPU)/.package
	$(CPU)/bin/python examples/gemma3_270m.py

test: $(CPU)/.package $(NPU)/.package $(STUBS)/libcann_stub.so
	$(CPU)/bin/$(PYTEST) -n 2 tests --ignore=tests/npu --ignore=tests/browser
	$(WITH_STUBS) $(NPU)/bin/$(PYTEST) -n 2 tests/npu

test-page: $(CPU)/.package
	$(CPU)/bin/$(PYTEST) tests/browser

docs/report.png: $(CPU)/.package docs/picture.py passes/views/page.html
	$(CPU)/bin/python docs/picture.py

test-serving: $(SERVING)/.package $(SERVING)/.frameworks
	$(SERVING)/bin/$(PYTEST) tests/serving

fuzz: $(CPU)/.package
	$(CPU)/bin/python tests/fuzz/run.py $(ARGS)

coverage: $(CPU)/.package $(NPU)/.package $(STUBS)/libcann_stub.so
	$(CPU)/bin/python benchmarks/coverage.py run cpu $(ARGS)
	$(WITH_STUBS) $(NPU)/bin/python benchmarks/coverage.py run npu $(ARGS)
	$(CPU)/bin/python benchmarks/coverage.py table

# The last one ends with status 1 where a golden number differs.
bench: $(CPU)/.package $(NPU)/.package $(STUBS)/libcann_stub.so
	$(CPU)/bin/python benchmarks/compile_time.py
	$(CPU)/bin/python benchmarks/compile_cache.py
	$(CPU)/bin/python benchmarks/replay.py
	$(CPU)/bin/python benchmarks/run_time.py
	$(CPU)/bin/python benchmarks/launches.py run cpu
	$(WITH_STUBS) $(NPU)/bin/python benchmarks/launches.py run npu
	$(CPU)/bin/python benchmarks/golden.py

golden: $(CPU)/.package
	$(CPU)/bin/python benchmarks/golden.py --accept

mutants: $(CPU)/.package
	$(CPU)/bin/python benchmarks/mutants.py run $(ARGS)

lint: $(CPU)/.package
	$(CPU)/bin/ruff check .
	$(CPU)/bin/mypy -p npu_fuse

clean:
	rm -rf $(CPU) $(NPU) $(SERVING) build fuzz-failures npu_fuse.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# What each environment holds besides the package itself. Most of these modules are never imported, so pip compiles none.
$(CPU)/.requirements: REQUIREMENTS := '.[dev,demo,bench,mlir]'
$(NPU)/.requirements: REQUIREMENTS := '.[dev,npu,bench]'
$(SERVING)/.requirements: REQUIREMENTS := '.[dev,serving]'

$(CPU)/.requirements $(NPU)/.requirements $(SERVING)/.requirements: %/.requirements: constraints.txt pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/pip install --quiet --no-compile --constraint constraints.txt $(REQUIREMENTS)
	touch $@

$(SERVING)/.frameworks: $(SERVING)/.requirements
	$(SERVING)/bin/pip install --quiet --no-deps --constraint constraints.txt $(FRAMEWORKS)
	touch $@

# Not editable: type checkers can't follow an editable install of this layout, and this is what users get. The environments
# build in ./build, so one at a time, and from nothing: a module that was removed would be packed from an old build.
.NOTPARALLEL:
$(CPU)/.package $(NPU)/.package $(SERVING)/.package: %/.package: %/.requirements $(SOURCES)
	rm -rf build
	$*/bin/pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	touch $@

$(STUBS)/libcann_stub.so: $(NPU)/.requirements tests/npu/cann_stub.py tests/npu/cann_stub.c
	$(NPU)/bin/python tests/npu/cann_stub.py $(STUBS)
