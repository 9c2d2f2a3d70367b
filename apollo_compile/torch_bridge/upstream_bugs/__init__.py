"""Defects of torch that we work around, one file each; `catalogue.py` lists them.

A file here says what goes wrong, and has the workaround and nothing else. It goes when every supported torch is mended:
a test per defect compiles it with torch alone, and fails on the release that no longer has it.
"""
