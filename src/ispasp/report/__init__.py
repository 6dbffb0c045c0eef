"""What people see: progress bars, tables, figures."""

from ispasp.report.figures import new_figure
from ispasp.report.progress import track
from ispasp.report.tables import Column, render

__all__ = ["Column", "new_figure", "render", "track"]
