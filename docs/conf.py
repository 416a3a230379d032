"""Sphinx builds the site from the Markdown of the whole repository, so that one link works here and on a code host:
`make docs`.
"""

from sglang_tuning_exporter import __version__

project = "sglang-tuning-exporter"
version = release = __version__
language = "en"
source_suffix = {".md": "markdown"}
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/reference/*.md", "alerts/runbooks/*.md"]
html_theme = "furo"
html_title = f"{project} {__version__}"
html_show_copyright = False
# A link to a heading is checked as a link to a file is; a file that is no page is offered for download.
myst_heading_anchors = 3
nitpicky = True
linkcheck_ignore = [
    r"http://127\.0\.0\.1.*",
    r"https://github\.com/.*",
]  # no server runs; GitHub limits how often it may be asked
suppress_warnings = [
    "toc.not_included",  # each runbook is reached from the runbooks' index
    "misc.highlighting_failure",  # Pygments does not support the colon in the name of a recorded series
]
