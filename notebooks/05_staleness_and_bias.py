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
# # 5. Staleness and bias
#
# **Question.** Without a synchronous schedule, which tokens does the trainer really get: how stale are they, and are short responses over-represented?
#
# Two things can be wrong with a batch. *Staleness*: an older version of the policy sampled a token than the one that now learns from it. *Bias*: responses that finish first are short, so the first batches hold too many short responses.

# %%
# %matplotlib inline
from dataclasses import replace
from pathlib import Path

import pictures

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.config import Staleness
from aprilsched.observe.log.over_time import tokens_by_class
from aprilsched.observe.log.run import read_run
from aprilsched.planning import presets
from aprilsched.simulation import simulate

april = read_run(Path("data/april"))

# %% [markdown]
# ## How old are the tokens?
#
# The run started twice what a batch needs and carried the rest over. The tokens of its first batch have one version. In later batches most tokens have a staleness of one version or a few. (Its engines are embedded, with modelled step times.)

# %%
pictures.staleness(
    april, title="Start twice as many, carry the rest: the staleness of each batch's tokens"
)

# %% [markdown]
# The share of stale tokens does not show *whose* tokens are stale. Responses are carried over because they are long, so the next picture shows staleness by length.

# %%
pictures.staleness_by_length(
    april, title="The longer a response, the staler (above: its off-policy share)"
)

# %% [markdown]
# ## Are the batches too short?
#
# Nothing gets lost if everything unfinished is carried over: a long response comes later, but it comes. So the bias of the first batches must fade, because what they lack is in flight. The rest is due to the chance of the prompts. The synchronous run has no bias, so it shows how large this chance is. (One modelled engine, 30 batches.)
#
# The third run discards what would get a staleness above 1 (*eviction*). This looks tidy, but it is a *censor*, because the responses that become stale are the long ones.

# %%
config = SchedulerConfig(batch_groups=32, group_size=8, straggler="retract", max_staleness=None)
carry = presets.april(config)
policies = (presets.sync(config), carry, replace(carry, max_staleness=Staleness(1, rule="evict")))
waited, carried, evicted = (
    simulate(LongTailWorkload(), policy, batches=30).summary for policy in policies
)
figures = {
    "carried over": carried.bias,
    "stale ones evicted": evicted.bias,
    "waited for: the chance of the prompts": waited.bias,
}
pictures.bias_by_batch(
    figures,
    title="Carried over, the bias fades; with eviction it stays",
)  # fmt: skip

# %%
first, last = (carried.bias.transient.measured_by_batch[place] for place in (0, -1))
explained = carried.bias.transient.predicted_by_batch[-1]
lasting = evicted.bias.transient.measured_by_batch[-1]
chance = waited.bias.transient.measured_by_batch[-1]
tenths = pictures.tenths(april)
print(
    f"{carried.off_policy_token_share:.0%} of the tokens are off-policy, {carried.staleness_mean:.1f} "
    f"versions stale on average and {carried.staleness_max} at most; in the run at the top, "
    f"{tenths.off_policy_share[0]:.0%} of the shortest tenth of the responses, and "
    f"{tenths.off_policy_share[-1]:.0%} of the longest. The first batch is {-first:.0%} too short; after "
    f"{carried.batches} batches the mean is {-last:.1%} short ({-explained:.1%} follow from what is in "
    f"flight). Synchronously, with only chance left, it is {chance:+.1%} off. "
    f"With eviction it is {-lasting:.0%} short."
)
# What the answer below reports:
ages = tokens_by_class(april, 6)
assert (
    ages[0, 1:].sum() == 0 < ages[0, 0]
)  # of the run at the top: its first batch is of one version
assert (ages[1:, 1:].sum(axis=1) > ages[1:, 0]).all()
assert carried.off_policy_token_share > 0.6
assert carried.staleness_max <= 6
assert tenths.staleness_mean[-1] > 2 * tenths.staleness_mean[0]
assert first < -0.3
assert abs(last) < 0.08
assert not carried.bias.censoring.policies
assert lasting < -0.2
assert abs(chance) < 0.05
assert explained / last > 0.5
assert abs(last - explained) < 0.03
assert evicted.bias.censoring.warning is not None

# %% [markdown]
# **Answer.** Most of the tokens are stale, by one version or two, and the long responses are the staler ones. This does not go away, so it must be bounded, or corrected in the loss (every token has its version and its log-probability). The length bias does go away, as long as nothing is dropped. The first batch is more than 30 % too short. After 30 batches the bias is a few per cent. What is in flight explains more than half of it, and the rest is as large as the chance of the prompts. With eviction it is still more than a fifth. Whatever throws old responses away makes the bias permanent, and the report of a run warns if drops do that.
