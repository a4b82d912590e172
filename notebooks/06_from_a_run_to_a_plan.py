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
# **Question.** I have a run that waited for every response. What would another schedule have brought, and can that forecast be trusted?
#
# A *replay* takes the work from a run's log: its prompts, the lengths of its responses, and the times of the trainer and of the updates. The production scheduler then does this work again under another policy, on modelled engines. No GPU is needed, and no token is generated.

# %%
# %matplotlib inline
from dataclasses import replace
from pathlib import Path

from aprilsched.analysis import plots
from aprilsched.cli.replay import ReplayCommand, what_if

DATA = Path("data")
RATIOS = "april:over_provision=1.125|1.25|1.5,april"
found = what_if(ReplayCommand(run=DATA / "sync", policy=RATIOS))
for row in [found.recorded, *found.replayed]:
    print(f"{row.policy:29}{row.batches} batches, {row.step_s:5.1f} s each")

# %% [markdown]
# ## First check: the run itself
#
# The first replay has the run's own settings, so it must give what really happened.

# %%
error = found.prediction_error.step_s
print(f"replayed against real: {error:+z.1%} seconds a step")
print(
    f"lengths known: {found.known:,}, drawn because the response was unfinished: {found.imputed:,}"
)

# %% [markdown]
# ## Second check: a run that the forecast did not see
#
# `data/april` is a run of the same prompts under the policy of the last forecast. The forecast did not see it. A replay ends when it needs a prompt that the recorded run never came to, so both are compared over the batches that they share.

# %%
forecast = found.replayed[-1]
truly = what_if(
    ReplayCommand(run=DATA / "april", policy="recorded", batches=forecast.batches)
).recorded
plots.what_if(
    found.recorded, found.replayed, run=replace(truly, policy="april"),
    title="What the run that waited would have been with other ratios",
)  # fmt: skip

# %% [markdown]
# Both checks show that the log has everything on which a schedule depends. They show no more than that, because here the run and the replay have the same engines: embedded ones, whose step times the replay knows by definition. On real servers the error of the step-time model is added. Fit the model to your servers first (`aprilsched calibrate`), and look at the first check before anything else ([replay](../docs/replay.md)).
#
# ## The plan
#
# This converts seconds of a step into GPU hours, for 8 GPUs and 1,000 batches, with the trainer's time.

# %%
GPUS, BATCHES = 8, 1000
for row in found.replayed:
    print(f"{row.policy:29}{GPUS * BATCHES * row.step_s / 3600:6.1f} GPU hours")

# %%
real = found.recorded.step_s
miss = forecast.step_s / truly.step_s - 1
modest = next(row for row in found.replayed if row.policy.endswith("=1.25"))
print(
    f"The run took {real:.1f} s a step. APRIL's ratio of 2 was forecast to take "
    f"{forecast.step_s:.1f} s and took {truly.step_s:.1f} s ({miss:+z.1%}), with "
    f"{forecast.off_policy_share:.0%} of the tokens off-policy forecast and "
    f"{truly.off_policy_share:.0%} in fact. A ratio of 1.25 would take {modest.step_s:.1f} s with "
    f"{modest.off_policy_share:.0%}. For 1,000 batches the difference between waiting and APRIL is "
    f"{GPUS * BATCHES * (real - forecast.step_s) / 3600:.0f} of "
    f"{GPUS * BATCHES * real / 3600:.0f} GPU hours."
)
# What the answer below says:
assert abs(error) < 0.01
assert abs(miss) < 0.05
assert 0.6 < forecast.off_policy_share < 0.75
assert abs(forecast.off_policy_share - truly.off_policy_share) < 0.05
assert 2.5 < real / forecast.step_s < 3.7
assert real / modest.step_s > 1.5

# %% [markdown]
# **Answer.** With twice as many rollouts in flight, the run would take a third of the time, and two thirds of the tokens would be off-policy. Only a quarter more already saves more than a third of the time. The replay of the run's own settings gives the same result as the run, and the forecast's speed and staleness were within 5 % of a run that it had not seen. This tests the log and not the step times, which were the same here. On your servers you can trust the forecast as far as the replay of your own run is right. So the plan is: replay the run that you have, choose the least staleness that is fast enough, run it, and replay again. On the command line this is `aprilsched replay data/sync --policy april,auto`.
