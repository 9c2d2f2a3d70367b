"""Defects of torch that we work around."""
