"""Networks that get wider as tasks come: shared by DEN, RCL and PGN."""
