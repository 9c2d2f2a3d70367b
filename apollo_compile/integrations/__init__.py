"""Callbacks of training frameworks that log `report.metrics()`; each file imports its framework.

transformers.py     Hugging Face Trainer
lightning.py        Lightning
"""
