"""Workarounds for defects of torch, one file each; `catalogue.py` lists them.

A file here describes one defect and has its workaround, nothing else. It is removed when no supported torch has the
defect any more: a test per defect compiles it with torch alone, and fails on a release that no longer has it.
"""
