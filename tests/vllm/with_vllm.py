"""What needs vLLM and aprilsched in one process; the server environment's Python runs it.

``with_vllm.py PACKAGES URL MODEL…`` holds aprilsched to vLLM's own protocols. Then it is a trainer
with vLLM's own end of the transfer: it publishes each model's weights as the next version, and
prints a JSON line for each: the version that the server then has, and a greedy response under it.
PACKAGES is a folder with what aprilsched needs and the environment does not have.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

    import numpy as np
    import over_gloo
    import torch
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer import base, factory, ipc_engine
    from vllm.entrypoints.scale_out.token_in_token_out import protocol
    from vllm.outputs import WeightVersionSpan
    from vllm.utils.serial_utils import numpy2base64

    from aprilsched import Media, SamplingParams, VLLMPublisher
    from aprilsched.kernel.engines.base import GenerationRequest
    from aprilsched.kernel.engines.vllm import VLLMEngine
    from aprilsched.kernel.engines.vllm.tokens_api import EventReader, generate_body
    from aprilsched.kernel.values.companions import Companion, routed_experts
    from aprilsched.kernel.weights import vllm_transfer
    from aprilsched.testing.contract import greedy, whole

    async def publish(url: str, models: list[str]) -> None:
        engine = VLLMEngine(url)
        await engine.open()
        trained = [models[0]]
        publisher = VLLMPublisher(
            lambda: load_file(Path(trained[-1]) / "model.safetensors").items(),
            bucket_bytes=100_000,
        )
        try:
            for version, model in enumerate(models, 1):
                trained.append(model)
                await publisher.prepare(version)
                await engine.pause("retract")
                await engine.flush()
                outcomes = await publisher.publish(version, [engine])
                await engine.resume()
                stream = await whole(engine, greedy(100))
                received = {
                    "outcomes": {name: error and str(error) for name, error in outcomes.items()},
                    "version": await engine.version(),
                    "ids": stream.ids,
                    "logprobs": stream.logprobs.tolist(),
                }
                print(json.dumps(received), flush=True)
        finally:
            await engine.close()

    async def hold_to_signatures() -> None:
        """Check calls that need a GPU against the signatures of vLLM."""
        client = vllm_transfer._Client([])
        for name, method in inspect.getmembers(base.VLLMWeightSyncClient, inspect.isfunction):
            if not name.startswith("_"):
                own = inspect.signature(getattr(client, name)).parameters
                assert list(own) == list(inspect.signature(method).parameters)[1:], name
        given = factory.WeightTransferTrainerFactory.trainer_init
        inspect.signature(given).bind(object(), client=client, source=object())
        source = vllm_transfer._source(lambda: [])
        publisher = VLLMPublisher(lambda: [], backend="ipc")
        meta = base.ParamMeta("a", torch.float32, (3, 5))
        info = publisher._init_info(client, [meta])
        assert (info.rank, info.packed, info.backend) == (0, True, "ipc")
        assert isinstance(info, ipc_engine.IPCTrainerInitInfo)
        assert source.metadata() == []
        # The handles as sent by this client, and as read by vLLM's server.
        sent: list[dict] = []
        client._each = lambda call: call(_Taker(sent))
        handles = {"GPU-1": ("rebuild", 7)}
        client.update_weights(
            {"names": ["a"], "dtype_names": ["float32"], "shapes": [[3]], "ipc_handles": handles}
        )
        assert ipc_engine.IPCWeightTransferUpdateInfo(**sent[0]).ipc_handles == handles

    def hold_to_the_token_endpoint() -> None:
        """Return a request with media and companions, and the last event of its response."""
        experts = routed_experts(layers=3, per_token=2, experts=300)
        asked = GenerationRequest(
            request_id="r",
            input_ids=np.array([5, 6, 7], np.int32),
            sampling=SamplingParams(max_new_tokens=2, top_k=4, extra={"logit_bias": {"9": -100}}),
            companions=((experts, 2), (Companion("sampling_mask"), 0)),
            media=(Media("image", b"bytes"),),
        )
        body = protocol.GenerateRequest.model_validate(generate_body(asked, stream_interval=8))
        assert body.sampling_params.routed_experts_prompt_start == 2
        assert body.sampling_params.logit_bias == {9: -100}
        assert [part["type"] for part in body.content_parts] == ["image_url"]
        rows = np.arange(12, dtype=np.uint16).reshape(2, 3, 2) + 250
        content = [
            protocol.GenerateLogProbsContent(token_id=token, logprob=-1.0) for token in (8, 9)
        ]
        choice = protocol.GenerateTokensStreamChoice(
            index=0,
            finish_reason="length",
            token_ids=[8, 9],
            routed_experts=numpy2base64(rows),
            sampling_mask=[[8], [9, 4]],
            weight_versions=[WeightVersionSpan(version="3", start=0, end=2)],
            logprobs=protocol.GenerateLogProbs(content=content),
        )
        event = protocol.GenerateTokensStreamResponse(request_id="r", choices=[choice])
        chunk = EventReader("e", asked).feed(event.model_dump_json().encode())
        assert chunk.spans[0].version == 3
        assert np.array_equal(chunk.context_rows["routed_experts"].values, rows)
        assert chunk.token_rows["sampling_mask"].row(1).tolist() == [9, 4]

    class _Taker:
        def __init__(self, sent: list[dict]) -> None:
            self.sent = sent

        def receive_transfer(self, info: dict) -> None:
            self.sent.append(json.loads(json.dumps(info)))

    over_gloo.install()
    hold_to_the_token_endpoint()
    asyncio.run(hold_to_signatures())
    asyncio.run(publish(sys.argv[2], sys.argv[3:]))
