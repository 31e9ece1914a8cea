"""Settings of the site: `python -m sphinx -W docs build/docs` builds it, as launch/check does.

The pages are plain Markdown, so that GitHub shows them, too. A link to another file of the
repository becomes a download; a link to a folder or to a page outside docs/ becomes plain text.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

project = "maml"
author = "The project's contributors"
copyright = author
html_title = "maml"
html_theme = "furo"
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Headings can be linked to as on GitHub.
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]

# In docstrings, `name` links to the object of that name, if the object is on the site.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88


def contents(app, name, source):
    """Make the site's contents from the lists of the first page, one part for each heading."""
    if name != "index":
        return
    for heading, links in re.findall(r"^## (.*)\n([^#]*)", source[0], re.MULTILINE):
        pages = "\n".join(re.findall(r"^- \[.*?\]\(([\w/-]+)\.md\)", links, re.MULTILINE))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n"


def without_folders(app, name, source):
    """Remove links to folders and outside pages, which GitHub can show but a site cannot."""
    here = (DOCS / name).parent

    def one(link):
        target = here / link[2]
        outside = target.suffix == ".md" and DOCS not in target.resolve().parents
        return link[1] if target.is_dir() or (outside and target.is_file()) else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)\)", one, source[0])


def setup(app):
    """Connect the functions above; Sphinx calls this one."""
    app.connect("source-read", contents)
    app.connect("source-read", without_folders)
