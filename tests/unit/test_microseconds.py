"""Tests that rounding many times together equals rounding each, since logs are compared by byte."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aprilsched.telemetry.event_log.writing import to_microseconds

SECONDS = st.floats(min_value=-1e9, max_value=1e9)
TIES = st.integers(min_value=0, max_value=10**13).map(lambda n: n / 1e7)
NEXT_TO_TIES = TIES.flatmap(
    lambda s: st.sampled_from([math.nextafter(s, -math.inf), math.nextafter(s, math.inf)])
)


@given(st.lists(st.one_of(SECONDS, TIES, NEXT_TO_TIES)))
def test_as_round_does_to_the_last_bit(seconds: list[float]):
    rounded = to_microseconds(np.array(seconds, dtype=np.float64))
    assert [t.hex() for t in rounded] == [round(s, 6).hex() for s in seconds]
