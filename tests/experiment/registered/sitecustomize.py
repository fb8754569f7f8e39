"""For processes that a test's command starts: they know the test's method, as the command itself does."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import small_candidates

small_candidates.register()
