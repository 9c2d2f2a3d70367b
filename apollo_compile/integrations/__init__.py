"""Callbacks of training frameworks that log the verdict and `report.metrics()`; each file imports its framework.

transformers.py     Hugging Face Trainer
lightning.py        Lightning
"""
