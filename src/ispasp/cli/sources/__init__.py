"""Models, weights and data as users name them on the command line."""

from ispasp.cli.sources.classes import matched
from ispasp.cli.sources.data import load_data, sizes
from ispasp.cli.sources.examples import Examples, Wanted
from ispasp.cli.sources.huggingface import is_causal
from ispasp.cli.sources.loaded import Loaded, with_options
from ispasp.cli.sources.models import load_model
from ispasp.cli.sources.runs import runs
from ispasp.cli.sources.saved import RESULT, dense_spec, is_saved, saved_folder

__all__ = [
    "RESULT",
    "Examples",
    "Loaded",
    "Wanted",
    "dense_spec",
    "is_causal",
    "is_saved",
    "load_data",
    "load_model",
    "matched",
    "runs",
    "saved_folder",
    "sizes",
    "with_options",
]
