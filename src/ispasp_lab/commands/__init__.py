"""The commands that the lab adds to `ispasp`: demo, reproduce, bench."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    from ispasp_lab.commands.bench import bench  # they import `ispasp.cli`, which calls this while it is imported
    from ispasp_lab.commands.demo import demo
    from ispasp_lab.commands.reproduce import reproduce

    app.command()(demo)
    app.add_typer(reproduce, name="reproduce")
    app.add_typer(bench, name="bench")
