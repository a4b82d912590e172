"""A trainer with vLLM's own end of the transfer; the server environment's Python runs it.

``transfer_trainer.py PACKAGES URL MODEL…`` publishes each model's weights as the next version, and
prints a JSON line for each: the version that the server then has, and a greedy response under it.
PACKAGES is a folder with what aprilsched needs and the environment does not have.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

    import over_gloo
    import torch
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer import base, factory, ipc_engine

    from aprilsched import VLLMPublisher
    from aprilsched.engines.vllm import VLLMEngine
    from aprilsched.testing.contract import greedy, whole
    from aprilsched.weights import vllm_transfer

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
                told = {
                    "outcomes": {name: error and str(error) for name, error in outcomes.items()},
                    "version": await engine.version(),
                    "ids": stream.ids,
                    "logprobs": stream.logprobs.tolist(),
                }
                print(json.dumps(told), flush=True)
        finally:
            await engine.close()

    async def hold_to_signatures() -> None:
        """What cannot run without a GPU is at least called as vLLM defines it."""
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
        # The handles as this client sends them, and as vLLM's server reads them.
        sent: list[dict] = []
        client._each = lambda call: call(_Taker(sent))
        handles = {"GPU-1": ("rebuild", 7)}
        client.update_weights(
            {"names": ["a"], "dtype_names": ["float32"], "shapes": [[3]], "ipc_handles": handles}
        )
        assert ipc_engine.IPCWeightTransferUpdateInfo(**sent[0]).ipc_handles == handles

    class _Taker:
        def __init__(self, sent: list[dict]) -> None:
            self.sent = sent

        def receive_transfer(self, info: dict) -> None:
            self.sent.append(json.loads(json.dumps(info)))

    over_gloo.install()
    asyncio.run(hold_to_signatures())
    asyncio.run(publish(sys.argv[2], sys.argv[3:]))
