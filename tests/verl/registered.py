"""Puts the trainer on a CPU in the place of verl's, in every process that imports verl."""

# pyright: basic, reportMissingImports=false
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.verl.on_cpu import Trainer

TRAINER_REGISTRY["separate_async"] = Trainer
