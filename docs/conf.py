"""The web page (`make site`): nothing is executed, the outputs are the stored ones, nothing comes from another host."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "NaN Lab"
copyright = "the NaN Lab authors; code: MIT, text and figures: CC BY 4.0"
language = "en"

root_doc = "docs/index"  # sources are read from the repository's root, so that the links between its files hold here
include_patterns = ["docs/**", "notebooks/**", "CONTRIBUTING.md"]
exclude_patterns = ["docs/_*", "docs/accelerate", "**/.ipynb_checkpoints", "notebooks/runs"]
exclude_patterns += [".*", "bench", "build", "dist", "kit", "runs", "src", "tests", "tools"]

suppress_warnings = ["toc.empty_glob"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "nanlab_site"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_heading_slug_func = "nanlab_site.jupyter_anchor"
nb_execution_mode = "off"
nb_merge_streams = True

default_role = "literal"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature would not fit a line; docstrings give shapes and units

html_theme = "furo"
html_title = "NaN Lab"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["nanlab.css"]
html_extra_path = ["_extra"]  # index.html, which leads to docs/index.html
html_copy_source = False
