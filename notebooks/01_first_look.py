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
# # 1. First look
#
# **Question.** A trainer waits until the last response of a batch has been generated. Where do the GPU hours go until then?
#
# A *rollout* is one response that the policy (the model that is being trained) gives to a prompt. An *engine* is an inference server on one GPU. A *batch* is what the trainer takes at a time: here 16 prompts with 8 rollouts each. The run that we look at had 8 engines. Its folder is `data/sync`, next to this notebook.
#
# Its engines are *embedded*: the scheduler is the real one, and a model fitted on an H200 with a 4B model gives the time of each step. So seconds and GPU time here are modelled. You can use the folder of a run on your own servers instead, and everything below works the same.

# %%
# %matplotlib inline
from pathlib import Path

import pictures

from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.usage import usage_of

DATA = Path("data")
waiting = read_run(DATA / "sync")
waiting_usage = usage_of(DATA / "sync")
print(f"{waiting.summary.engines} engines, {waiting.summary.batches} batches,")
print(f"{waiting.summary.rollouts.delivered} rollouts in {waiting_usage.wall:.0f} seconds")

# %% [markdown]
# ## The batches, response by response
#
# Each line is a response, from its first token to its last one. Most responses are short. The batch is full when its longest response is complete, and until then nothing new is started.

# %%
pictures.timeline(waiting, batches=3)

# %% [markdown]
# ## The same time, from the engines' side
#
# An engine generates many responses at once, each in a *slot*. It has as many slots as requests that it may run at once, which is 32 here. The picture shows what the slots of all engines do.
#
# The picture shows shares of *slots*, not what `nvidia-smi` (NVML) calls utilization. NVML shows 100 % as soon as anything runs on the GPU, even a single response. A slot is not a share of the arithmetic either: if half of an engine is empty, the other half runs a little faster.
#
# In the picture, "queued or reading prompts" is one part, since engines do not tell them apart.

# %%
pictures.causes(
    waiting_usage, end=waiting.deliveries[2].time, title="Synchronous: what the slots do"
)

# %% [markdown]
# ## Carrying over
#
# APRIL starts twice as many rollouts as a batch needs, delivers the first half, and carries the others over: they continue in the next batch with the tokens that they have. Here are both runs, with the same prompts and the same lengths. The bars show GPU time for the same number of tokens, so they can be compared.

# %%
carrying = read_run(DATA / "april")
carrying_usage = usage_of(DATA / "april")
both = {
    "Synchronous": waiting_usage,
    "APRIL: start twice as many, deliver the first half, carry the rest": carrying_usage,
}
pictures.first_look(both, seconds=carrying_usage.wall)

# %%
tail = waiting_usage.shares["tail"]
cost = {
    name: sum(map(sum, usage.seconds)) / 60 / sum(usage.tokens) * 1e6
    for name, usage in both.items()
}
dear, cheap = cost.values()
print(
    f"Synchronously, {tail:.0%} of the slots' time goes to the tail of a batch, and "
    f"{waiting_usage.utilization:.0%} to generating. A million tokens cost {dear:.1f} GPU-minutes; "
    f"with APRIL they cost {cheap:.1f}, a factor of {dear / cheap:.1f}."
)
# What the answer below reports:
assert 0.8 < tail < 0.85
assert waiting_usage.utilization < 0.1
assert 2.5 < dear / cheap < 3.5

# %% [markdown]
# **Answer.** They go to the tail. With a synchronous schedule, more than four fifths of the engines' slots are empty, because the batch is small and the last, long responses are still being generated. Less than a tenth of the time goes to generating. In this run the same tokens cost about a third when twice as many rollouts are started and the last ones are carried over. This run has a light load of 16 rollouts an engine, where the gain is largest. With 256 rollouts an engine, about a third of the cost is saved ([notebook 4](04_how_much_to_over_provision.ipynb)). [Notebook 5](05_staleness_and_bias.ipynb) shows what carrying over does to the data.
