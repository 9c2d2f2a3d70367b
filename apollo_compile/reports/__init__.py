"""What was done and what it gave: reads compilations and traces, nothing else.

summary.py      (Compilation, Trace) -> GraphSummary: every number is computed here, once
report.py       Report: the summaries of one model, and the way to every rendering
diff.py         what differs between two reports
words.py        sentences: what overlapped, what did not and why, what to try
render_text.py  for a terminal
render_html.py  one page without network, from page.css and page.js
render_trace.py the trace-event format, for Perfetto
render_dot.py   for Graphviz
render_bench.py a measurement as a table
"""
