"""Starts SGLang 0.5.17 with one report more: which version of the weights sampled each token.

    python spans_server.py ARGUMENTS OF sglang.launch_server

Releases from 0.5.19 on report this as `weight_versions`. The machine of this experiment has torch
2.11, for which 0.5.17 is the last release, and without the report no rollout that meets an update
inside the engine could say which policy sampled it. The report is in the form of the newer
releases. It needs ``--disable-overlap-schedule``: a step's tokens are then noted before the next
request, so also before new weights, is looked at.
"""

# pyright: basic, reportMissingImports=false
# It runs under the Python of the server, with packages that the development environment lacks.
from __future__ import annotations

import itertools
import os
import sys
from typing import Any

KEY = "version_of_token"
_label = ["0"]
"""The label of the weights that this process has."""


def note_versions() -> None:
    """In the scheduler's process: note the label of the weights for every token."""
    from sglang.srt.managers.scheduler_components import batch_result_processor, weight_updater

    processor = batch_result_processor.SchedulerBatchResultProcessor
    updater = weight_updater.SchedulerWeightUpdaterManager
    collect, load = processor._maybe_collect_customized_info, updater.update_weights_from_disk

    def collected(self: Any, i: int, req: Any, logits_output: Any) -> None:
        collect(self, i, req, logits_output)
        if req.customized_info is None:
            req.customized_info = {}
        noted = req.customized_info.setdefault(KEY, [])
        noted += _label * (len(req.output_ids) - len(noted))

    def loaded(self: Any, recv_req: Any) -> Any:
        result = load(self, recv_req)
        if result.success and recv_req.weight_version is not None:
            _label[:] = [recv_req.weight_version]
        return result

    processor._maybe_collect_customized_info = collected
    updater.update_weights_from_disk = loaded


def report_spans() -> None:
    """In the process of the HTTP server: make spans of the labels when a response ends."""
    from sglang.srt.managers import tokenizer_manager

    cut = tokenizer_manager._slice_streaming_output_meta_info

    def with_spans(meta_info: Any, last_output_offset: int, keys: Any = None) -> None:
        noted = meta_info.pop(KEY, None)
        if noted is not None and meta_info["finish_reason"] is not None:
            spans, start = [], 0
            for label, tokens in itertools.groupby(noted):
                end = start + sum(1 for _ in tokens)
                spans.append({"version": label, "start": start, "end": end})
                start = end
            meta_info["weight_versions"] = spans
        cut(meta_info, last_output_offset, [key for key in keys or () if key != KEY])

    tokenizer_manager._slice_streaming_output_meta_info = with_spans


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What SGLang starts as its scheduler's process."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    note_versions()
    return run_scheduler_process(*args, **kwargs)


def main() -> None:
    """Start the server."""
    if os.environ.get("LEARNING_CPU_STAND_INS"):
        # The small form of the campaign runs on a CPU, where tests/sglang has stand-ins.
        import stand_ins

        stand_ins.install()
        stand_ins.fork()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    report_spans()
    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)


if __name__ == "__main__":
    # The scheduler's process imports this file under its own name.
    import spans_server

    spans_server.main()
