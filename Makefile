# Development of apollo_compile. Everything happens in .venv and build; `make test` works from a clean checkout.

BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Another release of torch than that of constraints.txt, in an environment of its own, e.g. make test TORCH=2.14.1
TORCH ?=
VENV := $(if $(TORCH),build/torch-$(TORCH),.venv)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS)
SOURCES := $(or $(shell find csrc runtime -type f ! -name CMakeLists.txt),$(error there are no C++ sources))
NATIVE_SOURCES := $(filter-out runtime/tests/%,$(SOURCES)) CMakeLists.txt
SANITIZERS := address thread
TEST_PROCESSES ?= 2
RANK_TESTS := tests/distributed
LONE_TESTS := tests/cluster/test_run.py $(if $(TORCH),,tests/device/cpu/test_calibrate.py)
OTHER_TESTS := $(if $(TORCH),$(addprefix tests/,end_to_end native session),$(addprefix --ignore=,$(RANK_TESTS) $(LONE_TESTS)))

# Arguments, e.g. make demo DEMO="--size tiny --steps 3"
DEMO ?=
BENCH ?= --workloads all --batch all
# The stable ABI of the extension begins with Python 3.12: a wheel for 3.11, and one that serves all later ones.
WHEEL_PYTHONS ?= $(BASE_PYTHON) $(shell for python in python3.12 python3.13 python3.14; do \
  $$python -c "" 2>/dev/null && echo $$python && break; done)
# The architecture of the wheels, e.g. make wheel ARCH=aarch64, which needs Debian's package g++-aarch64-linux-gnu
MACHINE := $(shell uname -m)
ARCH ?= $(MACHINE)
SOAK ?= --minutes 30

# Compiled pieces are kept between test runs, and so is bytecode: of what is installed, most is never imported, and the
# rest by many processes.
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/inductor
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check docs wheel bench native stub native-test soak soak-native format clean

demo: $(VENV)/installed native
	$(BIN)/python -m benchmarks.demo $(DEMO)

# Most of the time goes into compiling, which shares the machine well, apart from OpenMP teams that would spin on the same
# cores. A file of tests of ranks starts its ranks once, so one process runs all of the file. Ray and a calibration have the
# machine alone. With TORCH, the other tests are those of compiled models only.
test: $(VENV)/installed native
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(OTHER_TESTS)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(RANK_TESTS)
	$(BIN)/python -m pytest $(LONE_TESTS)

check: $(VENV)/installed docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)

# The site, into build/site; a warning is an error. With --quiet mkdocs would not count warnings.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Wheels, into dist: for one interpreter after another, isolated, as anyone would build them. auditwheel gives each the tag
# of the oldest C library that it runs with, and refuses one that needs a library of this machine. For another architecture
# the compiler and two names differ: of Python's the extension needs only headers, which are the same.
wheel: $(VENV)/installed
	rm -rf build/wheels dist/*_$(ARCH).whl && mkdir -p build/wheels
	for python in $(WHEEL_PYTHONS); do \
	  suffix=$$($$python -c "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX').replace('$(MACHINE)', '$(ARCH)'))") && \
	  MAKEFLAGS= PIP_CONSTRAINT=$(CURDIR)/constraints.txt SETUPTOOLS_EXT_SUFFIX=$$suffix \
	    $(if $(filter-out $(MACHINE),$(ARCH)),CXX=$(ARCH)-linux-gnu-g++) \
	    $(BIN)/python -m pip -q --python "$$(command -v $$python)" wheel --no-deps \
	    --config-settings env._PYTHON_HOST_PLATFORM=linux-$(ARCH) \
	    --config-settings build-dir=build/wheels/{wheel_tag} --wheel-dir build/wheels . || exit; \
	done
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheels/*.whl

bench: $(VENV)/installed native
	$(BIN)/python -m benchmarks.run --json build/bench.json $(BENCH)

# The checkout comes first on sys.path, so it needs the extension too: that of the wheel.
native: build/native-stamp

build/native-stamp: $(VENV)/installed
	mkdir -p build
	rm -f apollo_compile/_native*.so
	cp $(VENV)/lib/python3*/site-packages/apollo_compile/_native*.so apollo_compile/
	touch $@

stub: native
	$(BIN)/python -m nanobind.stubgen -q -m apollo_compile._native -o apollo_compile/_native.pyi

native-test: $(SANITIZERS:%=native-test-%)

