"""The command `ispasp`."""

from ispasp.cli.app import main

__all__ = ["main"]
