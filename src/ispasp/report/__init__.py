"""Output for people: progress bars, tables, figures and the HTML report, from records and text."""

from ispasp.report.figures import new_figure
from ispasp.report.progress import track
from ispasp.report.tables import Column, Printed, Sheet, change, render, told

__all__ = ["Column", "Printed", "Sheet", "change", "new_figure", "render", "told", "track"]
