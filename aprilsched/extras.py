"""Optional dependencies: whoever lacks one is told in one sentence which extra brings it.

`import aprilsched` and a scheduler on SGLang servers need only the packages that the base install
requires. Everything else is imported inside ``with extra(NAME)``, where NAME is an entry of
``[project.optional-dependencies]`` in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from aprilsched.errors import MissingExtra


@contextmanager
def extra(name: str) -> Generator[None]:
    """Put this around imports of packages that the extra `name` brings.

    Raises:
        MissingExtra: if one of them is not installed or cannot be imported.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ImportError as error:
        missing = error.name or str(error)
        if missing.partition(".")[0] == "aprilsched":
            raise  # a mistake of this package, which no installation mends
        absent = isinstance(error, ModuleNotFoundError)
        what = "is not installed" if absent else f"cannot be imported ({error})"
        raise MissingExtra(f"{missing} {what}; pip install 'aprilsched[{name}]'.") from error
