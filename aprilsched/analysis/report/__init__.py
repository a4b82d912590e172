"""One page about a run, or about two side by side, and the figures behind it as JSON.

The way of a figure: `material` reads the log once, and `gather` makes a
:class:`~aprilsched.analysis.report.report_data.ReportData` of it. The charts and the page are drawn
from that alone, and the same object is the JSON.
"""
