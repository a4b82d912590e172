"""One page about a run, or about two side by side, and the figures behind it as JSON.

The way of a figure: `reading` goes through the log once, `gather` makes a
:class:`~aprilsched.analysis.report.model.ReportData` of it, the charts and the page are drawn from
that alone, and the same object is the JSON.
"""
