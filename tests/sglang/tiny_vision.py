"""Tiny random models that understand images; module_runner.py runs it.

``main("write", KIND, DIRECTORY, SEED)`` writes one in the Hugging Face layout, with its tokenizer
and its processor. ``main("score", KIND, IN.npz, IMAGES, MODEL, OUT.npz, …)`` gives every sequence
of IN, int64 with the placeholders of the images in the folder IMAGES as the chat template writes
them, the log-probability of each token after its first.

SGLang has no Idefics3. Qwen2-VL needs torchvision, which the environment of vLLM lacks.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 512
SIDE = 56
"""Pixels of an image's side; no processor changes its size."""
_PLACES = 4
_ENDS = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
_LAYERS = {"num_hidden_layers": 2, "initializer_range": 0.2}


@dataclass(frozen=True)
class Kind:
    """A family of models.

    Attributes:
        special: its tokens, which are the last ones of the vocabulary.
        image: the placeholder of an image.
        prompt: a prompt with one image.
        places: what the placeholder becomes.
        biased: whether the server's log-probabilities are those after a `logit_bias`.
    """

    special: tuple[str, ...]
    image: int
    prompt: tuple[int, ...]
    places: tuple[int, ...]
    biased: bool

    @property
    def never(self) -> dict[str, int]:
        """The `logit_bias` with which none of its tokens is sampled: a server would take them for
        places of media."""
        return {str(VOCAB_SIZE - 1 - i): -100 for i in range(len(self.special))}


KINDS = {
    "idefics3": Kind(
        special=("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        image=508,
        prompt=(5, 508, 7, 8),
        places=(509, 510, *[508] * _PLACES, 509),
        biased=False,
    ),
    "qwen2_vl": Kind(
        special=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
        image=509,
        prompt=(5, 508, 509, 510, 7, 8),
        places=(509,) * _PLACES,
        biased=True,
    ),
}


def write(kind: str, directory: str, seed: str) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(int(seed))
    special = list(KINDS[kind].special)
    words = [f"t{number}" for number in range(VOCAB_SIZE - len(special))] + special
    spelled = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="t3"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spelled.decoder = decoders.Fuse()  # SGLang finds a placeholder by its text, without spaces
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spelled,
        unk_token="t3",
        eos_token="t0",
        bos_token="t1",
        pad_token="t2",
        additional_special_tokens=special,
    )
    model, processor = {"idefics3": _idefics3, "qwen2_vl": _qwen2_vl}[kind](tokenizer)
    model.to(torch.float32).save_pretrained(directory)
    processor.save_pretrained(directory)


def _text(**more: Any) -> dict[str, Any]:
    return {
        **_LAYERS,
        **_ENDS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **more,
    }


def _idefics3(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    config = Idefics3Config(
        vision_config={
            **_LAYERS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": SIDE // 4,
        },
        text_config=_text(model_type="llama", head_dim=32),
        image_token_id=KINDS["idefics3"].image,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=2,
    )
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=_PLACES)
    return Idefics3ForConditionalGeneration(config), processor


def _qwen2_vl(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": SIDE // 4,
            "in_chans": 3,
            "initializer_range": 0.2,
        },
        text_config=_text(rope_parameters=rope),
        vision_start_token_id=508,
        image_token_id=509,
        vision_end_token_id=510,
        video_token_id=511,
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    images, videos = Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor(size=size)
    return Qwen2VLForConditionalGeneration(config), Qwen2VLProcessor(images, tokenizer, videos)


def score(name: str, source: str, images: str, *models_and_targets: str) -> None:
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    kind, bias = KINDS[name], torch.zeros(VOCAB_SIZE)
    if kind.biased:
        for token, value in kind.never.items():
            bias[int(token)] = value
    shown = [Image.open(path) for path in sorted(Path(images).iterdir())]
    for path, target in zip(models_and_targets[::2], models_and_targets[1::2], strict=True):
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        processor = AutoProcessor.from_pretrained(path).image_processor
        given = processor(shown, return_tensors="pt")
        found = {}
        with torch.no_grad():
            for each, ids in np.load(source).items():
                parts = [kind.places if one == kind.image else (one,) for one in ids.tolist()]
                received = torch.tensor([sum(parts, ())])
                if name == "qwen2_vl":
                    given["mm_token_type_ids"] = (received == kind.image).int()
                logits = model(input_ids=received, **given).logits[0].double() + bias
                picked = logits.log_softmax(-1)[:-1].gather(1, received[0, 1:, None])[:, 0].numpy()
                starts = np.cumsum([len(part) for part in parts])[:-1]
                found[each] = picked[starts - 1]
        np.savez(Path(target), **found)


def main(what: str, *arguments: str) -> None:
    {"write": write, "score": score}[what](*arguments)
