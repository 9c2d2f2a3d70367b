"""The entry for `device/open.py` to the self-check."""

from apollo_compile.device.gpu.check.self_check import unavailable_reason as find_complaint

__all__ = ["find_complaint"]
