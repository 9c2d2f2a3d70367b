"""Balanced batches, which take equally long on every rank: costs per sample, and samplers.

costs.py      ModuleCosts: seconds per module for samples of given sizes (`tools/module_costs.py` makes them)
assign.py     the assignment of samples to bins
shares.py     the assignment of samples to ranks and micro-batches of a step
sampler.py    BalancedBatchSampler, for data sets whose sizes are known
stream.py     BalancedStreamSampler, for streams
ranks.py      exchange of costs, and of tokens of a step, between ranks
balance.py    Balance: the loads of ranks over steps, as text and page

All but `sampler.py`, `stream.py` and `ranks.py` are torch-free.
"""
