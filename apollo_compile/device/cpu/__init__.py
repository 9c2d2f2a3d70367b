"""The CPU target: lanes are threads that are pinned to cores.

execute.py    Program + bodies -> Executable, and the lanes that all executables share
calibrate.py  the calibration procedure: lanes of every size -> DeviceProfile
probes.py     microbenchmarks of torch kernels
runtime.py    microbenchmarks of the runtime, and of fused loops
discover.py   the profile of this machine: calibrated, or scaled by a quick measurement
matmul_libraries.py  selection of oneDNN or BLAS for each matmul
machine.py    name, features and fingerprint of the CPU
cores.py      division of cores among local ranks; core topology
cgroup.py     CPU time granted by control groups
"""
