"""What adapters for trainers share: settings, checkpoints, and turns as agent loops expect them."""

from __future__ import annotations

import asyncio
import importlib
import io
import pickle  # noqa: TID251 (what trainers attach to prompts)
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.core.state.records import GroupRecord
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell import PromptQueue, RolloutScheduler, Turn, TurnOutput
from aprilsched.kernel.values.companions import Companion, CompanionRows
from aprilsched.kernel.values.extras import extra
from aprilsched.kernel.values.files import read_regular, written_whole
from aprilsched.trainers.advantages import advantages
from aprilsched.types import Batch, BoolArray, Group, Media, Rollout, SamplingParams, Unit

if TYPE_CHECKING:
    Theirs = Any
else:
    Theirs = object
"""The base of a class whose other base, a class of the trainer, is known only at run time."""


def package(trainer: str, module: str) -> Any:
    """Return a module of a trainer, or of the packages that it brings.

    Raises:
        MissingExtra: if the extra with the name of the trainer is not installed.
    """
    with extra(trainer):
        return importlib.import_module(module)  # noqa: TID251 (a module of a trainer)


def class_of(actor: Any) -> type[Any]:
    """Return the class that ``@ray.remote`` was applied to."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__


def fitted(
    config: SchedulerConfig,
    trainer: str,
    *,
    max_staleness: int,
    setting: str,
    samples: bool = False,
    **changes: Any,
) -> SchedulerConfig:
    """Return the settings with the trainer's `changes` and its bound on staleness.

    It replaces the default bound, and a stricter bound of the settings stays. `setting` names the
    trainer's setting of the bound; `samples` is that of :func:`check_fixed_groups`.

    Raises:
        ConfigError: if the settings' own bound is looser, or as :func:`check_fixed_groups`.
    """
    check_fixed_groups(config, trainer, samples=samples)
    own = config.policies.staleness.bound
    if config.max_staleness == "auto":
        changes["max_staleness"] = max_staleness
    elif own is None or own > max_staleness:
        raise ConfigError(
            f"max_staleness is {own}, and {setting} lets it be {max_staleness} at most; raise "
            f"{setting}, or leave max_staleness out."
        )
    return replace(config, **changes)


def check_fixed_groups(config: SchedulerConfig, trainer: str, *, samples: bool = False) -> None:
    """Reject settings under which batches or groups may differ in size from the trainer's.

    Raises:
        ConfigError: if batches are not filled by whole groups, or if these may shrink. With
            `samples` single samples may fill a batch too, whatever becomes of their group.
    """
    if config.delivery != "groups" and not samples:
        raise ConfigError(
            f'delivery is "{config.delivery}", and {trainer} takes whole groups; leave it at '
            '"groups".'
        )
    if config.stop != "groups":
        raise ConfigError(
            f"stop is {config.stop!r}, and {trainer} takes a fixed number of groups; leave it at "
            '"groups".'
        )
    if config.retries.member == "shrink" and config.delivery == "groups":
        raise ConfigError(
            f'retries.member is "shrink", and {trainer} takes groups of one size; set "again" or '
            '"drop_group".'
        )


def trained_advantages(units: Sequence[Unit]) -> NDArray[np.float64]:
    """Return the advantage of each rollout; 0 without siblings, which gives no gradient.

    Raises:
        ConfigError: if a reward is missing.
    """
    return np.nan_to_num(advantages(Batch(index=0, version=0, units=tuple(units))))


def refuse(settings: Mapping[str, tuple[object, str]]) -> None:
    """Reject every trainer setting that is set; `settings` has (value, reason) by name.

    Raises:
        ConfigError: if one is.
    """
    for name, (present, why) in settings.items():
        if present:
            raise ConfigError(f"{name} is set, and {why}; leave it out.")


def check_replay(
    config: SchedulerConfig, setting: str, example: str = "routed_experts=uint8[48,8]"
) -> None:
    """Reject a trainer's replay `setting` if the scheduler requests no companion like `example`.

    Raises:
        ConfigError: if its companions lack this one.
    """
    if all(each.name != Companion.of(example).name for each in config.policies.companions):
        raise ConfigError(
            f"{setting} is set, and the scheduler does not know the shape of the rows; set its "
            f'companions, such as ("{example}",).'
        )


def missing_prompts(queue: PromptQueue, config: SchedulerConfig) -> int:
    """Return how many prompts to add to `queue`, so that none is missing at the next launch."""
    batches = (config.policies.staleness.bound or 0) + 1
    return max(0, batches * config.batch_groups - len(queue))


def untrained_groups(state: SchedulerState) -> Iterator[GroupRecord | Group]:
    """Yield the groups in flight, and those of batches that the trainer has not acknowledged."""
    yield from state.in_flight.training_groups()
    for batch in state.delivery.unacknowledged.values():
        yield from batch.groups


def forget_delivered(rows: dict[int, Any], state: SchedulerState) -> None:
    """Delete the rows of prompts that have left the scheduler.

    The keys of prompts and `rows` are the numbers of the prompts in the order of their pushes, from
    0.
    """
    live = {group.prompt.key for group in state.in_flight.groups.values()}
    for number in [each for each in rows if each < state.prompts.cursor and each not in live]:
        del rows[number]


async def save_state(
    path: Path,
    scheduler: RolloutScheduler,
    config: SchedulerConfig,
    content: Callable[[], object],
    *,
    acknowledge: bool = True,
) -> None:
    """Write one file with the state of `scheduler` and the content that belongs to it.

    `content` is called after the state was taken, on the event loop, so it must still have what has
    left the scheduler in between. See :func:`write_state`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler"
        await scheduler.checkpoint(file, acknowledge=acknowledge)
        await asyncio.to_thread(write_state, path, file, config, content())


