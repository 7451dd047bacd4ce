"""How the site is built; `make docs` does it. Warnings are errors there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import bilevel

project = "bilevel"
author = "the authors of bilevel"
copyright = "the authors of bilevel"
version = release = bilevel.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
]
exclude_patterns = ["*.in.md"]
highlight_language = "none"
templates_path = ["_templates"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_param = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Reference"]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"bilevel {release}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": False}
