"""One page of studies and runs: tables, curves, and which signs were changed. It opens offline."""

from unflip.report.build import report_data
from unflip.report.page import render, write_report

__all__ = ["render", "report_data", "write_report"]
