"""Expected embeddings of MiniLM, computed with the transformer blocks of calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from slidesparse.calibrate.models import open_model
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.checkpoint.tokens import tokenizer_of
from slidesparse.quantize import INT8, dequantize_rows, quantize_rows


@torch.inference_mode()
def embeddings(original: Path, dense: Path, sentences: tuple[str, ...]) -> np.ndarray:
    """Return normalized means of the last hidden states, [sentences, hidden].

    ``dense`` is the INT8 checkpoint in dense layout that was converted from ``original``.  Each linear layer rounds its
    inputs as vLLM does on a CPU.
    """
    model, codes, encode = (
        open_model(Checkpoint.open(original)),
        load_file(dense / "model.safetensors"),
        tokenizer_of(original),
    )
    samples = [torch.tensor(encode(sentence)) for sentence in sentences]
    with model.checkpoint.reader() as reader:
        states = [model.embedder(reader, samples, torch.device("cpu"))(sample[None]) for sample in samples]
        for number in range(model.blocks):
            block = model.load(reader, number, torch.device("cpu"))
            for layer in model.linears(number):
                weight = dequantize_rows(codes[f"{layer}.weight"], codes[f"{layer}.weight_scale"])
                block.weights[f"{layer.removeprefix(model.prefix(number))}.weight"] = weight
            block.read = lambda _, x: dequantize_rows(*quantize_rows(x[0], INT8, "cpu"))[None]
            states = [block.output(x) for x in states]
    means = torch.stack([x[0].mean(0) for x in states])
    return torch.nn.functional.normalize(means, dim=-1).numpy()


def assert_served(actual: np.ndarray, expected: np.ndarray) -> None:
    """Check that most embeddings equal the expected ones to some digits.

    Another summation order changes a code by one occasionally, which the following layers amplify.  This changes the
    cosine of single sentences by less than the 0.003 that INT8 activations cost the unpruned model on average; pruning
    alone moves the embeddings to 0.93.  On a GPU the layers between the linear ones compute in BF16.
    """
    cosines = (actual * expected).sum(-1)
    assert cosines.min() > 0.99
    assert torch.cuda.is_available() or float(np.median(cosines)) > 0.9998
