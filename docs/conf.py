"""How the site is built; `make docs` does it. Warnings are errors there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import gallery_text

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
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "gallery_result",
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

# Examples are shown, not run; `python -m examples.gallery` does that, for results.json.
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery/pages",
    "plot_gallery": False,
    "ignore_pattern": gallery_text.others(),
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "write_computation_times": False,
    "reference_url": {"bilevel": None},
    "notebook_images": False,
}

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
