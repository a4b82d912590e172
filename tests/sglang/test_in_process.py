"""Tests SGLang inside of the scheduler's process, in a process with SGLang's own packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from aprilsched import SGLangInProcessFleet
from aprilsched.errors import ConfigError, MissingExtra
from aprilsched.testing.contract import ALL_CHECKS, Check
from tests.sglang.server import run_with_server_packages


def run(what: str, *parameters: object) -> None:
    run_with_server_packages("in_process", what, *parameters, purpose="in_process")


@pytest.mark.long
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_of_an_engine(models: tuple[Path, Path], check: Check) -> None:
    run("contract", check.__name__, *models)


@pytest.mark.long
def test_it_takes_weights_from_the_memory_of_this_process(models: tuple[Path, Path]) -> None:
    run("tensors", *models)


@pytest.mark.long
def test_tokens_have_the_versions_of_the_weights_that_sampled_them(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    run("versions", *models, tmp_path)


@pytest.mark.long
def test_it_starts_again_after_its_processes_were_killed(models: tuple[Path, Path]) -> None:
    run("loss", models[0])


@pytest.mark.long
def test_a_start_that_fails_leaves_nothing(models: tuple[Path, Path]) -> None:
    run("failed_start", models[0])


def test_it_needs_an_engine_or_the_arguments_for_one() -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        SGLangInProcessFleet()
    with pytest.raises(ConfigError, match="give one of the two"):
        SGLangInProcessFleet(object(), model_path="/model")


async def test_without_sglang_the_error_says_what_to_do() -> None:
    fleet = SGLangInProcessFleet(model_path="/model")
    with pytest.raises(MissingExtra, match=r"pip install .*\[sglang\]"):
        await fleet.open()
