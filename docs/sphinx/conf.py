"""Sphinx settings of the site; `build.py` gathers the pages."""

project = author = "Instar"
html_title = "Instar"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["benchmarks/results"]

myst_heading_anchors = 4

default_role = "code"  # docstrings are Markdown in this: `name` is code
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
