#!/bin/sh
# Run the GPU suite on a machine without a network: sh benchmarks/on_a_gpu.sh WHEELS [options of the suite]
#
# WHEELS is a folder with one wheel of this package and of each package that the machine lacks. They are unpacked into
# build/gpu, beside what the machine has; torch is the machine's. What that takes is taken off the suite's time.
set -eu
began=$(date +%s)
wheels=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
rm -rf build/gpu
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target build/gpu "$wheels"/*.whl
# The checkout comes first on sys.path, so it needs the extension too: that of the wheel.
cp build/gpu/apollo_compile/_native*.so apollo_compile/
export PYTHONPATH="$PWD/build/gpu${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m benchmarks.gpu_suite --budget $((570 - ($(date +%s) - began))) "$@"
