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
# # 4. How much to over-provision
#
# **Question.** How many more rollouts (responses) than a batch needs should be in flight, and what is the price?
#
# The ratio of the rollouts in flight to the rollouts of a batch is called ρ. With ρ = 1 the schedule is synchronous: the trainer waits for every last response. With ρ = 2 (APRIL) it gets the first half of what was started, and the rest is carried over. A carried response is finished under a newer policy than it was started with, and its older tokens are *off-policy*. So speed has a price, and the picture below shows both.
#
# Nothing here needs a GPU. The production scheduler decides, and the engine is a model of step times that was fitted on an H200 with a 4B model. There is one engine with batches of 32 prompts and 8 rollouts each; each of several engines would have such a share. 80 batches are not many: with other seeds the points for waves move by about 0.01 and that of `auto` by 0.02, so do not read smaller differences into the picture.

# %%
# %matplotlib inline
from dataclasses import replace

import pictures

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.planning.presets import april, auto, sync
from aprilsched.simulation import compare, simulate

RATIOS = (1.25, 1.5, 2, 3)
config = SchedulerConfig(batch_groups=32, group_size=8, straggler="retract", max_staleness=None)
policies = {"sync": sync(config)}
policies |= {f"ρ = {ratio}": replace(april(config), over_provision=ratio) for ratio in RATIOS}
policies["auto"] = auto(config)
results = {
    name: simulate(LongTailWorkload(), policy, batches=80, usage=False)
    for name, policy in policies.items()
}
rows = {row.policy: row for row in compare(results).policies}
for row in rows.values():
    print(f"{row.policy:29}{row.step_s:6.1f} s a step {row.off_policy_share:5.0%} off-policy")

# %% [markdown]
# ## The frontier
#
# Speed is the best possible time divided by the time taken. Every token must be generated and prefilled once in any order, which gives a bound that no schedule can pass. Higher points are faster, and points further left have fewer off-policy tokens. The line shows ρ with *waves*: the rollouts of a batch are started together.

# %%
line = {"1: synchronous": rows["sync"]}
line |= {f"{ratio:g}": rows[f"ρ = {ratio}"] for ratio in RATIOS}
others = {"auto": rows["auto"]}
pictures.frontier(
    line, others, name="waves, by ρ",
    title="A quarter more brings most of the speed, and ρ = 3 none; auto is a little faster",
)  # fmt: skip

# %% [markdown]
# The line bends for two reasons. Each step of an engine has a fixed cost, which many responses share when ρ is large; beyond some ρ there is nothing more to share. And at each new version the KV of all responses in flight is recomputed (*re-prefill*), which are more responses if ρ is larger.
#
# ## Choosing ρ during the run
#
# `over_provision="auto"` tries schedules on lengths like those seen so far, and takes the least stale one within 1 % of the fastest. It also tries *length buckets*: prompts whose responses have similar lengths run together, so that no batch waits for a long one.

# %%
print(rows["auto"].schedule)

# %%
sync, april, most = rows["sync"], line["2"], line["3"]
auto, light = rows["auto"], line["1.25"]
print(
    f"sync reaches {sync.efficiency:.0%} of the bound. ρ = 1.25 reaches {light.efficiency:.0%} with "
    f"{light.off_policy_share:.0%} of the tokens off-policy, ρ = 2 {april.efficiency:.0%} with "
    f"{april.off_policy_share:.0%}, ρ = 3 {most.efficiency:.0%} with {most.off_policy_share:.0%}. "
    f"auto reaches {auto.efficiency:.0%} with {auto.off_policy_share:.0%}. Its tokens are "
    f"{auto.staleness_mean:.2f} versions stale on average and {auto.staleness_max} at most, those "
    f"of ρ = 2 {april.staleness_mean:.2f} and {april.staleness_max}."
)
# What the answer below reports:
gained = (light.efficiency - sync.efficiency) / (april.efficiency - sync.efficiency)
assert 0.3 < 1 - april.step_s / sync.step_s < 0.4  # as in notebook 1
assert 0.5 < gained < 0.8
assert 0.45 < light.off_policy_share / april.off_policy_share < 0.55
assert most.efficiency < april.efficiency
assert 1 < auto.efficiency / april.efficiency < 1.05
assert abs(auto.staleness_mean - april.staleness_mean) < 0.4
assert auto.staleness_max > april.staleness_max

# %% [markdown]
# **Answer.** A quarter more than a batch needs brings more than half of the possible gain, for half of the off-policy share that ρ = 2 has. Beyond ρ = 2 nothing is gained on this workload. `auto` finds a schedule that is a little faster than ρ = 2, but length buckets make some of its tokens much staler. Set `max_staleness` if that matters to you. Your own lengths and engines give other numbers, so try it with them ([notebook 6](06_from_a_run_to_a_plan.ipynb)).