def write_state(path: Path, checkpoint: Path, config: SchedulerConfig, content: object) -> None:
    """Write one file with a scheduler's `checkpoint` and the `content` that belongs to it.

    `content` has what the trainer attaches to prompts. It is pickled, as trainers pickle the state
    of their dataloaders. The file is complete, or an existing one stays.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        pickle.dump((_groups_by(config), content, checkpoint.read_bytes()), file)


def read_state(path: Path, config: SchedulerConfig, restore: Callable[[Path], None]) -> Any:
    """Return the content of a file of :func:`write_state`; `restore` gets the checkpoint in it.

    Raises:
        ConfigError: if the file's groups have another size, or are delivered in another way.
        StoreError: if the file cannot be read.
    """
    try:
        settings, content, checkpoint = pickle.loads(read_regular(path))  # noqa: S301
    except Exception as error:  # A pickle that is cut off or of other classes raises anything.
        raise StoreError(
            f"{path} cannot be read ({error!r}); resume from another checkpoint, or remove the "
            "file and lose what was in flight."
        ) from error
    for name, own in _groups_by(config).items():
        if (before := settings[name]) != own:
            raise ConfigError(
                f"{name} must be {before!r} as in the checkpoint {path}, got {own!r}; restore the "
                "setting, or remove the file and lose what was in flight."
            )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler"
        file.write_bytes(checkpoint)
        restore(file)
    return content


def _groups_by(config: SchedulerConfig) -> dict[str, object]:
    """Return the settings that must not change under rollouts in flight."""
    return {
        "group_size": config.group_size,
        "delivery": config.delivery,
        "siblings": config.policies.siblings,
    }


def staleness(rollout: Rollout, version: int) -> NDArray[np.int32]:
    """Return how many versions before `version` each token was sampled that counts in the loss."""
    return version - rollout.versions[rollout.loss_mask]


def routed_experts(companions: Mapping[str, CompanionRows]) -> NDArray[np.int32] | None:
    """Return the experts of each position, [n, layers, per token]; None if not requested."""
    experts = companions.get("routed_experts")
    return None if experts is None else experts.rows.values.astype(np.int32)


async def generate(
    turn: Turn,
    ids: Sequence[int],
    sampling: SamplingParams | None,
    *,
    images: Sequence[Any] = (),
    processor: Any = None,
) -> TurnOutput:
    """Generate one turn after `ids`, in which `processor` has expanded the images' placeholders.

    Raises:
        ConfigError: if the images do not fit the ids.
    """
    media = await asyncio.to_thread(images_of, images) if images else ()
    sent = one_placeholder_each(ids, len(media), processor)
    return await turn.generate(np.asarray(ids)[sent], sampling, media)


def images_of(given: Sequence[Any]) -> tuple[Media, ...]:
    """Return a trainer's images as :class:`~aprilsched.Media`.

    An image is a Pillow image, a string or bytes as :class:`~aprilsched.Media` takes them, or a row
    of a Hugging Face image column, with the file's "bytes" or its "path".
    """
    found: list[Media] = []
    for image in given:
        source: Any = image
        if isinstance(image, dict):
            row = cast("dict[str, Any]", image)
            source = row.get("bytes") or row.get("path")
        elif hasattr(image, "save"):
            file = io.BytesIO()
            image.save(file, format="PNG")
            source = file.getvalue()
        found.append(Media("image", source))
    return tuple(found)


def one_placeholder_each(
    ids: Sequence[int] | NDArray[Any], images: int, processor: Any
) -> BoolArray:
    """Which of the `ids`, bool [n], an engine is sent that expands placeholders itself.

    Trainers have the ids as `processor` has expanded them, with a row of placeholders for each
    image. SGLang takes each of these for an image of its own, and tokenizes the decoded text again.

    Raises:
        ConfigError: if the number of placeholder rows differs from the number of images.
    """
    array = np.asarray(ids)
    kept = np.ones(len(array), dtype=np.bool_)
    if not images:
        return kept
    token = getattr(processor, "image_token_id", None)
    if token is None and (text := getattr(processor, "image_token", None)) is not None:
        token = processor.tokenizer.convert_tokens_to_ids(text)
    places = array == token
    if places.sum() != images:
        kept[1:] = ~(places[1:] & places[:-1])
    if (rows := int((places & kept).sum())) != images:
        raise ConfigError(
            f"a prompt has {images} images and {rows} rows of the placeholder {token}; give it a "
            "processor that has an image_token_id, and one row for each image."
        )
    return kept
