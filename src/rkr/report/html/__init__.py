"""The report page: `data` computes what it shows, `page` renders it as one HTML file, and its scripts only draw."""

from rkr.report.html.page import Report, render, write_report

__all__ = ["Report", "render", "write_report"]
