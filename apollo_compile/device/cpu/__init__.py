"""A CPU as a device: lanes are threads that are pinned to cores.

execute.py    Program + bodies -> Executable, and the lanes that all executables share
calibrate.py  what lanes of every size achieve -> DeviceProfile: the procedure
probes.py     calls of torch that segments consist of, and their times
runtime.py    what the runtime costs, and kernels that only Inductor makes
trials.py     programs of test bodies on lanes
fit.py        times -> the rates of a profile
discover.py   the profile of this machine: calibrated, or scaled by a quick measurement
machine.py    what the system says of the CPU, and the fingerprint of measurements on it
cores.py      which cores are this process's, beside other ranks of the machine
cgroup.py     how much time the control group grants
"""
