"""Sphinx settings of the site; `build.py` gathers the pages."""

project = author = "Instar"
html_title = "Instar"
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["benchmarks/results"]

myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
