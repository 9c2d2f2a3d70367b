"""What a sample costs on every rank.

costs.py      ModuleCosts: seconds per module for samples of given sizes (`tools/module_costs.py` makes them)
"""
