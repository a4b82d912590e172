"""The contract of an engine against a live server, and what the server reports about itself."""

from aprilsched.cli.doctor.checks import ROWS, Row, examine
from aprilsched.cli.doctor.server import Finding, Status, one_line

__all__ = ["ROWS", "Finding", "Row", "Status", "examine", "one_line"]
