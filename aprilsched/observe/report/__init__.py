"""The report: one page about a run, or about two side by side, and its figures as JSON.

`material` reads the log once, and `gather` makes a
:class:`~aprilsched.observe.report.report_data.ReportData` of it. The charts and the page are drawn
from that object alone, and it is also the JSON.
"""
