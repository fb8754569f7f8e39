"""Configuration of the documentation site: `make docs`. Nothing here needs a network."""

from __future__ import annotations

import sys
from pathlib import Path

import rkr

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "rkr"
author = "The rkr authors"
copyright = "The rkr authors, MIT licence"
release = version = rkr.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "from_rkr",
]

source_suffix = {".md": "markdown"}
root_doc = "index"
templates_path = ["_templates"]
exclude_patterns = ["_build", "_extensions"]

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Columns", "params_style")]

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = "rkr"
html_static_path = ["_static"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
default_role = "py:obj"  # `name` in docstrings is code, and a link where there is such a name
pygments_style = "friendly"
pygments_dark_style = "monokai"
