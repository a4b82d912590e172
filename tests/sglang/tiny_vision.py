"""A tiny random Idefics3, which understands images; module_runner.py runs it.

``main("write", DIRECTORY, SEED)`` writes one in the Hugging Face layout, with its tokenizer and
its processor. ``main("score", IN.npz, IMAGE, MODEL, OUT.npz, …)`` gives every sequence of IN, int64
with the image's placeholder as the chat template writes it, the log-probability of each token after
the first four, which are the prompt.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

from pathlib import Path

import numpy as np

IMAGE, AROUND, GLOBAL = 508, 509, 510
PLACES = 4
PROMPT = (5, IMAGE, 7, 8)
VOCAB_SIZE = 512


def write(directory: str, seed: str) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    torch.manual_seed(int(seed))
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words = [f"t{number}" for number in range(IMAGE)] + special
    spelled = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="t3"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spelled,
        unk_token="t3",
        eos_token="t0",
        bos_token="t1",
        pad_token="t2",
        additional_special_tokens=special,
    )
    sizes = {"num_hidden_layers": 2, "initializer_range": 0.2}
    config = Idefics3Config(
        vision_config={
            **sizes,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        text_config={
            **sizes,
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
            "bos_token_id": 1,
            "pad_token_id": 2,
        },
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=2,
    )
    model = Idefics3ForConditionalGeneration(config).to(torch.float32)
    model.save_pretrained(directory)
    size = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=PLACES).save_pretrained(directory)


def score(source: str, image: str, *models_and_targets: str) -> None:
    import torch
    from PIL import Image
    from transformers import Idefics3ForConditionalGeneration
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    expanded = [AROUND, GLOBAL, *[IMAGE] * PLACES, AROUND]
    for path, target in zip(models_and_targets[::2], models_and_targets[1::2], strict=True):
        model = Idefics3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        processor = Idefics3Processor.from_pretrained(path)
        pixels = processor.image_processor([Image.open(image)], return_tensors="pt")
        found = {}
        with torch.no_grad():
            for name, ids in np.load(source).items():
                row = [PROMPT[0], *expanded, *ids[2:].tolist()]
                told = torch.tensor([row])
                output = model(input_ids=told, **pixels)
                logprobs = output.logits[0].double().log_softmax(-1)[:-1]
                picked = logprobs.gather(1, told[0, 1:, None])[:, 0].numpy()
                found[name] = picked[len(row) - (len(ids) - len(PROMPT)) - 1 :]
        np.savez(Path(target), **found)


def main(what: str, *arguments: str) -> None:
    {"write": write, "score": score}[what](*arguments)
