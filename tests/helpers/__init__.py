"""Helpers that tests of several folders share. Import them as `from helpers.learning import ...`."""
