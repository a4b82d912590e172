"""Runs the generate and agent functions of slime and miles users, each in a session.

- A function of ``--custom-generate-function-path`` sends its requests to the router in its
  arguments. It receives a copy of the arguments with the address of a session as the router, so
  each of its requests becomes a turn of the rollout.
- An agent of miles (``--custom-agent-function-path``) receives the URL of a session in place of
  that of miles' session server.

The function's samples provide status, reward, metadata and loss mask of the rollout. The tokens are
those that were sampled in the session.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np

from aprilsched.agents.sessions import Session
from aprilsched.errors import ConfigError, EpisodeError, MemberLost
from aprilsched.types import Int32Array, Prompt, SamplingParams

log = logging.getLogger("aprilsched")

_AGENTS = "miles.rollout.generate_hub.agentic_tool_call.generate"
"""The function of miles that calls agents. Its work is the session's here."""
_SESSION_SERVER = ("session_server_ip", "session_server_ports")
_REQUEST = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
}
"""Sampling parameters that a chat may have, with their names there."""
_OWN_ADDRESS = "let it use the arguments of each call, and keep no address from an earlier one"


def uses_functions(args: Any) -> bool:
    """Return whether functions of the user generate the rollouts, of training or evaluation.

    Raises:
        ConfigError: if the arguments ask for something that sessions do not have.
    """
    if getattr(args, "custom_agent_function_path", None) is not None:
        if getattr(args, "max_seq_len", None) is not None:
            raise ConfigError(
                "--max-seq-len is set, and a session cuts no tokens away; set sessions: {limits: "
                "{tokens: …}} under aprilsched, or --rollout-max-response-len."
            )
        return True
    asked: list[Any] = [args, *(getattr(args, "eval_datasets", None) or ())]
    return any(getattr(each, "custom_generate_function_path", None) for each in asked)


