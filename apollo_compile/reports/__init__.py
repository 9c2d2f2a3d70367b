"""What was done and what it gave: reads compilations and traces, nothing else.

summary.py      (Compilation, Trace) -> GraphSummary: every number is computed here, once
render_text.py  summaries -> text for a terminal
"""
