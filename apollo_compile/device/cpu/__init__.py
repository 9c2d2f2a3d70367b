"""A CPU as a device: lanes are threads that are pinned to cores.

execute.py    Program + bodies -> Executable, and the lanes that all executables share
calibrate.py  what lanes of every size achieve -> DeviceProfile
cores.py      which cores are this process's, beside other ranks of the machine
cgroup.py     how much time the control group grants
"""
