"""One copy of a base answers for many tasks over HTTP: `rkr serve`, and `rkr.Client` to ask it.

Nothing here is imported before it is needed: the client works without torch and without a web framework.
"""
