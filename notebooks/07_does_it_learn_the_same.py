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
# # 7. Does it learn the same?
#
# **Question.** A schedule that carries responses over gives more tokens in a second, and many of them are stale. Does the policy learn as much from them, and does the run end sooner?
#
# The figures are of real training runs, each on one H200: [experiments/learning](../experiments/learning) describes how they were made. Here they are only read.

# %%
# %matplotlib inline
import sys
from pathlib import Path

from IPython.display import display

from aprilsched.observe.report.style import new_figure

sys.path.insert(0, str(Path("../experiments/learning").resolve()))
sys.path.insert(0, str(Path("../experiments/learning_moe").resolve()))
import analysis
import tables

found = analysis.result()
arms = found["arms"]
print({analysis.NAMES[arm]: row["seeds"] for arm, row in arms.items()})

# %% [markdown]
# ## Against the wall clock
#
# Each arm trained the same policy for 36 seconds on the same GPU. A point is an evaluation of one run on 512 held-out problems, and a line is the mean of an arm's runs.

# %%
figure = new_figure(8, 4.5)
analysis.picture(figure.subplots())
display(figure)

# %% [markdown]
# ## After as many updates, and as many tokens
#
# If stale tokens taught less, the arms with stale tokens would be behind here.

# %%
for arm, row in arms.items():
    print(
        f"{analysis.NAMES[arm]:29} stale {row['off_policy']['mean']:.2f}   "
        f"after {analysis.UPDATES} updates {row['held_out_at_updates']['mean']:.3f}   "
        f"after {analysis.TOKENS:,} tokens {row['held_out_at_tokens']['mean']:.3f}   "
        f"after {analysis.SECONDS:.0f} s {row['held_out_at_end']['mean']:.3f}"
    )

# %% [markdown]
# ## What an old token is worth
#
# In other runs every token was sampled by the policy of a fixed number of updates ago. The usefulness of a token is the number of updates to a held-out reward of 0.70 with fresh tokens over the number with stale ones. The bars are intervals over eight seeds.

# %%
figure = new_figure(8, 4)
analysis.usefulness_picture(figure.subplots())
display(figure)

# %% [markdown]
# ## A larger policy, with experts
#
# [experiments/learning_moe](../experiments/learning_moe) trains a mixture of experts and a dense policy, of 31 million parameters each, on a task with a heavier tail. A broken line is an arm whose trainer does not replay the engine's routing. Above on the right is how far the ratio of the rarest thousandth of tokens is from 1, by staleness. Below is the spread of the ratio over the updates, with responses of at most 3,072 tokens, and of at most 1,024, where two of the five runs of auto with KV kept fell apart.

# %%
larger = tables.result()
figure = new_figure(10, 7)
(first, second), (third, fourth) = figure.subplots(2, 2)
tables.curves(first)
tables.tails(second, larger)
tables.spreads(third, "moe")
tables.spreads(fourth)
display(figure)
for name in ("moe-d", "moe-a", "dense-a"):
    for arm, row in larger[name]["arms"].items():
        share = row["seconds_to_1_of_sync"]
        print(
            f"{name:8}{tables.NAMES[arm]:29} middle level in {share['mean']:.2f} of sync's time "
            f"({share['low']:.2f} to {share['high']:.2f})   after {tables.UPDATES} updates "
            f"{row['after_updates']['mean']:.3f}   staleness {row['staleness']['mean']:.1f}"
        )

# %% [markdown]
# ## Can the runs be trusted?
#
# Every run has a summary. Its rollouts must all have exact versions, none may be lost or delivered twice, and there must be no restart except the one that was made on purpose.

# %%
print("wrong:", found["wrong"] + larger["wrong"] or "nothing")
print("killed and resumed:", found["resumed"])

