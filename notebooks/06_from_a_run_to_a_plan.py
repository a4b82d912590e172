# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. From a run to a plan
#
# **Question.** I have a run that waited for every response. What would another schedule bring, and can that forecast be trusted?
#
# The event log of a run has the length of each response, with unfinished ones censored. The simulator draws new responses from that distribution and schedules them with the production scheduler on modelled engines. No GPU is needed, and no token is generated.

# %%
# %matplotlib inline
from dataclasses import replace
from pathlib import Path

import pictures

from aprilsched import SchedulerConfig
from aprilsched.cli.runs.settings import WorkloadSettings
from aprilsched.observe.log.run import read_run
from aprilsched.planning.presets import april, sync
from aprilsched.simulation import NEVER, Costs, SimConfig, compare, simulate

DATA = Path("data")
RATIOS = (1.125, 1.25, 1.5, 2)
workload = WorkloadSettings(lengths=str(DATA / "sync")).checked(seed=0, group_size=8)
config = SchedulerConfig(batch_groups=16, group_size=8, max_staleness=None)
policies = {"sync": sync(config)}
policies |= {f"ρ = {ratio:g}": replace(april(config), over_provision=ratio) for ratio in RATIOS}
results = {
    name: simulate(
        workload, policy, engines=8, batches=40, usage=False,
        engine=SimConfig(make_tokens=False, stream_interval=NEVER, max_running=64),
        costs=Costs(train_seconds=2.0, refit_seconds=0.5),
    )
    for name, policy in policies.items()
}  # fmt: skip
rows = {row.policy: row for row in compare(results).policies}
for row in rows.values():
    print(f"{row.policy:10}{row.step_s:5.1f} s a step, {row.off_policy_share:.0%} off-policy")

# %% [markdown]
# ## Two checks
#
# The forecast for the schedule of the run itself must give what happened. `data/april` is a run of the same prompts with ρ = 2, which the forecast has not seen.

# %%
measured: dict[str, float] = {}
for name, forecast in (("sync", rows["sync"]), ("april", rows["ρ = 2"])):
    steps = [batch.step_s for batch in read_run(DATA / name).summary.per_batch]
    measured[name] = sum(steps) / len(steps)
    print(f"{name:6}{measured[name]:5.1f} s a step measured, {forecast.step_s:5.1f} forecast")

# %% [markdown]
# The runs have five batches each, so their means are themselves uncertain by a tenth. On real servers the error of the step-time model is added: fit it first (`aprilsched calibrate`), and look at the first check before anything else.
#
# ## The plan

# %%
pictures.frontier(
    {"1: synchronous": rows["sync"], **{f"{r:g}": rows[f"ρ = {r:g}"] for r in RATIOS}},
    name="waves, by ρ",
    title="A quarter more rollouts in flight saves nearly half of the time",
)

# %%
GPUS, BATCHES = 8, 1000
for row in rows.values():
    print(f"{row.policy:10}{GPUS * BATCHES * row.step_s / 3600:6.1f} GPU hours")
# What the answer below reports:
assert abs(rows["sync"].step_s / measured["sync"] - 1) < 0.1
assert abs(rows["ρ = 2"].step_s / measured["april"] - 1) < 0.1
assert 0.6 < rows["ρ = 2"].off_policy_share < 0.8
assert 2.7 < rows["sync"].step_s / rows["ρ = 2"].step_s < 3.7
assert rows["sync"].step_s / rows["ρ = 1.25"].step_s > 1.6

# %% [markdown]
# **Answer.** With twice as many rollouts in flight the run would take a third of the time, with two thirds of the tokens off-policy. A quarter more saves more than a third of the time. Both forecasts are within 10 % of the runs, which have five batches each. So the plan is: simulate with the lengths of the run that you have, choose the least staleness that is fast enough, run it, and compare. On the command line this is `aprilsched simulate --lengths data/sync --policy sync,april,auto`.
