"""What was done and what it gave: reads compilations and traces, nothing else. No file imports one above it.

report.py       Report: the summaries of one model, with a method for every rendering
render_text.py  for a terminal
render_html.py  one page without network, from page.html, page.css and page.js
render_trace.py the trace-event format, for Perfetto
render_dot.py   for Graphviz
diff.py         what differs between two reports
words.py        sentences: what overlapped, what did not and why, what to try
colors.py       colours of branches
summary.py      (Compilation, Trace) -> GraphSummary: every number is computed here, once,
timelines.py    or here, if it is over time,
branches.py     or here, if it is of modules
check.py        whether a summary from a file hangs together
values.py       the frozen plain data that all of them pass on
"""
