"""Training steps that are hard to get right, each beside an eager copy of itself.

cases        what a case is, the table of all of them, and the loop in eager
turns        the door: every variant that a step offers takes its steps in turn
compare      where two copies of a training differ
models       small models, losses and batches that cases are made of

Cases are in files by subject: `optimizers`, `parameters`, `modules`, `losses`, `batches`, `changes`, `settings`.
"""
