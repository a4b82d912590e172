"""Tests the batcher under random actions: no token is lost, and each follows from its context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.engine.batcher import Batcher
from aprilsched.simulation.engine.ranks import RankedBatcher
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel, weights_key_of_version
from tests.support.sim_batcher import Driver, explained, request

VOCAB = 97
T = H200_QWEN3_4B
SMALL = StepTimeModel(
    t0=T.t0,
    t1=T.t1,
    t2=T.t2,
    prefill_pass=T.prefill_pass,
    prefill_rate=T.prefill_rate,
    prefill_chunk=64,
)

DRAFTING = replace(SMALL, tokens_per_step=((1, 4.0), (8, 1.0)))

SHAPES = st.tuples(st.integers(1, 200), st.integers(1, 60), st.booleans())
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0.0, 0.6)),
        st.tuples(st.just("submit"), SHAPES),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("refit"), st.booleans()),
        st.tuples(st.just("in_place"), st.none()),
    ),
    min_size=3,
    max_size=30,
)
CONFIGS = st.builds(
    SimConfig,
    timing=st.sampled_from([T, SMALL, DRAFTING]),
    dp_ranks=st.integers(1, 3),
    rank_rule=st.sampled_from(["prefix", "round_robin"]),
    max_running=st.integers(1, 12),
    kv_tokens=st.integers(260, 1500),
    stream_interval=st.integers(1, 80),
    vocab_size=st.just(VOCAB),
    stream_at_pause=st.booleans(),
)


class Script:
    """Carries out a list of actions; every refit is a retract with a flush."""

    def __init__(self, config: SimConfig) -> None:
        self.driver = Driver(config)
        self.sent: list[GenerationRequest] = []
        self.version = 0

    def run(self, actions: list[tuple[str, object]]) -> None:
        for action, value in actions:
            match action, value:
                case "wait", float(seconds):
                    self.driver.until(self.driver.now + seconds)
                case "submit", (int(length), int(prompt), bool(stops)):
                    self.submit(length, prompt, stops)
                case "abort", int(index) if index < len(self.sent):
                    self.driver.batcher.abort(self.sent[index].request_id, self.driver.now)
                case "refit", bool(held):
                    self.refit(held)
                case "in_place", None:
                    self.driver.pause("in_place")
                    self.driver.resume()
                case _:
                    pass
        self.driver.settle()

    def submit(self, length: int, prompt: int, stops: bool) -> None:
        name = f"r{len(self.sent):03}"
        sent = request(name, length, prompt=prompt, stop=(3, 5) if stops else ())
        self.sent.append(sent)
        self.driver.submit(sent)

    def refit(self, held: bool) -> None:
        self.driver.pause("retract")
        if held:
            self.submit(10, 5, False)
        self.version += 1
        assert self.driver.batcher.flush()
        assert self.driver.batcher.refit(self.version)
        self.driver.resume()


@settings(max_examples=150, deadline=None)
@given(CONFIGS, ACTIONS)
def test_every_request_ends_once_with_tokens_that_its_spans_explain(
    config: SimConfig, actions: list[tuple[str, object]]
) -> None:
    script = Script(config)
    script.run(actions)
    driver, batcher = script.driver, script.driver.batcher
    keys = {v: weights_key_of_version(v) for v in range(script.version + 1)}
    for sent in script.sent:
        outcome = driver.outcomes[sent.request_id]
        assert outcome.ended_at is not None
        ids, sampling = outcome.ids, sent.sampling
        assert len(ids) == len(outcome.logprobs)
        ends = [0, *(end for _, _, end in outcome.spans)]
        assert [start for _, start, _ in outcome.spans] == ends[:-1]
        assert ends[-1] == len(ids)
        assert explained(sent, outcome, keys, VOCAB)
        stops = np.isin(ids, sampling.stop_token_ids)
        match outcome.last.finish:
            case "length":
                assert len(ids) == sampling.max_new_tokens
                assert not stops[:-1].any()
            case "stop":
                assert np.flatnonzero(stops).tolist() == [len(ids) - 1]
            case ending:
                assert ending == "abort"
                assert len(ids) < sampling.max_new_tokens
                assert not stops.any()
    assert batcher.kv_in_use == batcher.running == batcher.waiting == 0
    received = sum(len(o.ids) for o in driver.outcomes.values())
    lossless = config.stream_at_pause and batcher.counters.preemptions == 0
    assert received <= batcher.counters.generated
    assert received == batcher.counters.generated or not lossless


@settings(max_examples=100, deadline=None)
@given(CONFIGS, ACTIONS, st.floats(0.001, 0.3))
def test_the_number_of_clock_updates_does_not_matter(
    config: SimConfig, actions: list[tuple[str, object]], stride: float
) -> None:
    """Advancing in small steps between the calls gives the same result as one large step."""

    class Strides(Driver):
        def until(self, when: float) -> None:
            while self.now + stride < when:
                super().until(self.now + stride)
            super().until(when)

    coarse, fine = Script(config), Script(config)
    fine.driver = Strides(config)
    coarse.run(actions)
    fine.run(actions)
    for name, outcome in coarse.driver.outcomes.items():
        other = fine.driver.outcomes[name]
        assert [len(c.token_ids) for c in outcome.chunks] == [
            len(c.token_ids) for c in other.chunks
        ]
        assert outcome.ended_at == other.ended_at or outcome.last.finish == "abort"


@settings(max_examples=100, deadline=None)
@given(CONFIGS, ACTIONS)
def test_one_rank_is_an_engine_without_ranks(
    config: SimConfig, actions: list[tuple[str, object]]
) -> None:
    config = replace(config, dp_ranks=1)
    plain, ranked = Script(config), Script(config)
    ranked.driver.batcher = RankedBatcher(config)
    plain.run(actions)
    ranked.run(actions)
    for name, outcome in plain.driver.outcomes.items():
        other = ranked.driver.outcomes[name]
        assert outcome.ended_at == other.ended_at
        assert [c.token_ids.tolist() for c in outcome.chunks] == [
            c.token_ids.tolist() for c in other.chunks
        ]
    assert plain.driver.batcher.counters == ranked.driver.batcher.counters


def reference(
    arrivals: list[tuple[float, int, int]], timing: StepTimeModel, max_running: int, ranks: int = 1
) -> list[float]:
    """The end time of each request (arrival, length, prompt), computed step by step in plain
    loops. Request i is on rank i % ranks; a step takes as long as that of the slowest rank."""
    now, ends = 0.0, [0.0] * len(arrivals)
    queues = [list(range(rank, len(arrivals), ranks)) for rank in range(ranks)]
    running: list[dict[int, int]] = [{} for _ in range(ranks)]
    while any(queues) or any(running):
        if not any(running):
            now = max(now, min(arrivals[queue[0]][0] for queue in queues if queue))
        seconds, joining = [0.0], list[tuple[dict[int, int], list[int]]]()
        for queue, own in zip(queues, running, strict=True):
            picks: list[int] = []
            while queue and arrivals[queue[0]][0] <= now and len(own) + len(picks) < max_running:
                picks.append(queue.pop(0))
            if picks:
                seconds.append(timing.prefill_seconds(sum(arrivals[i][2] for i in picks)))
                joining.append((own, picks))
            elif own:
                kv = sum(arrivals[i][2] + out for i, out in own.items())
                seconds.append(timing.decode_seconds(len(own), kv, 1))
                own.update({i: out + 1 for i, out in own.items()})
        now += max(seconds)
        for own, picks in joining:
            own.update(dict.fromkeys(picks, 1))
        for own in running:
            for i in [i for i, out in own.items() if out == arrivals[i][1]]:
                ends[i] = now
                del own[i]
    return ends


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 1.0), st.integers(1, 120), st.integers(1, 40)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_the_closed_form_is_the_step_by_step_loop(
    arrivals: list[tuple[float, int, int]], max_running: int, ranks: int
) -> None:
    arrivals.sort()
    config = SimConfig(
        max_running=max_running, make_tokens=False, dp_ranks=ranks, rank_rule="round_robin"
    )
    driver = Driver(config)
    for i, (at, length, prompt) in enumerate(arrivals):
        if at > driver.now:  # those of one moment are all in the queue before the pass is planned
            driver.until(at)
        driver.submit(request(f"r{i}", length, prompt=prompt))
    driver.settle()
    ends = [driver.outcomes[f"r{i}"].ended_at for i in range(len(arrivals))]
    expected = reference(arrivals, driver.batcher.config.timing, max_running, ranks)
    # A request that arrives within rounding of a step's end may be seen one step apart.
    assert np.allclose(np.array(ends, dtype=float), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 512),
    st.integers(0, 10**6),
    st.floats(0, 1000, allow_nan=False),
)
def test_steps_within_is_the_largest_that_fits(batch: int, kv: int, seconds: float) -> None:
    steps = T.steps_within(batch, kv, seconds)
    assert T.decode_seconds(batch, kv, steps) <= seconds or steps == 0
    assert T.decode_seconds(batch, kv, steps + 1) > seconds


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=3, max_size=80), st.data())
def test_every_wrong_splice_is_seen(tokens: list[int], data: st.DataObject) -> None:
    """If one token of a context is lost, doubled, swapped or replaced, other tokens follow."""
    place = data.draw(st.integers(0, len(tokens) - 2))
    splices = [
        tokens[:place] + tokens[place + 1 :],
        [*tokens[:place], tokens[place], *tokens[place:]],
        [*tokens[:place], tokens[place + 1], tokens[place], *tokens[place + 2 :]],
        [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]],
    ]
    right = follow(tokens)
    for splice in splices:
        if splice != tokens:
            assert (follow(splice) == right).sum() <= 2


def follow(context: list[int]) -> np.ndarray:
    model, ids = ToyModel(32_000), np.array(context, dtype=np.int32)
    state = ContextState(
        hash=model.absorb(0, ids[:-1], 9), last=context[-1], length=len(context), seed=0
    )
    return model.sample([state], [12], 9)[0][0]


def test_an_idle_batcher_has_no_events() -> None:
    batcher = Batcher(SimConfig())
    assert batcher.next_event_time() is None
    assert batcher.advance(1e9) == []
