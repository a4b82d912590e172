"""A trainer that sends only what changed to two servers, one of which misses versions.

``sparse_trainer.py PACKAGES FOLDER MODEL MODEL URL URL`` runs under the server environment's
Python. Each version has some elements of the second model and the others of the first; its
checkpoint is FOLDER/VERSION. A JSON line for each version: what was sent, and a greedy response of
every server under it.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

    import over_gloo
    import torch
    from safetensors.torch import load_file, save_file

    from aprilsched import VLLMPublisher
    from aprilsched.kernel.engines.vllm import VLLMEngine
    from aprilsched.testing.contract import greedy, whole

    async def train(folder: Path, models: list[str], urls: list[str]) -> None:
        engines = [VLLMEngine(url) for url in urls]
        for engine in engines:
            await engine.open()
        first, second = (load_file(Path(model) / "model.safetensors") for model in models)
        weights = {name: tensor.clone() for name, tensor in first.items()}
        publisher = VLLMPublisher(weights.items, backend="sparse_nccl", bucket_bytes=200_000)
        generator = torch.Generator().manual_seed(0)

        async def update(version: int, share: float, takers: list[Any], what: str = "") -> None:
            for name, tensor in weights.items():
                chosen = torch.rand(tensor.shape, generator=generator) < share
                source = second[name] if version % 2 else first[name]
                tensor[chosen] = source[chosen]
            save_file(weights, folder / f"{version}.safetensors")
            (folder / str(version)).mkdir()
            (folder / f"{version}.safetensors").rename(folder / f"{version}/model.safetensors")
            shutil.copy(Path(models[0]) / "config.json", folder / str(version))
            started = time.perf_counter()
            await publisher.prepare(version)
            prepared = time.perf_counter()
            for engine in takers:
                await engine.pause("retract")
                await engine.flush()
            patches, paused = publisher._patches, time.perf_counter()
            outcomes = await publisher.publish(version, takers)
            ended = time.perf_counter()
            row: dict[str, Any] = {
                "version": version,
                "share": share,
                "what": what,
                "found": sum(p.indices.nbytes + p.values.nbytes for p in patches or ()),
                "sent": publisher.sent_bytes,
                "bytes": sum(tensor.nbytes for tensor in weights.values()),
                "prepare_s": prepared - started,
                "publish_s": ended - paused,
                "responses": [],
            }
            assert not any(outcomes.values()), outcomes
            for engine in takers:
                await engine.resume()
                stream = await whole(engine, greedy(60))
                assert await engine.version() == version
                row["responses"].append([stream.ids, stream.logprobs.tolist()])
            print(json.dumps(row), flush=True)

        await update(1, 0.5, engines, "first")
        await update(2, 0.01, engines)
        await update(3, 0.03, engines)
        await update(4, 0.3, engines)
        await update(5, 0.01, engines[:1], "without the second")
        await update(6, 0.03, engines[:1])
        await update(7, 0.01, engines, "the second missed two")
        await update(8, 0.03, engines)
        await engines[1].pause("retract")
        await engines[1].update_from_disk(Path(models[1]), 99)
        await update(9, 0.01, engines, "another client loaded the second")
        await update(10, 0.0, engines, "nothing changed")
        for engine in engines:
            await engine.close()

    over_gloo.install()
    _, _, folder, first_model, second_model, *addresses = sys.argv
    asyncio.run(train(Path(folder), [first_model, second_model], addresses))
