"""Sphinx's settings: Markdown through MyST, the reference from docstrings."""

project = "lightning_pipeline"
author = copyright = "the lightning-pipeline authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
highlight_language = "text"  # a block without a language is what a program printed
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
html_theme = "furo"  # contents of the page beside it, light and dark, narrow screens
html_title = "lightning_pipeline"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["zoom.js"]
copybutton_selector = "div.highlight-python pre, div.highlight-bash pre, div.highlight-yaml pre"
