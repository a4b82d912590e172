"""Checks a file of SkyPilot against its own schema, without the packages that it imports."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import jsonschema
import yaml

# The packages' own first lines load all clouds. The schema needs two modules that import nothing;
# of a third it takes names of settings that no file here uses.
found = find_spec("sky")
assert found is not None
package = ModuleType("sky")
package.__path__ = found.submodule_search_locations
package.__version__ = version("skypilot")
sys.modules.update({"sky": package, "sky.skylet.autostop_lib": MagicMock()})

from sky.utils import schemas  # noqa: E402

# The part "config" is the whole configuration of a user.
schemas._task_config_schema = dict

for name in sys.argv[1:]:
    task = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    print(f"{name} is a task of SkyPilot")