class GenerateFunctions:
    """Runs the functions, each with its sample.

    Args:
        args: the trainer's arguments.
        trainer: the trainer's modules.
        samples: the samples of each group, by the key of its prompt.
        tokenizer: the trainer's tokenizer of the model.
    """

    def __init__(
        self, args: Any, trainer: Any, samples: Mapping[int | str, list[Any]], tokenizer: Any
    ) -> None:
        self._args, self._trainer, self._tokenizer = args, trainer, tokenizer
        self._samples = samples
        self.made: dict[int | str, dict[int, Any]] = {}
        """What the functions have returned, by the key of the prompt and the place in its group."""
        self._differ = False
        self._at_work: dict[Session, Int32Array] = {}
        """The prompts of the sessions whose functions are at work."""

    def forget(self, live: Collection[Any]) -> None:
        """Forget what was returned for other keys than these."""
        for key in [key for key in self.made if isinstance(key, int) and key not in live]:
            del self.made[key]

    async def harness(self, session: Session, prompt: Prompt) -> None:
        """Drive a rollout by the function of its sample."""
        session.check = lambda asked: self._check_own(asked, prompt.input_ids)
        self._at_work[session] = prompt.input_ids
        try:
            await self._drive(session, prompt)
        finally:
            del self._at_work[session]

    def _check_own(self, asked: Int32Array, prompt: Int32Array) -> None:
        """Reject a request whose prompt belongs to another sample.

        A function whose prompt differs from its sample's is detected only when it has returned and
        its own session has received no request.
        """
        others = self._at_work.values()
        if not _begins(asked, prompt) and any(_begins(asked, each) for each in others):
            raise ConfigError(
                f"the request starts with the prompt of another sample; {_OWN_ADDRESS}."
            )

    async def _drive(self, session: Session, prompt: Prompt) -> None:
        key: Any = prompt.key
        sample = copy.deepcopy(self._samples[key][session.index])
        path = sample.generate_function_path or self._args.custom_generate_function_path
        agent = getattr(self._args, "custom_agent_function_path", None)
        if path in (None, _AGENTS) and agent is not None:
            work = self._ask_agent(agent, sample, session)
        elif path is not None:
            work = self._call(path, sample, session, evaluation=isinstance(key, str))
        else:
            await session.complete(prompt.input_ids.tolist())
            return
        made = _one(await self._trainer.on_its_loop(work), path)
        if made.status.value == "aborted":
            raise MemberLost(f"{path or agent} has aborted sample {sample.index}")
        if not session.turns:
            raise EpisodeError(
                f"{path or agent} has asked nothing at the address that it was given; "
                f"{_OWN_ADDRESS}."
            )
        self.made.setdefault(key, {})[session.index] = made

    async def _call(self, path: str, sample: Any, session: Session, *, evaluation: bool) -> Any:
        """Call a function as the trainer does, on the trainer's event loop."""
        args = copy.copy(self._args)
        url = urlsplit(session.open_url)
        # They write http://IP:PORT/generate.
        args.sglang_router_ip = url.hostname
        args.sglang_router_port = f"{url.port or 80}{url.path}"
        for name in _SESSION_SERVER:
            if hasattr(args, name):
                setattr(args, name, None)
        given = _sampling_of(session.sampling)
        if (load := self._trainer.generate_loader) is not None:
            state = SimpleNamespace(
                args=args, tokenizer=self._tokenizer, sampling_params=dict(given), aborted=False
            )
            asked = self._trainer.outputs.GenerateFnInput(
                state=state, sample=sample, sampling_params=given, evaluation=evaluation
            )
            return (await load(path)(asked)).samples
        function = self._trainer.load(path)
        if "evaluation" in inspect.signature(function).parameters:
            return await function(args, sample, given, evaluation=evaluation)
        return await function(args, sample, given)

    async def _ask_agent(self, path: str, sample: Any, session: Session) -> Any:
        """Call an agent as miles does, on its event loop."""
        given = _sampling_of(session.sampling)
        try:
            returned = await self._trainer.load(path)(
                base_url=session.open_url,
                prompt=sample.prompt,
                request_kwargs={
                    name: given[own] for own, name in _REQUEST.items() if given.get(own) is not None
                },
                metadata={**sample.metadata, "session_server_id": urlsplit(session.url).netloc},
            )
        except Exception as error:
            # As in miles, the turns before the failure are a sample.
            if not session.turns:
                raise
            log.warning("the agent of sample %s has failed: %s", sample.index, error)
            returned = None
        sample.metadata.update(returned or {})
        return sample

    def settle(self, sample: Any, made: Any) -> None:
        """Put what a function has returned into `sample`, which has the tokens of the session."""
        tokens, mask = list(made.tokens), made.loss_mask
        common = min(len(tokens), len(sample.tokens))
        if tokens[:common] != sample.tokens[:common]:
            if not self._differ:
                self._differ = True
                log.warning(
                    "sample %s has other tokens than were sampled for it, since its function makes "
                    "tokens of text again; those that were sampled are trained on",
                    sample.index,
                )
        elif mask is not None:
            # Both end with the response, and the function may have added a last result.
            offset, own = len(sample.tokens) - sample.response_length, len(tokens) - len(mask)
            sample.loss_mask = [
                int(each and (not own <= place < len(tokens) or bool(mask[place - own])))
                for place, each in enumerate(sample.loss_mask, offset)
            ]
        if made.status.value != "pending":
            sample.status = made.status
        sample.reward = made.reward


def _begins(asked: Int32Array, prompt: Int32Array) -> bool:
    return np.array_equal(asked[: len(prompt)], prompt)


def _one(made: Any, path: str | None) -> Any:
    """Return the sample that was returned, perhaps in a list."""
    several: list[Any] = cast("list[Any]", made) if isinstance(made, list) else [made]
    if len(several) != 1:
        raise EpisodeError(
            f"{path} returned {len(several)} samples, and a rollout is one sample here; return one."
        )
    return several[0]


def _sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters as both trainers give them to functions."""
    given: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        **sampling.extra,
    }
    if sampling.sampling_seed is not None:
        given["sampling_seed"] = sampling.sampling_seed
    return given
