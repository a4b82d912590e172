"""Makes one run folder of that of a run in shards, for the report and everything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aprilsched.analysis.rebuild import rebuilt_summary
from aprilsched.analysis.run import readable
from aprilsched.runs.config_file import as_toml
from aprilsched.runs.settings import RunSettings
from aprilsched.telemetry.event_log.merging import merge_logs
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import RunFolder


def merged_run(
    folder: Path | str, out: Path | str, settings: RunSettings | None = None
) -> RunSummary:
    """Write the run folder `out` with one event log, one summary and one config.toml for the run in
    shards that wrote `folder`.

    ``aprilsched report OUT``, the notebooks and every other reader of a run folder take it.

    Args:
        folder: the folder that was given to :class:`~aprilsched.shards.ShardedScheduler`.
        out: a folder that does not exist or is empty.
        settings: the settings of the run, for config.toml: how it was scheduled, the addresses of
            the engines, the prompts.

    Returns:
        The summary of the run.

    Raises:
        RunFolderError: if `folder` has no run in shards, or if `out` is taken or cannot be written.
    """
    source, target = Path(folder), RunFolder(Path(out))
    target.create(as_toml(settings or RunSettings()))
    with readable(source):
        merge_logs(source, target.events)
        # The log has ended, so its figures are those of the run.
        summary = replace(rebuilt_summary(target.path), error=None)
    target.write_summary(summary)
    return summary
