"""The report page: `data` makes of results what is shown, `page` puts it into one HTML file; the script only draws."""

from rkr.report.html.page import Report, render, write_report

__all__ = ["Report", "render", "write_report"]
