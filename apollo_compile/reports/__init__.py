"""Reports of compilations and traces: data and renderers. No file imports one above it.

report.py       Report: the summaries of one model, with a method for every rendering
render_text.py  for a terminal
render_html.py  one page without network, from page.html, page.css and page.js
render_trace.py the trace-event format, for Perfetto
render_dot.py   for Graphviz
diff.py         differences between two reports
metrics.py      numbers for dashboards
words.py        explanations in sentences: what overlapped, what did not and why, what to try
why.py          why a segment or module runs where and when it does
colors.py       colours of branches
summary.py      (Compilation, Trace) -> GraphSummary: every number is computed once, here
timelines.py        or here, if it is a function of time,
branches.py         or here, if it is about modules and branches
check.py        whether a summary from a file is consistent
values.py       the frozen plain data that all of them share
"""
