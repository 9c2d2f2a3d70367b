"""The published strong scaling of Optimus (arXiv 2408.03505), simulated with the planner that fills bubbles.

python -m benchmarks.optimus

__main__.py   the command, and its table: every computed figure beside the published one
scaling.py    the published figures, and the simulation of one size
models.py     durations of layers, from shapes and a data sheet
search.py     divides layers among stages, and chooses the parallel plan of the encoder
"""
