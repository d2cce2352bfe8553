"""Sphinx settings of the web edition, read where tools/site/pages.py has laid out the sources."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "minillm"
author = "the authors of minillm"
copyright = "the authors of minillm, MIT licence"
html_title = "minillm"
extensions = ["myst_nb", "sphinx_copybutton", "web_pages"]

nb_execution_mode = "off"  # the stored outputs
nb_merge_streams = True
nb_code_prompt_show = "Show the code that draws this"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 6
myst_heading_slug_func = "web_pages.jupyter_anchor"
smartquotes = False

html_theme = "furo"
html_static_path = [str(Path(__file__).parents[2] / "build/site-src/_static")]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_js_files = ["print.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {"navigation_with_keys": False}
copybutton_exclude = ".linenos, .gp"
