"""How much arithmetic a model's training takes, and how much a device can do.

The share of the second that the first uses is called MFU: it tells how well a device is used,
whatever the model.
"""

from __future__ import annotations

import torch

from regard.models import Transformer

PEAKS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40": 1.81e14,
    "4090": 1.65e14,
    "V100": 1.25e14,
}
"""Dense half-precision operations a second that makers name, by a word of the device's name."""


def count_flops(model: Transformer) -> float:
    """Operations that one token takes in training, without attention's scores: 6 a weight.

    The table counts as the output layer it is; looking a row up costs nothing.
    """
    inner = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    output = 0 if model.head is None else model.head.weight.numel()
    return 6.0 * (inner + output)


def peak_flops(device: torch.device) -> float | None:
    """What the device could do in a second; None where nobody knows."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAKS.items() if word in name), None)
