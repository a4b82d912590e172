"""Prints the table of a run of transfer.py: ``transfer_table.py transfer.jsonl``."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def markdown(path: Path) -> str:
    """The medians of each way without its warm-up; a row that is not verified stands out."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    problems: list[str] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in ("error", "note"):
            problems.append(f"{row['way']}: {row.get('error') or row['text']}")
        elif row["kind"] == "transfer" and row.get("repeat", 0) >= 0:
            what = f"{row['bucket_bytes'] / 2**30:g} GiB" if "bucket_bytes" in row else ""
            if "share" in row:
                what = f"{row['share']:.0%} changed"
            groups[row["way"], "step still queued" if row.get("pending") else what].append(row)
    lines = [
        "| way | bucket or share | prepare | publish | GB/s | sent | verified |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (way, what), rows in groups.items():
        middle = {
            key: statistics.median(row[key] for row in rows)
            for key in ("prepare_s", "publish_s", "gb_s")
        }
        sent = statistics.median(row.get("sent_bytes", row["bytes"]) for row in rows)
        verified = sum(row["verified"] for row in rows)
        lines.append(
            f"| {way} | {what} | {middle['prepare_s'] * 1e3:,.1f} ms "
            f"| {middle['publish_s'] * 1e3:,.1f} ms | {middle['gb_s']:.3g} "
            f"| {sent / 1e9:.3g} GB | {verified} of {len(rows)} |"
        )
    return "\n".join([*lines, "", *problems])


if __name__ == "__main__":
    print(markdown(Path(sys.argv[1])))
