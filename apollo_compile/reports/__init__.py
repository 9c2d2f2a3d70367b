"""Reports of compilations and traces: data and renderers. No file imports one above it.

report.py       Report: the summaries of one model, with a method for every rendering
render_text.py  for a terminal
render_html.py  one page without network, from page.html, page.css and page.js
render_trace.py the trace-event format, for Perfetto
diff.py         differences between two reports
metrics.py      numbers for dashboards
words.py        sentences: overlaps, missed overlaps and their reasons, limits, suggestions
why.py          reasons for the lane and the start of a segment or module
colors.py       colours of branches
summary.py      (Compilation, Trace) -> GraphSummary: computes every number of a report, except
timelines.py        functions of time, and
branches.py         numbers of modules and branches
check.py        consistency checks of summaries from files
values.py       the frozen plain data that all of them share
"""
