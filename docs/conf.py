"""Settings of the documentation, which `make docs` builds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import manyclass

project = "manyclass"
author = "The manyclass developers"
copyright = author
version = release = manyclass.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "_extensions.docstrings",
    "_extensions.included",
    "_extensions.links",
]
# The pages that show files of the repository, so that links between those files lead to pages.
pages_of_files = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/scale.md": "scale.md",
}
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
nitpicky = True
nitpick_ignore_regex = [
    # Types of other packages, whose inventories are not downloaded.
    (r"py:.*", r"(torch|nn|np|numpy|scipy|sklearn|click|datasets|accelerate|lightning|sentence_transformers)\..*"),
    (
        r"py:.*",
        r"(transformers|collections|concurrent|contextlib|dataclasses|datetime|io|os|pathlib|re|types|typing)\..*",
    ),
    (r"py:.*", r"csr_array"),
    # Annotations with names that users do not need.
    (r"py:.*", r"manyclass(\.\w+)*\._\w+\.\w+"),
    (r"py:.*", r"manyclass\.(diagnostics\.DiagnosedHead|data\.share\.Indices|parallel\.checkpoint\.Stateful)"),
    (r"py:.*", r"manyclass\.tasks\.task\.(ModelSpec|EncoderSpec|PredictBatch)"),
    (r"py:.*", r"manyclass\.(parallel\.prepare\.M|training\.ranks\.T)"),  # type variables
]

# Pages with code cells are executed, and an error in one of them is an error of the build.
nb_execution_mode = "cache"
nb_execution_timeout = 1800
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# In docstrings one backtick marks code.
default_role = "code"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "manyclass"
html_static_path = ["_static"]
html_css_files = ["manyclass.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 1,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
