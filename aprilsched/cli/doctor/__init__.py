"""The contract of an engine against a live server, and what the server reports about itself."""

from aprilsched.cli.doctor.checks import ROWS, SCORES, Row, examine
from aprilsched.cli.doctor.server import Finding, Judge, LeftOut, Server, Status, Verdict, one_line

__all__ = [
    "ROWS",
    "SCORES",
    "Finding",
    "Judge",
    "LeftOut",
    "Row",
    "Server",
    "Status",
    "Verdict",
    "examine",
    "one_line",
]