# %%
kept, auto = (arms[arm] for arm in ("auto-kept", "auto"))
share = {name: row["seconds_to_0.7_of_sync"]["mean"] for name, row in arms.items()}
after = [row["held_out_at_updates"]["mean"] for row in arms.values()]
small, large = (found["usefulness"][rate] for rate in ("3e-4", "1e-3"))
clip = [row["usefulness"]["mean"] for row in small["uncorrected"]["rows"]]
print(
    f"To a held-out reward of 0.70 auto with KV kept takes {share['auto-kept']:.2f} of the synchronous time, APRIL "
    f"{share['april']:.2f}, auto {share['auto']:.2f}, AReaL's recipe {share['areal']:.2f}, tail batching "
    f"{share['rollpacker']:.2f} and streams {share['streamed']:.2f}. After {analysis.UPDATES} updates all have "
    f"{min(after):.2f} to {max(after):.2f}. A token of staleness 4 has a usefulness of {clip[3]:.2f} "
    "with PPO's clip alone."
)
# What the answer below reports:
assert not found["wrong"]
assert found["resumed"] == ["april 4"]
assert share["auto-kept"] < 0.5 < share["april"] < share["auto"] < 0.65
assert kept["seconds_to_0.7_of_april"]["high"] < 1 < auto["seconds_to_0.7_of_april"]["high"]
assert kept["seconds_to_0.7_of_april"]["mean"] > 0.85
assert share["auto"] < share["auto-first"]
assert share["rollpacker"] < 0.8 < share["on-policy"] < share["streamed-ready"] < share["streamed"]
assert max(after) - min(after) < 0.05
assert small["corrected"]["slope"]["low"] < 0 < small["corrected"]["slope"]["high"]
assert min(clip[:3]) > 0.9 > 0.7 > max(clip[3:])
fell = [row["fell"] for row in large["corrected"]["rows"]]
assert sum(row["fell"] for row in large["uncorrected"]["rows"]) == 0
assert fell[1:] == sorted(fell[1:]) == [1, 3, 4, 4, 4]
assert not larger["wrong"]
new, mixture, dense = (larger[name]["arms"] for name in ("moe-d", "moe-a", "dense-a"))
assert 0.34 < new["auto-kept"]["seconds_to_1_of_sync"]["mean"] < 0.38
assert new["auto-kept"]["end"]["mean"] > new["sync"]["end"]["mean"]
assert new["auto-kept-clip"]["ratio_sd"]["mean"] < new["auto-kept"]["ratio_sd"]["mean"]
assert 0.40 < mixture["auto-kept-own"]["seconds_to_1_of_sync"]["mean"] < 0.45
assert 0.40 < dense["auto-kept"]["seconds_to_1_of_sync"]["mean"] < 0.45
assert mixture["auto-kept-own"]["seconds_to_1_of_april"]["mean"] < 0.70
for arms_of in (mixture, dense):
    low = max(row["after_updates"]["low"] for row in arms_of.values())
    assert low < min(row["after_updates"]["high"] for row in arms_of.values())
routings = [
    tables.by_staleness(larger["moe"]["ratios"], "auto-kept", kind) for kind in ("own", "replayed")
]
assert all(abs(routings[1][age] / tail - 1) < 0.06 for age, tail in routings[0].items())

# %% [markdown]
# **Answer.** It learns the same from the same number of updates, and the run that carries is there sooner: auto with KV kept in half of the synchronous time and sooner than APRIL, auto with recompute in three fifths, as APRIL. The first planner, whose trials ran in the trainer's process, was slower in both. Without a stale token tail batching saves a fifth of the time. Tokens of staleness 1 or 2 are as good as fresh ones, with corrections and without. Staler ones need decoupled PPO, with which no cost can be seen up to a staleness of 16 at this learning rate; PPO's clip alone loses a third at a staleness of 4 and half beyond. With three times the learning rate it is the other way round: decoupled PPO with an interpolated proximal policy learns and then falls apart on stale tokens, and the clip holds. This is one small policy on one task, with one to three seeds for each arm, on two machines of one kind. On a larger policy and a task with a heavier tail auto with KV kept needs 0.36 and 0.42 of the synchronous time for a mixture of experts and 0.44 for a dense policy, and two thirds to four fifths of APRIL's, and ends no lower than the synchronous schedule. Replayed routing changes nothing there, and the clip keeps its ratios as close to 1 as those of the dense policy at no cost.
