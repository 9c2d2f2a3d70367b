"""The seam between the compiler and devices; nothing here needs torch at run time.

target.py       capabilities of a device, loaded programs, code and its contract
compilation.py  the products of one graph that a device loads, and findings of earlier processes
profile.py      constants and rates of a device
lanes.py        the lanes that a program may use
fingerprint.py  identity of a device for files
check_result.py results of checks
matmul.py       a matrix product whose library may be chosen
"""
