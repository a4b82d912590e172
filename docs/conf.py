"""The documentation site: ``make docs``. Nothing is fetched, neither then nor by a reader."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from aprilsched import __version__

project = "aprilsched"
author = "the aprilsched authors"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "aprildocs.docstrings",
    "aprildocs.generated",
    "aprildocs.repository_links",
]
exclude_patterns = ["_build", "_ext", "adr"]
root_doc = "index"

# Links to files that are not pages; without the address they are paths.
_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
repository_url = _project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]

# --- pages ---------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

# Dashes only: quotes in these pages are mostly those of code.
smartquotes_action = "D"

# Names in docstrings stand in single backticks.
default_role = "code"

# --- API -----------------------------------------------------------------------------------------

nitpicky = True
nitpick_ignore_regex = [
    # Not ours, or of the standard library, whose pages cannot be fetched.
    (
        r"py:.*",
        r"(aiohttp|asyncio|collections|concurrent|contextlib|matplotlib|np|numpy|os|pathlib|time|torch)\..*",
    ),
    (r"py:.*", r"(types\.TracebackType|NDArray|Tensor|MsgspecError)"),
    # Inner workings that a signature or a sentence names, and the decisions describe.
    (r"py:.*", r"aprilsched\.kernel\.core\..*"),
    (r"py:mod", r"aprilsched\..*"),
    (r"py:class", r"aprilsched\.types\.Receipt"),
    (r"py:class", r"aprilsched\.kernel\.values\.capabilities\.Reservation"),
    (r"py:class", r"aprilsched\.simulation\.engine\.toy_model\.(ToyModel|KvTier)"),
    (r"py:class", r"aprilsched\.simulation\.engine\.fleet\.EngineSettings"),
    (r"py:class", r"aprilsched\.kernel\.engines\.fleet\.(EngineT|ServerSettings)"),
    (r"py:class", r"aprilsched\.kernel\.shell\.rollouts\.SchedulerOptions"),
    (r"py:class", r"aprilsched\.observe\.figures\.(live_figures\.LiveFigures|table\.Clients)"),
    (r"py:class", r"aprilsched\.observe\.figures\.engine_time\.Recording"),
    (r"py:class", r"aprilsched\.observe\.report\.report_data\.ReportData"),
    (r"py:class", r"aprilsched\.observe\.sampling\.engine_sampler\.HasEngines"),
    (r"py:class", r"aprilsched\.agents\.chat\.tokenizer\.ModelTokenizer"),
    (r"py:class", r"aprilsched\.agents\.sessions\.history\.Question"),
    (r"py:class", r"aprilsched\.testing\.contract\.Stream"),
    (r"py:data", r"FIELDS"),
    # Type variables, and names that a signature has without their module.
    (r"py:class", r"aprilsched\..*\._?T"),
    (r"py:class", r"Weights|device|Path"),
]
# Written as they are in the code, and not as what they stand for.
_ALIASES = ("BoolArray", "Command", "Event", "Float32Array", "Int32Array")
autodoc_type_aliases = {alias: alias for alias in _ALIASES}
nitpick_ignore = [("py:class", alias) for alias in _ALIASES]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes of a docstring as a list; as entries of their own they would be there twice.
napoleon_use_ivar = True

# --- looks ---------------------------------------------------------------------------------------

html_theme = "furo"
html_title = "aprilsched"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
