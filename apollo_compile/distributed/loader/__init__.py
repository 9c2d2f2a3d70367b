"""Batches that take as long on every rank: costs per sample, and samplers that share them out.

costs.py      ModuleCosts: seconds per module for samples of given sizes (`tools/module_costs.py` makes them)
assign.py     the assignment of samples to ranks and micro-batches
sampler.py    BalancedBatchSampler, for data sets whose sizes are known
stream.py     BalancedStreamSampler, for streams
ranks.py      the two things that ranks exchange: costs, and tokens of a step
balance.py    Balance: the loads of ranks over steps
picture.py    a Balance as a page and as a trace

All but `sampler.py`, `stream.py` and `ranks.py` are torch-free.
"""
