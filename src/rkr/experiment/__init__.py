"""Experiments: recipes, plans, the one training loop, run folders and tuning.

May import core, networks, data and methods. Must not know reports or the command line.
"""
