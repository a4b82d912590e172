"""Tests the translation of sampling parameters: each key is translated, passed on or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from yarl import URL

from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.transport import Transport
from aprilsched.kernel.values.checks import OWN
from aprilsched.kernel.values.sampling import REFUSED, SERVER, SYNONYMS, sampling_params
from aprilsched.types import Media, Prompt, SamplingParams
from tests.support.table import each_row


class Letters:
    """A tokenizer with one token for each letter, and one for "<end>"."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        start = [0] if add_special_tokens else []
        return start + ([999] if text == "<end>" else [ord(letter) for letter in text])


def test_nothing_given_is_the_default():
    nothing: list[Mapping[str, Any]] = [{}, {"max_tokens": None, "seed": None}, {"stop": []}]
    for given in nothing:
        assert sampling_params(given) == SamplingParams()
    assert sampling_params({"n": 1, "beam_width": 1}) == SamplingParams()


@each_row(
    ("given", "field", "value"),
    [
        ({"max_tokens": 7}, "max_new_tokens", 7),
        ({"max_completion_tokens": 7}, "max_new_tokens", 7),
        ({"max_tokens_to_sample": 7}, "max_new_tokens", 7),
        ({"max_new_tokens": np.int64(7)}, "max_new_tokens", 7),
        ({"min_tokens": 7}, "min_new_tokens", 7),
        ({"seed": 7}, "sampling_seed", 7),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"top_k": 50}, "top_k", 50),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": [1, np.int32(2)]}, "stop_token_ids", (1, 2)),
        ({"stop_token_ids": [0, 2**31 - 1]}, "stop_token_ids", (0, 2**31 - 1)),
        ({"stop_token_ids": []}, "stop_token_ids", ()),
        ({"stop_token_ids": 3}, "stop_token_ids", (3,)),
        ({"stop_token_ids": np.array([4, 5])}, "stop_token_ids", (4, 5)),
    ],
)
def test_a_name_is_translated_and_its_value_is_plain_python(
    given: Mapping[str, Any], field: str, value: object
):
    found = getattr(sampling_params(given), field)
    assert found == value
    assert type(found) is type(value)


def test_every_field_has_an_entry_in_the_table():
    assert {*OWN, "extra", "request", "keep"} == set(SamplingParams.__dataclass_fields__)
    assert not {*OWN} & {*SERVER}
    assert {*SYNONYMS.values()} <= {*OWN}
    assert not {*REFUSED} & {*OWN, *SERVER, *SYNONYMS}


def test_an_explicit_extra_passes_through_and_joins_what_only_the_server_knows():
    given = {"extra": {"brand_new": [1], "stop": "END"}, "no_stop_trim": True, "max_tokens": 9}
    params = sampling_params({**given, "logit_bias": {"3": 1}})
    others = {"no_stop_trim": True, "logit_bias": {"3": 1}}
    assert params.extra == {"brand_new": [1], "stop": "END", **others}
    assert given["extra"] == {"brand_new": [1], "stop": "END"}


@each_row("stop", ["<end>", ["<end>"], ("<end>",)])
def test_a_stop_string_of_one_token_becomes_its_id(stop: object):
    params = sampling_params({"stop": stop, "stop_token_ids": [5]}, tokenizer=Letters())
    assert params.stop_token_ids == (5, 999)


