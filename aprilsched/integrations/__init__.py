"""Adapters for trainers, one module for each; a module is imported only by those who use it."""

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError


def check_fixed_groups(config: SchedulerConfig, trainer: str) -> None:
    """Refuse settings under which a group may have fewer rollouts than the trainer expects.

    Raises:
        ConfigError: if groups may shrink.
    """
    if config.retries.member == "shrink":
        raise ConfigError(
            f'retries.member is "shrink", and {trainer} takes groups of one size; set "again" or '
            '"drop_group".'
        )