# Compiled fast: for one sanitizer several sources at once, for the other each alone, which shows missing headers. Under
# `make --jobs`, ninja would look for make's job server, which is not its own.
native-test-address: UNITY = ON
native-test-thread: UNITY = OFF
native-test-%: $(VENV)/tools
	$(BIN)/cmake -S . -B build/native-$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O0 -g1" \
	  -DCMAKE_UNITY_BUILD=$(UNITY) -DAPOLLO_BUILD_PYTHON=OFF -DAPOLLO_BUILD_TESTS=ON -DAPOLLO_TEST_CUDA_ABI=ON \
	  -DAPOLLO_SANITIZE=$*
	MAKEFLAGS= $(BIN)/cmake --build build/native-$*
	$(BIN)/ctest --test-dir build/native-$* --output-on-failure --no-tests=error

# Half an hour of changes in one process, the long tests, 2,000 random models, other ones every time, all operators and
# modules that torch's own tests describe, one of ten compiled, and the tests of the extension with an instrumented one.
soak: $(VENV)/installed native
	$(BIN)/python -m benchmarks.soak $(SOAK)
	$(MAKE) wheel
	$(BIN)/python -m pytest -m soak
	$(BIN)/python -m pytest --hypothesis-profile soak -o faulthandler_timeout=0 -m "soak or not soak" \
	  tests/end_to_end/test_random_models.py tests/faults/test_files.py
	$(BIN)/python -m benchmarks.op_infos --json build/op_infos.json
	$(BIN)/python -m benchmarks.op_infos --json build/op_infos.json --bodies native --every 10
	$(MAKE) soak-native

soak-native: $(SANITIZERS:%=soak-native-%)

# A copy of the tree gets the instrumented extension; under AddressSanitizer whole models train too, with faults. What
# Python leaves allocated at its end is not reported, nor memory that nobody has, which is one of those faults, nor what
# libraries that are not instrumented do among themselves; a race ends the tests with 66. ThreadSanitizer needs addresses
# where they always are.
soak-native-address: PRELOAD = libasan.so
soak-native-address: MODELS = tests/end_to_end/test_training_loops.py tests/end_to_end/test_semantics.py tests/faults/test_runs.py
soak-native-address: export ASAN_OPTIONS = detect_leaks=0 allocator_may_return_null=1
soak-native-thread: PRELOAD = libtsan.so
soak-native-thread: export TSAN_OPTIONS = ignore_noninstrumented_modules=1 die_after_fork=0 exitcode=66
soak-native-%: $(VENV)/installed
	rm -rf build/soak-$*/tree && mkdir -p build/soak-$*/tree
	tar -c --exclude '*.so' apollo_compile tests benchmarks docs pyproject.toml | tar -x -C build/soak-$*/tree
	$(BIN)/cmake -S . -B build/soak-$* -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DAPOLLO_SANITIZE=$* \
	  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/build/soak-$*/tree/apollo_compile
	$(BIN)/cmake --build build/soak-$*
	cd build/soak-$*/tree && LD_PRELOAD="$$(c++ -print-file-name=$(PRELOAD)) $$(c++ -print-file-name=libstdc++.so)" \
	  setarch -R $(CURDIR)/$(BIN)/python -m pytest -p no:cacheprovider tests/native $(MODELS)

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(SOURCES)

clean:
	rm -rf build $(VENV) apollo_compile/_native*.so

$(VENV)/created:
	$(BASE_PYTHON) -m venv $(VENV)
	touch $@

build/torch-%/constraints.txt: constraints.txt | build/torch-%/created
	sed 's/^torch==.*/torch==$*/' $< > $@

# Build requirements come from pyproject.toml, so that one that is missing there is missing here.
$(VENV)/tools: pyproject.toml $(CONSTRAINTS) | $(VENV)/created
	$(PIP) cmake ninja nvidia-cuda-runtime $(shell sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr ',' ' ')
	touch $@

# torch first and by exact version: to resolve a range, pip would fetch gigabytes. The build is not isolated, so that
# what is in build/wheel serves the next one; but no setting that pyproject.toml has no more.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS) $(NATIVE_SOURCES) | $(VENV)/tools
	$(PIP) torch==$(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))
	rm -f build/wheel/CMakeCache.txt
	MAKEFLAGS= $(PIP) --no-build-isolation '.[bench,test,docs,dev]'
	touch $@