@each_row(
    ("given", "part"),
    [
        ({"n": 4}, "set group_size"),
        ({"best_of": 4}, "accept="),
        ({"beam_width": 4}, "beam search"),
        ({"logprobs": True}, "leave it out"),
        ({"stream": True}, "leave it out"),
        ({"max_tokens": 5, "max_new_tokens": 5}, "Both max_tokens and max_new_tokens"),
        ({"seed": 5, "sampling_seed": 6}, "Both seed and sampling_seed"),
        ({"temprature": 1.0}, "did you mean temperature?"),
        ({"max_toknes": 5}, "did you mean max_tokens?"),
        ({"xyzzy": 5}, "put it into extra"),
        ({"regex": "a", "extra": {"regex": "b"}}, "regex is given twice"),
        ({"extra": {"max_new_tokens": 5}}, "extra holds max_new_tokens"),
        ({"stop": "<end>"}, "there is no tokenizer"),
        ({"max_tokens": "5"}, "max_tokens is '5' (str); give a whole number"),
        ({"max_tokens": 5.0}, "max_tokens is 5.0 (float); give a whole number"),
        ({"max_tokens": True}, "max_tokens is True (bool); give a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot' (str); give a finite number"),
        ({"temperature": float("nan")}, "temperature is nan (float); give a finite number"),
        ({"ignore_eos": 1}, "ignore_eos is 1 (int); give True or False"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12' (str); give a list of token ids"),
        ({"stop_token_ids": 1.5}, "stop_token_ids is 1.5 (float); give a list of token ids"),
        ({"regex": ["a" * 99]}, "... (list); give a string"),
        ({"stop": 5}, "stop is 5 (int); give a string or a list of strings"),
        ({"stop": [5]}, "stop is [5] (list); give a string or a list of strings"),
        ({"extra": 5}, "extra is 5 (int); give a mapping"),
        ({"max_tokens": 0}, "at least 1 token"),
        ({"stop": "ab"}, "'ab' is 2 tokens, not one; give the ids"),
        ([("max_tokens", 5)], "give a mapping"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(given: Any, part: str):
    tokenizer = Letters() if given == {"stop": "ab"} else None
    with pytest.raises(ConfigError) as caught:
        sampling_params(given, tokenizer=tokenizer)
    message = str(caught.value)
    assert part in message
    assert message[-1] in ".?"
    assert "\n" not in message


def test_numpys_scalars_and_arrays_become_plain():
    made: Any = SamplingParams(
        max_new_tokens=np.int64(20),  # type: ignore[arg-type]
        min_new_tokens=np.uint8(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=1,
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        sampling_seed=np.int32(7),  # type: ignore[arg-type]
        extra={"frequency_penalty": np.float64(0.1), "logit_bias": {np.int64(5): (1, np.ones(2))}},
    )
    assert made == SamplingParams(
        max_new_tokens=20,
        min_new_tokens=2,
        temperature=0.5,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        sampling_seed=7,
        extra={"frequency_penalty": 0.1, "logit_bias": {"5": [1, [1.0, 1.0]]}},
    )
    assert type(made.max_new_tokens) is int
    assert type(made.top_p) is float
    assert type(made.ignore_eos) is bool
    assert msgspec.json.encode(made)


@each_row(
    "fields",
    [
        {"max_new_tokens": 20.5},
        {"max_new_tokens": True},
        {"max_new_tokens": "20"},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1j},
        {"top_p": None},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": [0.5]},
        {"stop_token_ids": [1, True]},
        {"stop_token_ids": [1, 2**31]},
        {"stop_token_ids": [1, -(2**31)]},
        {"ignore_eos": 1},
        {"sampling_seed": 0.5},
        {"extra": [1]},
        # A class and not an object, whose name would have its address: the processes that share
        # the tests must agree on their names.
        {"extra": {"x": object}},
        {"extra": {"x": {1, 2}}},
        {"extra": {"x": math.nan}},
        {"extra": {"x": 2**70}},
        {"extra": {"x": {(1, 2): 3}}},
        {"extra": {"x": b"bytes"}},
    ],
    ids=str,
)
def test_what_no_engine_understands_is_refused_where_it_is_made(fields: dict[str, Any]):
    with pytest.raises(ConfigError):
        SamplingParams(**fields)


def test_token_ids_must_be_one_row():
    for ids in ([[1], [2, 3]], [1.5], [], [[1]], "abc", [None]):
        with pytest.raises(ConfigError):
            Prompt(input_ids=ids)  # type: ignore[arg-type]


@each_row("value", [object(), "\ud800"], ids=["object", "surrogate"])
def test_a_body_that_cannot_be_written_is_a_refusal_of_its_request(value: Any):
    transport = Transport(
        "a", URL("http://127.0.0.1:1"), admin_key=None, api_key=None, limits=HttpLimits()
    )
    with pytest.raises(EngineRejected, match="cannot be written as JSON") as caught:
        transport.stream("generate", {"sampling_params": {"x": value}})
    assert caught.value.status == 400


def test_fields_of_a_request_are_plain_and_the_schedulers_own_are_refused():
    params = sampling_params({"request": {"priority": np.int64(3)}, "keep": ["hidden_states"]})
    assert params == SamplingParams(request={"priority": 3}, keep=("hidden_states",))
    assert params.after(5).request == {"priority": 3}
    for name, instead in (
        ("input_ids", "leave it out"),
        ("rid", "leave it out"),
        ("return_routed_experts", "ask for it in companions"),
        ("image_data", "give media of Prompt"),
    ):
        with pytest.raises(ConfigError, match=f"request holds {name}, .* {instead}"):
            SamplingParams(request={name: 1})
    wrong: list[Any] = [{"request": 3}, {"request": {"a": object()}}, {"keep": "hidden_states"}]
    for given in wrong:
        with pytest.raises(ConfigError, match=r"request|keep"):
            SamplingParams(**given)


def test_media_are_checked_when_they_are_made():
    wrong: list[Any] = [("picture", "a.png"), ("image", ""), ("image", 7)]
    for given in wrong:
        with pytest.raises(ConfigError, match=r"media has the kind|the source of image"):
            Media(*given)
    some: Any = ["a.png"]
    with pytest.raises(ConfigError, match=r"give a tuple of Media"):
        Prompt(input_ids=np.array([1]), media=some)
    listed: Any = [Media("image", "a.png")]
    assert Prompt(input_ids=np.array([1]), media=listed).media == (Media("image", "a.png"),)


@each_row("digits", [20, 400])
@each_row("name", ["max_tokens", "min_tokens", "top_k", "seed", "stop_token_ids"])
def test_numbers_that_no_engine_can_hold_are_refused(name: str, digits: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at most"):
        sampling_params({name: 10**digits})
    own: Any = {SYNONYMS.get(name, name): 10**digits}
    if name != "stop_token_ids":
        with pytest.raises(ConfigError, match="must be at most"):
            SamplingParams(**own)
    with pytest.raises(ConfigError, match=r"must have whole numbers below 2\*\*63"):
        SamplingParams(request={"priority": 10**digits})


def test_the_largest_numbers_of_engines_are_taken() -> None:
    assert sampling_params({"seed": 2**63 - 1}).sampling_seed == 2**63 - 1
    assert sampling_params({"max_tokens": 2**31 - 1}).max_new_tokens == 2**31 - 1
    with pytest.raises(ConfigError, match="temperature is"):
        sampling_params({"temperature": 10**400})
