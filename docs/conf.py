"""Sphinx's settings: Markdown through MyST, the reference from docstrings."""

project = "lightning_pipeline"
author = "the lightning-pipeline authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
html_theme = "alabaster"
html_theme_options = {"description": "Pipeline parallelism for the LightningModule you already have"}
