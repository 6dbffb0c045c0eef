"""Training: recipes, losses, data order, checkpoints, and the loop on accelerate."""

from ispasp.train.objective import Teacher
from ispasp.train.recipe import AdamW, Recipe, Sgd, Soft

__all__ = ["AdamW", "Recipe", "Sgd", "Soft", "Teacher"]
