"""Experiments as files: one TOML file per table or figure of the paper, with the paper's numbers."""

from rkr.experiment.recipes.load import list_recipes, load_recipe
from rkr.experiment.recipes.recipe import Recipe

__all__ = ["Recipe", "list_recipes", "load_recipe"]
