"""What people see: progress bars, tables, figures. It knows records and text, nothing of networks."""

from ispasp.report.figures import new_figure
from ispasp.report.names import told
from ispasp.report.progress import track
from ispasp.report.sheet import Sheet
from ispasp.report.tables import Column, change, render

__all__ = ["Column", "Sheet", "change", "new_figure", "render", "told", "track"]
