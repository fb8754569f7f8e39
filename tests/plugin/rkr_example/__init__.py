"""A plug-in of rkr."""
