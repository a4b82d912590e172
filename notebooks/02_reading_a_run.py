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
# # 2. Reading a run
#
# **Question.** Here is the folder of a run. Were its engines busy, and if not, why?
#
# A run folder has the run's settings (`config.toml`), everything that happened (`events.jsonl`) and its figures (`summary.json`). `aprilsched run` writes a folder for your own engines; you can put its path here. The run in `data/april` had 8 embedded engines (modelled step times, no GPU) and started twice as many rollouts (responses) as a batch needs.

# %%
# %matplotlib inline
from pathlib import Path

import numpy as np
import pictures

from aprilsched.observe.figures.engine_time import BUSY, PART_INDEX, PARTS
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.usage import usage_of

FOLDER = Path("data/april")
run = read_run(FOLDER)
usage = usage_of(FOLDER)
print(
    f"{run.summary.batches} batches in {usage.wall:.1f} s, {sum(usage.tokens):,} tokens generated"
)

# %% [markdown]
# ## Timeline
#
# Each line is a response, and its colour is the version of the policy that sampled it. Grey bands are pauses: the batch is full, the trainer trains, and new weights are loaded. Lines of several colours were carried over: they started under one version and ended under another.

# %%
pictures.timeline(run)

# %% [markdown]
# ## What the slots do
#
# An engine has as many *slots* as requests that it may run at once. Blue is busy time. All other time has the colour of its cause. All parts together always add up to the wall time.
#
# These are shares of slots. NVML's utilization (what `nvidia-smi` shows) is the share of time in which *anything* ran on the GPU, and one straggler is enough for 100 %. Both are computed below.

# %%
pictures.causes(usage)

# %%
for part, meaning in PARTS.items():
    if usage.shares[part] >= 0.0005:
        print(f"{part:11}{usage.shares[part]:7.1%}   {meaning}")
print(f"{'together':11}{sum(usage.shares.values()):7.1%}")

# %% [markdown]
# ## Engine by engine
#
# If a row is paler than the others, its engine was slow or had less to do. The number of tokens that it generated in its busy time shows which.

# %%
pictures.engine_strip(usage)

# %%
busy = usage.seconds[:, [PART_INDEX[part] for part in BUSY]].sum(axis=1)
speed = np.array(usage.tokens) / (busy * np.array(usage.capacity))
for name, tokens, rate in zip(usage.engines, usage.tokens, speed, strict=True):
    print(f"{name}   {tokens:7,} tokens   {rate:4.0f} tokens/s in a busy slot")

# %% [markdown]
# ## Compared with other runs
#
# Shares show what a run did with its time, not whether it was fast. An engine with twice the slots can leave more of them empty and still be faster. To compare runs, use the GPU time for a million tokens.

# %%
runs = {"synchronous": "sync", "APRIL (this run)": "april"}
usages = {name: usage_of(Path("data") / folder) for name, folder in runs.items()}
pictures.where_time_goes(usages, unit="gpu_minutes_per_million")

# %%
lost = {part: share for part, share in usage.shares.items() if part not in BUSY}
largest, second = sorted(lost, key=lambda part: -lost[part])[:2]
pieces = usage.series(4000)[:, :, [PART_INDEX[part] for part in BUSY]].sum(axis=2)
anything = float((pieces > 0).mean())
by_engine = busy / usage.wall
print(
    f"{usage.utilization:.0%} of the slots' time was busy (engine by engine {by_engine.min():.0%} to "
    f"{by_engine.max():.0%}); something was being generated in {anything:.0%} of the time, which is "
    f"about what NVML would show. The largest losses are {largest} ({lost[largest]:.0%}) and {second} "
    f"({lost[second]:.0%}); re-prefill, the price of pausing, is {lost['re_prefill']:.1%}."
)
if Path("data/april") == FOLDER:  # What the answer below reports, of this run alone:
    assert (largest, second) == ("tail", "trainer")
    assert usage.utilization < 0.35 < 2 * usage.utilization < anything
    assert by_engine.max() > 1.3 * by_engine.min()
    assert np.corrcoef(by_engine, usage.tokens)[0, 1] > 0.95
    assert speed.max() < 1.2 * speed.min()
    assert lost["re_prefill"] < 0.02

# %% [markdown]
# **Answer.** For `data/april`: less than a third of the slots' time was busy, although NVML would have shown more than twice as much. The largest loss is still the tail of each batch. The second largest is the time in which the trainer trains and the engines are paused. Recomputing paused responses costs next to nothing at this load. The engines were busy for very different shares of the time. The prompts cause this difference, not the machines: the busier engines had more tokens to generate, at nearly the same speed a slot. Two changes would help: start more rollouts ([notebook 4](04_how_much_to_over_provision.ipynb) shows how many), and let engines generate while the trainer trains (`pace="asynchronous"`).
