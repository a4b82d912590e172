"""Builds the Grafana dashboard from a table of panels. ``python -m`` this module prints
grafana.json.

Invariant, checked by a test: a query uses only metrics of the table, and the file grafana.json next
to this module is the result of :func:`dashboard`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["ROWS", "Panel", "Query", "dashboard"]

Look: TypeAlias = Literal["lines", "stack", "number"]

_RUN = 'job="$job"'
_RATE = "[$__rate_interval]"
_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A query for one series. `$RUN` stands for the chosen job, `$RATE` for Grafana's interval."""

    of: str
    legend: str = ""

    @property
    def expression(self) -> str:
        return self.of.replace("$RUN", _RUN).replace("$RATE", _RATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A panel; `unit` is Grafana's name of the unit, `width` a number of its 24 columns."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    look: Look = "lines"
    width: int = 8
    text: str = ""


def _quantiles(metric: str, *quantiles: float) -> tuple[Query, ...]:
    return tuple(
        Query(
            of=f"histogram_quantile({quantile}, sum by (le) (rate({metric}_bucket{{$RUN}}$RATE)))",
            legend=f"p{100 * quantile:g}",
        )
        for quantile in quantiles
    )


def _rate(metric: str, legend: str, by: str = "") -> Query:
    return Query(of=f"sum{by} (rate({metric}{{$RUN}}$RATE))", legend=legend)


_BUSY = (
    'sum(rate(aprilsched_engine_seconds_total{$RUN,part=~"decode|prefill"}$RATE))'
    " / sum(rate(aprilsched_engine_seconds_total{$RUN}$RATE))"
)
_PART = (
    "sum by (part) (rate(aprilsched_engine_seconds_total{$RUN}$RATE))"
    " / on () group_left () sum(rate(aprilsched_engine_seconds_total{$RUN}$RATE))"
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            title="Engines busy",
            text="Decoding or reading prompts, of all engines' time.",
            queries=(Query(of=_BUSY),),
            unit="percentunit",
            look="number",
            width=4,
        ),
        Panel(
            title="Tokens generated",
            queries=(_rate("aprilsched_tokens_generated_total", ""),),
            unit="short",
            look="number",
            width=4,
        ),
        Panel(
            title="Batches delivered",
            queries=(Query(of="sum(aprilsched_batches_delivered_total{$RUN})"),),
            look="number",
            width=4,
        ),
        Panel(
            title="Efficiency of the last batch",
            text="T_bound over its duration; empty without a step-time model.",
            queries=(Query(of="max(aprilsched_batch_efficiency_ratio{$RUN})"),),
            unit="percentunit",
            look="number",
            width=4,
        ),
        Panel(
            title="Policy version",
            queries=(Query(of="max(aprilsched_policy_version{$RUN})"),),
            look="number",
            width=4,
        ),
        Panel(
            title="Engines in use",
            queries=(Query(of="sum(aprilsched_engine_up{$RUN})"),),
            look="number",
            width=4,
        ),
    ),
    "Where the engines' time goes": (
        Panel(
            title="All engines, by cause",
            text="The parts add up to the wall time. Decode and prefill are work; everything else "
            "is idle or lost, for the cause that is named.",
            queries=(Query(of=_PART, legend="{{part}}"),),
            unit="percentunit",
            look="stack",
            width=12,
        ),
        Panel(
            title="Busy, by engine",
            queries=(
                Query(
                    of="sum by (engine) (rate(aprilsched_engine_seconds_total"
                    '{$RUN,part=~"decode|prefill"}$RATE))'
                    " / sum by (engine) (rate(aprilsched_engine_seconds_total{$RUN}$RATE))",
                    legend="{{engine}}",
                ),
            ),
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="Requests in flight, by engine",
            queries=(
                Query(
                    of="sum by (engine) (aprilsched_requests_in_flight{$RUN})", legend="{{engine}}"
                ),
            ),
            look="stack",
        ),
        Panel(
            title="Tokens/s, by engine",
            queries=(
                _rate("aprilsched_engine_tokens_generated_total", "{{engine}}", " by (engine)"),
            ),
            look="stack",
        ),
        Panel(
            title="Losses of engines",
            queries=(
                Query(
                    of="sum by (engine) (increase(aprilsched_engine_losses_total{$RUN}$RATE))",
                    legend="{{engine}}",
                ),
            ),
        ),
    ),
    "Batches": (
        Panel(
            title="The trainer's wait for a batch",
            queries=_quantiles("aprilsched_batch_wait_seconds", 0.5, 0.95),
            unit="s",
        ),
        Panel(
            title="Response length",
            queries=_quantiles("aprilsched_response_length_tokens", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="Rollouts",
            queries=(
                Query(of="sum(aprilsched_rollouts_in_flight{$RUN})", legend="in flight"),
                Query(of="sum(aprilsched_groups_ready{$RUN})", legend="groups ready"),
            ),
        ),
        Panel(
            title="Tokens/s, and what becomes of them",
            queries=(
                _rate("aprilsched_tokens_generated_total", "generated"),
                _rate("aprilsched_tokens_delivered_total", "delivered"),
                _rate("aprilsched_tokens_re_prefilled_total", "re-prefilled"),
                _rate("aprilsched_tokens_discarded_total", "discarded"),
            ),
            width=12,
        ),
        Panel(
            title="Rollouts dropped, by reason",
            queries=(
                Query(
                    of="sum by (reason) (increase(aprilsched_rollouts_dropped_total{$RUN}$RATE))",
                    legend="{{reason}}",
                ),
                Query(
                    of="sum(increase(aprilsched_request_retries_total{$RUN}$RATE))",
                    legend="requests sent again",
                ),
            ),
            look="stack",
            width=12,
        ),
    ),
    "Versions and updates": (
        Panel(
            title="Staleness of delivered rollouts, in versions",
            queries=(
                Query(
                    of="sum(rate(aprilsched_rollout_staleness_versions_sum{$RUN}$RATE))"
                    " / sum(rate(aprilsched_rollout_staleness_versions_count{$RUN}$RATE))",
                    legend="mean",
                ),
                *_quantiles("aprilsched_rollout_staleness_versions", 0.95),
            ),
        ),
        Panel(
            title="Off-policy tokens of the last batch",
            queries=(Query(of="max(aprilsched_batch_off_policy_tokens_ratio{$RUN})"),),
            unit="percentunit",
        ),
        Panel(
            title="Distance of the last batch's lengths from the drawn law",
            queries=(
                Query(of="max(aprilsched_batch_length_distance_ratio{$RUN})", legend="batch"),
                Query(
                    of="max(aprilsched_batch_iid_length_distance_ratio{$RUN})",
                    legend="expected of one drawn at random",
                ),
            ),
        ),
        Panel(
            title="Efficiency of the last batch beside its forecast",
            queries=(
                Query(
                    of="max(aprilsched_batch_efficiency_beside_forecast_ratio{$RUN})",
                    legend="batch",
                ),
                Query(
                    of="max(aprilsched_batch_forecast_efficiency_ratio{$RUN})", legend="forecast"
                ),
            ),
        ),
        Panel(
            title="Updates that failed",
            queries=(
                Query(
                    of='sum(increase(aprilsched_updates_total{$RUN,outcome="failed"}$RATE))',
                    legend="failed",
                ),
            ),
        ),
        *(
            Panel(title=title, queries=_quantiles(metric, 0.5, 0.95), unit="s")
            for title, metric in (
                ("Update", "aprilsched_update_duration_seconds"),
                ("Pause of an engine", "aprilsched_pause_duration_seconds"),
                ("Refit of an engine", "aprilsched_refit_duration_seconds"),
            )
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "aprilsched",
        "uid": "aprilsched",
        "tags": ["aprilsched", "rollouts"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _job()]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        y += 1
        x = height = 0
        for panel in panels:
            number += 1
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            height = 4 if panel.look == "number" else 8
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            yield _panel(panel) | {"id": number, "gridPos": place}
            x += panel.width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    share = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    defaults: dict[str, Any] = {"unit": panel.unit, **share}
    if panel.look == "number":
        defaults.pop("min")
        defaults.pop("max", None)
        options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    else:
        stack = panel.look == "stack"
        defaults["custom"] = {
            "fillOpacity": 60 if stack else 0,
            "stacking": {"mode": "normal" if stack else "none"},
        }
        options = {"legend": {"displayMode": "list", "placement": "bottom"}}
    return {
        "type": "stat" if panel.look == "number" else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or panel.title,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _job() -> dict[str, Any]:
    return {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": _DATASOURCE,
        "query": "label_values(aprilsched_policy_version, job)",
        "refresh": 2,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
